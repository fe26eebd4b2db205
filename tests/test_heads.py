"""Value and reward heads: aligned, padding-invariant, float32, and trained by the losses that reach them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg.algorithms.algorithm import Algorithm, Critic, make_loss_fn
from jaxpg.estimators import aggregate, logprobs, losses, preference, value_losses
from jaxpg.models import Config, Model, heads
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch

SIZES = {"vocab_size": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 4, "mlp_size": 16, "max_length": 16}
MODEL = Model(Config(**SIZES))
HIDDEN = jax.jit(MODEL.hidden)
INIT = jax.jit(MODEL.init)


def algorithm(policy_coef=1.0, value_coef=1.0):
    """An actor-critic whose two losses can be switched off."""
    return Algorithm(
        advantage=None,
        loss=lambda log_probs, batch: (policy_coef * losses.reinforce(log_probs, batch.advantages)[0], {}),
        aggregate=aggregate.token_mean,
        critic=Critic(
            targets=None, loss=lambda values, batch: value_losses.squared(values, batch.returns), coef=value_coef
        ),
    )


def shared_policy(params, batch):
    hidden = MODEL.hidden(params["model"], batch.tokens, batch.token_mask)
    log_probs, entropy = logprobs.from_hidden(partial(MODEL.unembed, params["model"]), hidden, batch.tokens)
    return log_probs, entropy, heads.values(params["value_head"], hidden)


def separate_policy(params, batch):
    actor, critic = params["actor"], params["critic"]
    hidden = MODEL.hidden(actor, batch.tokens, batch.token_mask)
    log_probs, entropy = logprobs.from_hidden(partial(MODEL.unembed, actor), hidden, batch.tokens)
    hidden = MODEL.hidden(critic["trunk"], batch.tokens, batch.token_mask)
    return log_probs, entropy, heads.values(critic["head"], hidden)


def shared_params(scale=1.0):
    return {"model": INIT(jax.random.key(0)), "value_head": heads.init(jax.random.key(1), 16, scale=scale)}


def separate_params(scale=1.0):
    params = shared_params(scale)
    trunk = jax.tree.map(jnp.copy, params["model"])
    return {"actor": params["model"], "critic": {"trunk": trunk, "head": params["value_head"]}}


def make_batch(rows=4, length=8):
    keys = jax.random.split(jax.random.key(5), 3)
    column = jnp.arange(length)
    action_mask = (column >= 3) & (column < 5 + jnp.arange(rows)[:, None])
    return Batch(
        tokens=jax.random.randint(keys[0], (rows, length), 0, 8),
        token_mask=(column < 3) | action_mask,
        action_mask=action_mask,
        advantages=jax.random.normal(keys[1], (rows, length)),
        returns=1.0 + jax.random.normal(keys[2], (rows, length)),
    )


def gradients(policy, params):
    """Of both losses, of the policy's alone and of the critic's alone."""
    batch = make_batch()

    @jax.jit
    def of(params, *coefs):
        return jax.grad(lambda params: make_loss_fn(algorithm(*coefs), policy)(params, batch)[0].mean)(params)

    total, policy_part, value_part = (of(params, *coefs) for coefs in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)))
    jax.tree.map(lambda t, p, v: np.testing.assert_allclose(t, p + v, atol=1e-5), total, policy_part, value_part)
    return policy_part, value_part


def test_worked_example():
    """Values come from the token before, rewards from the last real token, whatever the padding."""
    head = {"kernel": jnp.array([1.0, 10.0]), "bias": jnp.float32(0.5)}
    hidden = jnp.array([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]] * 4)
    np.testing.assert_array_equal(heads.values(head, hidden)[0], [0.0, 1.5, 2.5])
    mask = jnp.array([[True, True, True], [True, True, False], [False, True, False], [False, False, False]])
    np.testing.assert_array_equal(heads.rewards(head, hidden, mask), [10.5, 2.5, 2.5, 0.0])


def test_zero_scale_says_zero_and_scale_is_a_standard_deviation():
    hidden = jax.random.normal(jax.random.key(2), (64, 9, 256))
    zero = heads.init(jax.random.key(0), 256)
    assert not heads.values(zero, hidden).any()
    drawn = heads.values(heads.init(jax.random.key(0), 256, scale=0.1), hidden)[:, 1:]
    assert 0.08 < jnp.std(drawn) < 0.12


def test_a_value_knows_the_tokens_before_and_no_others():
    params, batch = shared_params(), make_batch()
    everywhere = jnp.ones_like(batch.token_mask)

    def values(tokens):
        return heads.values(params["value_head"], HIDDEN(params["model"], tokens, everywhere))

    moved = values(batch.tokens.at[:, 4].add(1) % 8) != values(batch.tokens)
    assert not moved[:, :5].any() and moved[:, 5:].all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    params, batch = shared_params(), make_batch()
    tokens, mask = batch.tokens, jnp.ones_like(batch.token_mask)
    pad = ((0, 0), (3, 0) if side == "left" else (0, 3))
    padded_mask = jnp.pad(mask, pad)
    hidden = HIDDEN(params["model"], tokens, mask)
    padded = HIDDEN(params["model"], jnp.pad(tokens, pad, constant_values=7), padded_mask)
    np.testing.assert_allclose(
        heads.rewards(params["value_head"], padded, padded_mask),
        heads.rewards(params["value_head"], hidden, mask),
        atol=1e-5,
    )
    found = heads.values(params["value_head"], padded)[padded_mask].reshape(mask.shape)
    np.testing.assert_allclose(found[:, 1:], heads.values(params["value_head"], hidden)[:, 1:], atol=1e-5)


def test_both_losses_train_a_shared_trunk():
    policy, value = gradients(shared_policy, shared_params())
    for part in (policy, value):
        assert optax.tree.norm(part["model"]["layers"]) > 1e-3
    assert optax.tree.norm(policy["value_head"]) == 0 and optax.tree.norm(value["value_head"]) > 1e-3


def test_each_loss_trains_its_own_trunk():
    policy, value = gradients(separate_policy, separate_params())
    assert optax.tree.norm(policy["actor"]) > 1e-3 and optax.tree.norm(policy["critic"]) == 0
    assert optax.tree.norm(value["actor"]) == 0 and optax.tree.norm(value["critic"]["trunk"]["layers"]) > 1e-3


def test_a_zero_head_learns_its_targets():
    optimizer = adamw(3e-2)
    update = jax.jit(
        make_update(make_loss_fn(algorithm(policy_coef=0.0), separate_policy), optimizer), donate_argnums=0
    )
    state = train_state.init(separate_params(scale=0.0), optimizer, jax.random.key(0))
    state, first = update(state, make_batch())
    for _ in range(60):
        state, last = update(state, make_batch())
    assert last["loss"].mean < 0.05 * first["loss"].mean


def test_a_reward_model_learns_a_preference():
    """Longer rows of the same tokens are preferred."""
    params, batch = shared_params(scale=0.0), make_batch()
    masks = [jnp.arange(8) < n + jnp.zeros((4, 1), int) for n in (7, 4)]

    def loss_fn(params):
        chosen, rejected = (
            heads.rewards(params["value_head"], MODEL.hidden(params["model"], batch.tokens, mask), mask)
            for mask in masks
        )
        loss, aux = preference.bradley_terry(chosen, rejected)
        return loss.mean(), aux["correct"]

    optimizer = adamw(1e-2)
    opt_state = optimizer.init(params)
    step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (first, _), grads = step(params)
    np.testing.assert_allclose(first, np.log(2), rtol=1e-6)
    for _ in range(30):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        (last, correct), grads = step(params)
    assert correct.all() and last < 0.1


def test_heads_are_float32_on_a_bfloat16_trunk():
    model = Model(Config(**SIZES, compute_dtype="bfloat16"))
    params, batch = shared_params(), make_batch()
    hidden = model.hidden(params["model"], batch.tokens, batch.token_mask)
    assert hidden.dtype == jnp.bfloat16
    values = heads.values(params["value_head"], hidden)
    scores = heads.rewards(params["value_head"], hidden, batch.token_mask)
    assert values.dtype == scores.dtype == jnp.float32
    head = jax.tree.map(lambda x: np.asarray(x, np.float64), params["value_head"])
    expected = np.asarray(hidden, np.float64) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(values[:, 1:], expected[:, :-1], rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_named():
    head = heads.init(jax.random.key(0), 4)
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3, 5\), the head's kernel \(4,\)"):
        heads.values(head, jnp.zeros((2, 3, 5)))
    with pytest.raises(ValueError, match="token_mask has dtype int32: must be bool"):
        heads.rewards(head, jnp.zeros((2, 3, 4)), jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="hidden_size=0"):
        heads.init(jax.random.key(0), 0)
    with pytest.raises(ValueError, match="scale=-1"):
        heads.init(jax.random.key(0), 4, scale=-1)
