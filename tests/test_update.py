"""The update: one division, whatever the split; exact AdamW; sharded like unsharded; compiled once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg import algorithms
from jaxpg.estimators import aggregate, kl, logprobs, losses
from jaxpg.models import Config, Model
from jaxpg.parallel import sharding
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_passes, make_update, take_rows
from jaxpg.types import Batch, Weighted

MODEL = Model(
    Config(
        vocab_size=8, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=16, max_length=16
    )
)
AGGREGATES = {
    "token_mean": aggregate.token_mean,
    "sequence_mean_token_mean": aggregate.sequence_mean_token_mean,
    "sequence_mean_token_sum": aggregate.sequence_mean_token_sum,
    "constant_length": lambda x, mask: aggregate.constant_length(x, mask, length=5),
}


def policy(params, batch):
    logits = MODEL.logits(params, batch.tokens, batch.token_mask)
    return logprobs.token_log_probs(logits, batch.tokens), logprobs.entropy(logits)


def make_batch(rows=8, length=9):
    """Rows of very different lengths, one of them without any action."""
    keys = jax.random.split(jax.random.key(5), 3)
    lengths = jnp.arange(rows) % 6
    column = jnp.arange(length)
    action_mask = (column >= 3) & (column < 3 + lengths[:, None])
    return Batch(
        tokens=jax.random.randint(keys[0], (rows, length), 0, 8),
        token_mask=(column < 3) | action_mask,
        action_mask=action_mask,
        log_probs=-jax.random.uniform(keys[1], (rows, length)),
        advantages=jnp.broadcast_to(jax.random.normal(keys[2], (rows, 1)), (rows, length)),
    )


def clip_algorithm(reduce):
    return algorithms.Algorithm(
        advantage=None,
        loss=lambda log_probs, batch: losses.ppo_clip(log_probs, batch.log_probs, batch.advantages),
        aggregate=reduce,
    )


def bigram_policy(table, batch):
    """A policy that compiles in no time: the next token's logits are a row of its table."""
    logits = table[batch.tokens]
    return logprobs.token_log_probs(logits, batch.tokens), logprobs.entropy(logits)


def gradient_of(reduce, batch, num_microbatches):
    """The mean gradient, kept whole by an optimizer: a difference of parameters would add their rounding."""
    params = jax.random.normal(jax.random.key(0), (8, 8))
    optimizer = optax.trace(decay=0.0)
    state = train_state.init(params, optimizer, jax.random.key(0))
    loss_fn = algorithms.make_loss_fn(clip_algorithm(reduce), bigram_policy)
    after, metrics = jax.jit(make_update(loss_fn, optimizer, num_microbatches=num_microbatches))(state, batch)
    return after.opt_state.trace, metrics


