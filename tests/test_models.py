"""The Transformer: the cache equals the full pass, padding changes nothing, remat and dtype keep their promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.models import Config, Model, num_parameters

CONFIG = Config(
    vocab_size=19, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48, max_length=32
)


def make(**changes):
    model = Model(dataclasses.replace(CONFIG, **changes))
    return model, model.init(jax.random.key(1))


def draw_tokens(rows, length):
    return jax.random.randint(jax.random.key(2), (rows, length), 0, CONFIG.vocab_size)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_decoding_equals_the_full_pass(tied, kv_heads):
    model, params = make(tie_embeddings=tied, num_kv_heads=kv_heads)
    tokens = draw_tokens(6, 12).reshape(2, 3, 12)
    tokens = tokens.at[:, :, :5].set(tokens[:, :1, :5])  # three samples share each prompt
    prompts, rows = tokens[:, 0, :5], tokens.reshape(6, 12)
    # The second prompt is a token shorter, padded on the left.
    prompt_mask = jnp.ones((2, 5), bool).at[1, 0].set(False)
    mask = jnp.concatenate([jnp.repeat(prompt_mask, 3, axis=0), jnp.ones((6, 7), bool)], axis=1)
    full = jax.jit(model.logits)(params, rows, mask)

    logits, cache = model.prefill(params, prompts, prompt_mask, samples_per_prompt=3, slots=7)
    np.testing.assert_allclose(jnp.repeat(logits, 3, axis=0), full[:, 4], atol=1e-5)
    decode = jax.jit(model.decode)
    for t in range(5, 12):
        logits, cache = decode(params, rows[:, t], cache)
        np.testing.assert_allclose(logits, full[:, t], atol=1e-5)
    assert cache.prompt_keys.shape[1] == 2, "the prompt's cache is stored once per prompt"


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_changes_nothing(side):
    model, params = make()
    tokens, mask = draw_tokens(3, 8), jnp.ones((3, 8), bool)
    where = {"left": 0, "right": 8, "inside": 4}[side]
    plain = model.logits(params, tokens, mask)
    for amount in (1, 5):
        pad = np.full((3, amount), 7)
        padded = jnp.asarray(np.insert(np.asarray(tokens), [where] * amount, pad, axis=1))
        padded_mask = jnp.asarray(np.insert(np.asarray(mask), [where] * amount, False, axis=1))
        logits = model.logits(params, padded, padded_mask)
        assert jnp.isfinite(logits).all()
        np.testing.assert_allclose(logits[padded_mask].reshape(plain.shape), plain, atol=1e-5)


def test_no_token_sees_the_future():
    model, params = make()
    tokens, mask = draw_tokens(2, 8), jnp.ones((2, 8), bool)
    changed = tokens.at[:, 5].add(1) % CONFIG.vocab_size
    before, after = model.logits(params, tokens, mask), model.logits(params, changed, mask)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


def test_remat_changes_no_gradient():
    tokens, mask = draw_tokens(2, 8), jnp.ones((2, 8), bool)
    grads = []
    for remat in (False, True):
        model, params = make(remat=remat)
        grads.append(jax.jit(jax.grad(lambda p, m=model: m.logits(p, tokens, mask).var()))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *grads)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters_and_logits():
    model, params = make()
    half = Model(dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
    tokens, mask = draw_tokens(2, 8), jnp.ones((2, 8), bool)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.init(jax.random.key(1)))} == {jnp.dtype("float32")}
    assert half.hidden(params, tokens, mask).dtype == jnp.bfloat16
    logits = half.logits(params, tokens, mask)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, model.logits(params, tokens, mask), atol=0.05)


def test_parameters_are_a_plain_dict_of_the_expected_size():
    _, params = make()
    per_layer = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48 + 2 * 32
    assert num_parameters(params) == 3 * per_layer + 19 * 32 + 32
    assert type(params) is dict and type(params["layers"]) is dict


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"compute_dtype": "int8"}, "compute_dtype='int8'"),
    ],
)
def test_impossible_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
