"""The attention kernels give the same numbers, windows and soft-capping included; no softmax is over nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.models import Config, Model
from jaxpg.parallel import sharding

CONFIG = Config(
    vocab_size=19, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48, max_length=256
)
VARIANTS = {
    "plain": {},
    "window": {"window": 5},
    "local and global": {"window": 5, "local_layers": (True, False), "local_rope_base": 100.0},
    "softcap": {"attention_softcap": 2.0, "query_scale": 0.5},
}


def inputs(length=40):
    tokens = jax.random.randint(jax.random.key(2), (4, length), 0, CONFIG.vocab_size)
    mask = np.ones((4, length), bool)
    mask[1, :7] = mask[2, -9:] = False  # padding left and right
    return tokens, jnp.asarray(mask)


def value_and_grad(config, params, tokens, mask):
    """The mean of a function of all logits at real tokens, and its gradient."""
    model = Model(config)

    def loss(params):
        return jnp.where(mask[..., None], jnp.square(jax.nn.log_softmax(model.logits(params, tokens, mask))), 0).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("variant", ["local and global", "softcap"])  # interpreting a kernel takes half a minute
def test_splash_attention_equals_xla_in_value_and_gradient(variant):
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    params = Model(config).init(jax.random.key(0))
    expected = value_and_grad(config, params, *inputs())
    found = value_and_grad(dataclasses.replace(config, attention="splash"), params, *inputs())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), found, expected)


def test_splash_attention_runs_on_every_device_of_a_mesh_and_over_rows_without_tokens():
    params, (tokens, mask) = Model(CONFIG).init(jax.random.key(0)), inputs(20)
    mask = mask.at[0].set(False)
    expected = jax.jit(Model(CONFIG).logits)(params, tokens, mask)
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.shardings(mesh, params))
        rows = jax.device_put((tokens, mask), sharding.rows(mesh))
        found = jax.jit(Model(dataclasses.replace(CONFIG, attention="splash")).logits)(params, *rows)
    assert jnp.isfinite(found).all()
    np.testing.assert_allclose(found[mask], expected[mask], atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_through_the_cache_equals_the_full_pass(variant):
    model = Model(dataclasses.replace(CONFIG, **VARIANTS[variant]))
    params = model.init(jax.random.key(0))
    tokens, mask = inputs(16)
    tokens, mask = tokens[:2].repeat(2, axis=0), mask[:2].repeat(2, axis=0)  # two samples of each prompt
    full = jax.jit(model.logits)(params, tokens, mask)
    logits, cache = model.prefill(params, tokens[::2, :10], mask[::2, :10], samples_per_prompt=2, slots=6)
    decode = jax.jit(model.decode)
    for t in range(10, 16):
        np.testing.assert_allclose(logits if t > 10 else logits.repeat(2, 0), full[:, t - 1], atol=1e-5)
        logits, cache = decode(params, tokens[:, t], cache)


def test_a_window_forgets_what_lies_before_it():
    model = Model(dataclasses.replace(CONFIG, window=4, num_layers=1))
    params = model.init(jax.random.key(0))
    tokens, mask = inputs(12)
    before = model.logits(params, tokens, jnp.ones_like(mask))
    after = model.logits(params, tokens.at[:, 3].add(1) % CONFIG.vocab_size, jnp.ones_like(mask))
    np.testing.assert_array_equal(before[:, 7:], after[:, 7:])
    assert jnp.abs(before[:, 3:7] - after[:, 3:7]).max(axis=(0, 2)).min() > 1e-4


def test_an_all_masked_row_stays_finite():
    tokens, mask = inputs(9)
    config = dataclasses.replace(CONFIG, num_layers=1)
    value, grads = value_and_grad(config, Model(config).init(jax.random.key(0)), tokens, mask.at[0].set(False))
    assert jnp.isfinite(value) and all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_cudnn_refuses_soft_capping():
    with pytest.raises(ValueError, match="attention='cudnn' has no attention_softcap"):
        dataclasses.replace(CONFIG, attention="cudnn", attention_softcap=1.0)