@pytest.mark.parametrize("name", AGGREGATES)
def test_gradient_and_metrics_do_not_depend_on_microbatches(name):
    batch = make_batch()
    whole, whole_metrics = gradient_of(AGGREGATES[name], batch, 1)
    for count in (2, 4, 8):
        parts, metrics = gradient_of(AGGREGATES[name], batch, count)
        distance = optax.tree.norm(optax.tree.sub(parts, whole)) / optax.tree.norm(whole)
        # Rounding of products whose shapes differ: 1e-7 with jax 0.10, 8e-7 with jax 0.12.
        assert distance < 2e-6
        for key, value in whole_metrics.items():
            np.testing.assert_allclose(metrics[key].mean, value.mean, rtol=2e-5, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", AGGREGATES)
def test_gradient_does_not_depend_on_row_order_or_right_padding(name):
    batch = make_batch()
    whole, _ = gradient_of(AGGREGATES[name], batch, 1)
    order = jnp.array([3, 1, 7, 0, 2, 6, 5, 4])
    garbage = dataclasses.replace(
        jax.tree.map(lambda x: jnp.pad(x[order], ((0, 0), (0, 2))), batch),
        log_probs=jnp.pad(batch.log_probs[order], ((0, 0), (0, 2)), constant_values=jnp.nan),
    )
    moved, _ = gradient_of(AGGREGATES[name], garbage, 1)
    assert optax.tree.norm(optax.tree.sub(moved, whole)) / optax.tree.norm(whole) < 1e-5


def test_worked_token_mean_over_microbatches_is_not_the_mean_of_means():
    """Micro-batches [1,1,1,1] and [5]: token mean 1.8, never 3.0."""
    batch = Batch(
        tokens=jnp.zeros((2, 4), jnp.int32),
        token_mask=jnp.ones((2, 4), bool),
        action_mask=jnp.array([[True] * 4, [True, False, False, False]]),
        advantages=jnp.array([[1.0] * 4, [5.0] * 4]),
    )

    def loss_fn(params, part):
        return aggregate.token_mean(params * part.advantages, part.action_mask), {}

    state = train_state.init(jnp.float32(1.0), optax.sgd(1.0), jax.random.key(0))
    for count in (1, 2):
        after, metrics = make_update(loss_fn, optax.sgd(1.0), num_microbatches=count)(state, batch)
        np.testing.assert_allclose(metrics["loss"].mean, 1.8, rtol=1e-6)
        np.testing.assert_allclose(1.0 - after.params, 1.8, rtol=1e-6)


def test_a_batch_without_actions_leaves_finite_parameters_unchanged():
    batch = dataclasses.replace(make_batch(), action_mask=jnp.zeros((8, 9), bool))
    for reduce in AGGREGATES.values():
        gradient, metrics = gradient_of(reduce, batch, 2)
        assert optax.tree.norm(gradient) == 0.0
        assert jnp.isfinite(metrics["loss"].mean)


RATIOS = {
    "surrogate": losses.surrogate,
    "ppo_clip": losses.ppo_clip,
    "sapo": losses.sapo,
    "kl_to_the_old_policy": lambda lp, old, a: (losses.reinforce(lp, a)[0] + kl.k3(old, lp), {}),
}


@pytest.mark.parametrize("name", RATIOS)
def test_one_token_with_a_huge_log_ratio_spoils_no_update(name):
    """The gradient is that of the other tokens; without a bound the loss was infinite and the update was skipped."""
    batch, params = make_batch(), jax.random.normal(jax.random.key(0), (8, 8))
    log_probs = bigram_policy(params, batch)[0]
    batch = dataclasses.replace(batch, log_probs=log_probs - 0.1, advantages=-jnp.abs(batch.advantages))
    assert batch.action_mask[5, 4]
    broken = dataclasses.replace(batch, log_probs=batch.log_probs.at[5, 4].set(log_probs[5, 4] - 200.0))
    if name == "kl_to_the_old_policy":  # whose token is one that the old policy found far more likely
        broken = dataclasses.replace(batch, log_probs=batch.log_probs.at[5, 4].set(log_probs[5, 4] + 200.0))
    optimizer = optax.trace(decay=0.0)
    algorithm = algorithms.Algorithm(
        advantage=None,
        loss=lambda lp, b: RATIOS[name](lp, b.log_probs, b.advantages),
        aggregate=aggregate.token_mean,
    )
    update = jax.jit(make_update(algorithms.make_loss_fn(algorithm, bigram_policy), optimizer))
    state = train_state.init(params, optimizer, jax.random.key(0))
    after, metrics = update(state, broken)
    assert metrics["nonfinite"].mean == 0 and np.isfinite(metrics["loss"].mean)
    assert np.isfinite(after.params).all() and np.any(after.params != params)

    def objective(params, kept):
        loss = algorithm.loss(jnp.where(batch.action_mask, bigram_policy(params, batch)[0], 0.0), batch)[0]
        return aggregate.token_mean(loss * kept, batch.action_mask).mean

    kept = jnp.ones(batch.tokens.shape).at[5, 4].set(0.0)
    expected = jax.grad(objective)(params, kept)
    if name == "kl_to_the_old_policy":  # the score-function term has no ratio and stays
        weight = batch.action_mask.sum()
        one = jax.grad(lambda p: -bigram_policy(p, batch)[0][5, 4] * batch.advantages[5, 4] / weight)(params)
        expected = expected + one
    np.testing.assert_allclose(after.opt_state.trace, expected, rtol=1e-4, atol=1e-6)


def test_clipping_and_adamw_are_those_of_optax():
    optimizer = adamw(1e-2, max_grad_norm=0.5, weight_decay=0.1)
    state = train_state.init(jnp.array([3.0, -4.0]), optimizer, jax.random.key(0))

    def loss_fn(params, batch):
        return Weighted(jnp.sum(params**2), jnp.float32(2.0)), {}

    after, metrics = make_update(loss_fn, optimizer)(state, Batch(*[jnp.zeros((2, 1))] * 3))
    np.testing.assert_allclose(metrics["grad_norm"].mean, 5.0, rtol=1e-6)
    # The first Adam step is lr · sign(gradient), and decay takes lr · 0.1 · params.
    np.testing.assert_allclose(after.params, [3.0 - 0.01 - 0.003, -4.0 + 0.01 + 0.004], rtol=1e-5)
    assert after.step == 1


def test_sharded_update_equals_the_plain_one_and_compiles_once():
    batch = make_batch()
    optimizer = adamw(1e-2)
    update = make_update(algorithms.make_loss_fn(clip_algorithm(aggregate.token_mean), policy), optimizer)

    def init():
        return train_state.init(MODEL.init(jax.random.key(0)), optimizer, jax.random.key(0))

    plain, plain_metrics = jax.jit(update)(jax.jit(init)(), batch)
    for spec in ("data=8", "fsdp=8", "data=2,fsdp=4", "data=2,fsdp=2,tensor=2"):
        mesh = sharding.make_mesh(spec)
        with jax.set_mesh(mesh):
            places = sharding.shardings(mesh, jax.eval_shape(init))
            sharded = jax.jit(update, out_shardings=(places, sharding.replicated(mesh)), donate_argnums=0)
            state = jax.jit(init, out_shardings=places)()
            assert state.opt_state[1][0].mu["embedding"].sharding == state.params["embedding"].sharding
            placed = sharding.put_rows(mesh, batch)
            state, metrics = sharded(state, placed)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, plain.params)
            for name, value in plain_metrics.items():
                np.testing.assert_allclose(metrics[name].mean, value.mean, rtol=1e-5, atol=1e-6, err_msg=name)
            sharded(state, placed)
            assert sharded._cache_size() == 1


def test_impossible_splits_are_named():
    with pytest.raises(ValueError, match="num_microbatches=3 does not divide the 8 rows"):
        gradient_of(aggregate.token_mean, make_batch(), 3)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        make_update(None, None, num_microbatches=0)
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        adamw(1e-3, max_grad_norm=0)
    with pytest.raises(ValueError, match=r"jax.random.key\(seed\)"):
        train_state.init({}, optax.sgd(1.0), jnp.zeros(2, jnp.uint32))


def test_passes_are_updates_on_reshuffled_minibatches():
    """Every row once a pass, in an order of its own; the same updates as one after the other."""
    batch = dataclasses.replace(make_batch(), values=jnp.arange(8.0)[:, None])
    params = jax.random.normal(jax.random.key(0), (8, 8))
    optimizer = optax.sgd(0.1)
    loss_fn = algorithms.make_loss_fn(clip_algorithm(aggregate.token_mean), bigram_policy)

    def update(state, part):
        state, metrics = make_update(loss_fn, optimizer)(state, part)
        seen = jnp.zeros(8).at[part.values[:, 0].astype(int)].set(1.0)
        return state, {"loss": metrics["loss"], "rows": Weighted(seen, jnp.float32(1))}

    state, key = train_state.init(params, optimizer, jax.random.key(0)), jax.random.key(3)
    whole, metrics = jax.jit(make_passes(update, epochs=3, minibatches=4))(state, batch, key)
    np.testing.assert_array_equal(metrics["rows"].total, np.full(8, 3.0))
    assert metrics["rows"].weight == 12

    one = jax.jit(lambda state, k, i: update(state, take_rows(batch, jax.random.fold_in(key, k), i, count=4)))
    orders, total = [], 0.0
    for k in range(3):
        for i in range(4):
            state, row = one(state, k, i)
            orders.append(tuple(row["rows"].total.tolist()))
            total += row["loss"].total
    assert len(set(orders)) > 4  # not the same four minibatches in each pass
    np.testing.assert_allclose(whole.params, state.params, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"].total, total, rtol=1e-5)
    assert whole.step == state.step == 12


def test_passes_refuse_what_does_not_divide():
    state = train_state.init({}, optax.sgd(1.0), jax.random.key(0))
    with pytest.raises(ValueError, match="minibatches=3 does not divide the 8 rows"):
        make_passes(None, minibatches=3)(state, make_batch(), jax.random.key(0))
    with pytest.raises(ValueError, match="epochs=0: must be at least 1"):
        make_passes(None, epochs=0)
