"""TRPO: the dense natural gradient, the constraint on every problem, the line search, what it ignores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg.estimators import aggregate
from jaxpg.parallel import sharding
from jaxpg.training import train_state, trust_region
from jaxpg.types import Batch

VOCAB, FEATURES = 5, 6
# Features of the current token alone, so that a row may be moved and padded on either side.
TABLE = np.random.default_rng(0).normal(size=(VOCAB, FEATURES))
AGGREGATES = [aggregate.token_mean, aggregate.sequence_mean_token_mean, aggregate.sequence_mean_token_sum]


def logits_fn(params, batch):
    """A linear softmax policy of 30 parameters."""
    return jnp.asarray(TABLE, params["w"].dtype)[batch.tokens] @ params["w"]


def make_params(seed=0, dtype=np.float32, size=1.0):
    return {"w": (size * np.random.default_rng(100 + seed).normal(size=(FEATURES, VOCAB))).astype(dtype)}


def make_batch(seed=0, rows=8, length=7, scale=1.0, dtype=np.float32):
    """Rows of different lengths, one of them without any action; log-probs near those of `make_params(seed)`."""
    rng = np.random.default_rng(seed)
    column, lengths = np.arange(length), np.arange(rows) % 5
    action_mask = (column >= 2) & (column < 2 + lengths[:, None])
    advantages = (scale * rng.normal(size=(rows, length))).astype(dtype)
    tokens = rng.integers(0, VOCAB, (rows, length))
    batch = Batch(tokens, (column < 2) | action_mask, action_mask, advantages=advantages)
    log_probs = oracle_log_probs(make_params(seed), batch)[0] + 0.1 * rng.normal(size=(rows, length))
    return jax.tree.map(jnp.asarray, dataclasses.replace(batch, log_probs=log_probs.astype(dtype)))


def make_state(params):
    return train_state.init(jax.tree.map(jnp.asarray, params), optax.adam(1e-3), jax.random.key(3), kl_coef=0.5)


@functools.cache
def jitted(logits_fn, **keywords):
    return jax.jit(trust_region.make_update(logits_fn, **keywords))


def step(batch, params=None, logits_fn=logits_fn, **keywords):
    """One update; metrics as numbers."""
    after, metrics = jitted(logits_fn, **keywords)(make_state(make_params() if params is None else params), batch)
    return after, {name: float(value.mean) for name, value in metrics.items()}


def flat(tree):
    return np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(tree)])


def distance(a, b):
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))


def assert_same_metrics(a, b, rtol):
    for name in set(a) - {"cg_residual"}:  # with few iterations left, rounding is all of it
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=1e-6, err_msg=name)


def oracle_log_probs(params, batch, temperature=1.0):
    """Log-prob of each token, and of all tokens in its place, by numpy in float64; meaningless at t = 0."""
    tokens = np.asarray(batch.tokens)
    logits = TABLE[np.roll(tokens, 1, axis=1)] @ np.asarray(params["w"], float) / temperature
    everything = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    return np.take_along_axis(everything, tokens[..., None], -1)[..., 0], everything


def oracle_kl_and_surrogate(params, old_params, batch, temperature=1.0):
    mask = np.asarray(batch.action_mask)
    log_probs, new = oracle_log_probs(params, batch, temperature)
    _, old = oracle_log_probs(old_params, batch, temperature)
    ratio = np.exp(log_probs - np.asarray(batch.log_probs, float))
    divergence = np.sum(np.exp(old) * (old - new), -1)
    return divergence[mask].mean(), (ratio * np.asarray(batch.advantages, float))[mask].mean()


def oracle_gradient_and_fisher(params, batch, temperature=1.0):
    """g and F from the scores ∇log p(v) of all tokens at all actions, outer product by outer product."""
    mask, tokens = np.asarray(batch.action_mask), np.asarray(batch.tokens)
    log_probs, everything = oracle_log_probs(params, batch, temperature)
    gradient, fisher = np.zeros(FEATURES * VOCAB), np.zeros((FEATURES * VOCAB,) * 2)
    for row, t in np.argwhere(mask):
        p = np.exp(everything[row, t])
        scores = [np.outer(TABLE[tokens[row, t - 1]], np.eye(VOCAB)[v] - p).ravel() / temperature for v in range(VOCAB)]
        ratio = np.exp(log_probs[row, t] - float(batch.log_probs[row, t]))
        gradient += ratio * float(batch.advantages[row, t]) * scores[tokens[row, t]]
        fisher += sum(p[v] * np.outer(scores[v], scores[v]) for v in range(VOCAB))
    return gradient / mask.sum(), fisher / mask.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_step_is_the_dense_natural_gradient(temperature, x64):
    batch, params, damping, max_kl = make_batch(dtype=np.float64), make_params(dtype=np.float64), 1e-3, 1e-5
    gradient, fisher = oracle_gradient_and_fisher(params, batch, temperature)
    damped = fisher + damping * np.eye(gradient.size)
    direction = np.linalg.solve(damped, gradient)
    expected = np.sqrt(2 * max_kl / (direction @ damped @ direction)) * direction
    keywords = {"max_kl": max_kl, "damping": damping, "temperature": temperature}
    after, metrics = step(batch, params, cg_iterations=60, cg_tolerance=1e-9, **keywords)
    assert (metrics["accepted"], metrics["backtracks"]) == (1, 0)
    moved = flat(after.params) - flat(params)
    assert distance(moved, expected) < 1e-6
    # A step that forgot the Fisher matrix would be far off: this problem can tell.
    assert distance(np.linalg.norm(expected) * gradient / np.linalg.norm(gradient), expected) > 0.1
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-6)
    np.testing.assert_allclose(metrics["step_norm"], np.linalg.norm(moved), rtol=1e-5)
    before, later = (oracle_kl_and_surrogate(p, params, batch, temperature) for p in (params, after.params))
    np.testing.assert_allclose(metrics["kl"], later[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["surrogate_gain"], later[1] - before[1], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -before[1], rtol=1e-6)
    # Few iterations report the residual that they left.
    found = trust_region.conjugate_gradient(lambda v: damped @ v, jnp.asarray(gradient), iterations=4)
    residual = np.linalg.norm(gradient - damped @ found.x) / np.linalg.norm(gradient)
    assert residual > 1e-3
    np.testing.assert_allclose(step(batch, params, cg_iterations=4, **keywords)[1]["cg_residual"], residual, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fisher_vector_product_is_that_of_the_dense_matrix(temperature, x64):
    batch, params = make_batch(dtype=np.float64), make_params(dtype=np.float64)
    _, fisher = oracle_gradient_and_fisher(params, batch, temperature)
    old_logits = logits_fn(params, batch)

    def kl_fn(p):
        divergence = trust_region.token_kl(old_logits, logits_fn(p, batch), temperature=temperature)
        return aggregate.token_mean(divergence, batch.action_mask).mean

    for seed in range(3):
        v = np.random.default_rng(seed).normal(size=(FEATURES, VOCAB))
        product = trust_region.fisher_vector_product(kl_fn, jax.tree.map(jnp.asarray, params), {"w": jnp.asarray(v)})
        np.testing.assert_allclose(flat(product), fisher @ v.ravel(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("max_kl", [0.01, 0.5])
def test_kl_never_exceeds_its_bound_and_the_surrogate_never_falls(max_kl):
    accepted = backtracked = 0
    for seed in range(40):
        batch, params = make_batch(seed, scale=10.0 ** (seed % 12 - 3)), make_params(seed, size=1 + seed % 4)
        after, metrics = step(batch, params, max_kl=max_kl)
        divergence, surrogate = oracle_kl_and_surrogate(after.params, params, batch)
        _, before = oracle_kl_and_surrogate(params, params, batch)
        assert divergence <= max_kl * (1 + 1e-4)
        np.testing.assert_allclose(metrics["kl"], divergence, rtol=1e-3, atol=1e-6)
        assert surrogate > before if metrics["accepted"] else distance(after.params, params) == 0
        accepted += metrics["accepted"]
        backtracked += metrics["backtracks"] > 0
    assert accepted >= 38
    assert backtracked >= 5  # else the line search has not been seen at work


def test_the_scale_of_advantages_does_not_matter():
    """Squares of these gradients are past the ends of float32; powers of 2 scale without rounding."""
    batch = make_batch()
    reference, _ = step(batch)
    for scale in (2.0**-90, 8.0, 2.0**90):
        after, metrics = step(dataclasses.replace(batch, advantages=scale * batch.advantages))
        assert metrics["accepted"] == 1
        assert distance(after.params, reference.params) < 1e-6


def bandit_logits(params, batch):
    return jnp.broadcast_to(params, (*batch.tokens.shape, 4))


def bandit_batch(arms, advantages, probs):
    """A prompt token (0) and the arm that was drawn, a row each."""
    tokens, advantages, log_probs = (
        np.stack([np.zeros_like(x), x], axis=1) for x in (arms, np.float32(advantages), np.log(np.float32(probs)[arms]))
    )
    mask = np.array([[False, True]] * len(arms))
    return jax.tree.map(jnp.asarray, Batch(tokens, np.ones_like(mask), mask, log_probs, advantages=advantages))


def test_backtracks_are_counted_where_the_quadratic_model_is_too_long():
    """A sure policy that is to forget its arm: the KL grows much faster than its curvature at 0 says."""
    logits = np.array([6.0, 0, 0, 0], np.float32)
    batch = bandit_batch(np.array([1, 1]), [1.0, 1.0], jax.nn.softmax(logits))
    keywords = {"logits_fn": bandit_logits, "max_kl": 0.5, "damping": 1e-6, "backtrack": 0.7}
    after, metrics = step(batch, logits, **keywords)
    assert metrics["accepted"] == 1 and metrics["backtracks"] > 0 and 0 < metrics["kl"] <= 0.5
    # One trial less would have been outside: the search stops at the first step that fits.
    longer = logits + (flat(after.params) - logits) / 0.7
    old, new = (np.exp(x) / np.exp(x).sum() for x in (logits.astype(float), longer))
    assert np.sum(old * np.log(old / new)) > 0.5
    refused, none = step(batch, logits, max_backtracks=int(metrics["backtracks"]) - 1, **keywords)
    np.testing.assert_array_equal(refused.params, logits)
    assert none["accepted"] == none["kl"] == none["surrogate_gain"] == none["step_norm"] == 0
    assert none["backtracks"] == metrics["backtracks"] - 1


def test_a_step_that_never_improves_is_refused_at_every_length():
    """The gradient of this policy has the wrong sign, so every step lowers the surrogate."""

    def lying_logits(params, batch):
        return bandit_logits(params - 2 * jax.lax.stop_gradient(params), batch)

    logits = np.array([0.4, -0.2, 0.1, 0.0], np.float32)
    batch = bandit_batch(np.array([1, 2]), [1.0, -1.0], np.full(4, 0.25))
    after, metrics = step(batch, logits, lying_logits, max_backtracks=3)
    np.testing.assert_array_equal(after.params, logits)
    assert (metrics["accepted"], metrics["backtracks"], metrics["grad_norm"] > 0) == (0, 3, True)


def test_steps_solve_a_bandit():
    """One arm of four pays: 40 steps of 0.02 nats from a policy that prefers another."""
    update = jitted(bandit_logits, max_kl=0.02)
    state = make_state(np.array([1.0, 0, 0, 0], np.float32))
    for k in range(40):
        probs = np.asarray(jax.nn.softmax(state.params), float)
        arms = np.random.default_rng(k).choice(4, size=64, p=probs / probs.sum())
        rewards = (arms == 2).astype(float)
        state, _ = update(state, bandit_batch(arms, rewards - rewards.mean(), probs))
    assert jax.nn.softmax(state.params)[2] > 0.9


def nothing(name):
    """A problem without anything to learn."""
    batch, params = make_batch(), make_params()
    action = tuple(np.argwhere(batch.action_mask)[0])
    changes = {
        "zero advantages": {"advantages": jnp.zeros_like(batch.advantages)},
        "no action": {"action_mask": jnp.zeros_like(batch.action_mask)},
        "NaN advantage": {"advantages": batch.advantages.at[action].set(jnp.nan)},
        "NaN log-prob": {"log_probs": batch.log_probs.at[action].set(jnp.nan)},
    }
    if name == "NaN parameter":
        params["w"][0, 0] = np.nan
    return dataclasses.replace(batch, **changes.get(name, {})), params


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", ["zero advantages", "no action", "NaN advantage", "NaN log-prob", "NaN parameter"])
def test_nothing_to_learn_leaves_params_and_finite_metrics(name, num_microbatches):
    batch, params = nothing(name)
    after, metrics = step(batch, params, num_microbatches=num_microbatches)
    np.testing.assert_array_equal(after.params["w"], params["w"])
    assert np.all(np.isfinite(list(metrics.values()))), metrics
    assert metrics["nonfinite"] == (name not in ("zero advantages", "no action"))
    assert metrics["accepted"] == metrics["kl"] == metrics["step_norm"] == metrics["grad_norm"] == 0
    assert after.step == 1


def test_a_token_with_a_huge_log_ratio_counts_like_one_without_an_advantage():
    """Its ratio is bounded, so it has no gradient, and the step is that of the others."""
    batch = make_batch()
    action = tuple(np.argwhere(batch.action_mask)[0])
    huge = dataclasses.replace(batch, log_probs=batch.log_probs.at[action].add(-200.0))
    without = dataclasses.replace(batch, advantages=batch.advantages.at[action].set(0.0))
    (moved, metrics), (expected, _) = step(huge), step(without)
    assert metrics["accepted"] == 1 and metrics["nonfinite"] == 0
    assert distance(moved.params, expected.params) < 1e-5


@pytest.mark.parametrize("reduce", AGGREGATES)
def test_microbatches_change_nothing(reduce):
    batch = make_batch()
    whole, whole_metrics = step(batch, aggregate=reduce)
    for parts in (2, 4):
        cut, metrics = step(batch, aggregate=reduce, num_microbatches=parts)
        assert distance(cut.params, whole.params) < 1e-5
        assert_same_metrics(metrics, whole_metrics, rtol=1e-3)


def test_aggregation_weighs_the_surrogate_and_not_the_kl():
    batch = make_batch()
    token, metrics = step(batch)
    assert distance(step(batch, aggregate=AGGREGATES[1])[0].params, token.params) > 1e-3
    undone = dataclasses.replace(batch, advantages=batch.advantages * batch.action_mask.sum(-1, keepdims=True))
    sequence, same = step(undone, aggregate=AGGREGATES[1])
    assert distance(sequence.params, token.params) < 1e-5
    np.testing.assert_allclose(same["kl"], metrics["kl"], rtol=1e-3)


def test_rows_over_devices_change_nothing():
    batch = make_batch()
    mesh = sharding.make_mesh("data=2,fsdp=2", devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        state = jax.device_put(make_state(make_params()), sharding.replicated(mesh))
        split, _ = jitted(logits_fn, num_microbatches=2)(state, sharding.put_rows(mesh, batch))
    assert distance(split.params, step(batch)[0].params) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_garbage_under_the_mask_change_nothing(side):
    batch = make_batch()
    whole, whole_metrics = step(batch)
    width = ((0, 0), (3, 0) if side == "left" else (0, 3))
    padded = jax.tree.map(lambda x: jnp.pad(x, width), batch)
    padded = dataclasses.replace(
        padded,
        tokens=jnp.where(padded.token_mask, padded.tokens, -1),
        log_probs=jnp.where(padded.action_mask, padded.log_probs, jnp.nan),
        advantages=jnp.where(padded.action_mask, padded.advantages, -jnp.inf),
    )
    moved, metrics = step(padded)
    assert distance(moved.params, whole.params) < 1e-5
    assert_same_metrics(metrics, whole_metrics, rtol=1e-3)


def test_logits_of_no_action_and_of_impossible_tokens_change_nothing():
    """NaN where nothing was drawn; −inf, as filters and padded vocabularies give, where something was."""
    batch = make_batch()
    predicts = jnp.pad(batch.action_mask[:, 1:], ((0, 0), (0, 1)))

    def odd_logits(params, batch):
        wide = jnp.pad(logits_fn(params, batch), ((0, 0), (0, 0), (0, 2)), constant_values=-jnp.inf)
        return wide + jnp.where(predicts[..., None], 0.0, jnp.nan)  # a sum lets a NaN of the gradient through

    assert distance(step(batch, logits_fn=odd_logits)[0].params, step(batch)[0].params) < 1e-5


def test_bfloat16_logits_give_the_step_of_float32_ones_to_their_precision():
    batch, params = make_batch(), make_params()
    rounded, metrics = step(batch, logits_fn=lambda p, b: logits_fn(p, b).astype(jnp.bfloat16))
    assert rounded.params["w"].dtype == jnp.float32
    assert metrics["accepted"] == 1 and 0 < metrics["kl"] <= 0.01
    a, b = (flat(state.params) - flat(params) for state in (step(batch)[0], rounded))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.95


def test_only_the_policy_and_the_step_counter_change_and_one_program_is_compiled():
    update = jax.jit(trust_region.make_update(lambda params, batch: logits_fn(params["actor"], batch)))
    state = start = make_state({"actor": make_params(), "critic": {"v": np.ones(3, np.float32)}})
    for seed in range(4):
        state, _ = update(state, make_batch(seed))
    assert update._cache_size() == 1 and state.step == 4
    assert distance(state.params["actor"], start.params["actor"]) > 1e-3
    kept = [(s.opt_state, s.kl_coef, s.params["critic"], jax.random.key_data(s.key)) for s in (state, start)]
    jax.tree.map(np.testing.assert_array_equal, *kept)


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("max_kl", (0, -0.5, np.nan, np.inf), "finite and greater than 0"),
        ("temperature", (0.0, -0.5, np.nan, np.inf), "finite and greater than 0"),
        ("damping", (-0.5, np.nan, np.inf), "finite and not negative; 0 for none"),
        ("cg_tolerance", (-0.5, np.nan, np.inf), "finite and not negative; 0 for none"),
        ("backtrack", (0, 1.0, -0.5, np.nan), "between 0 and 1"),
        ("cg_iterations", (0, 2.5), "a whole number, at least 1"),
        ("num_microbatches", (0, 2.5), "a whole number, at least 1"),
        ("max_backtracks", (-1, 2.5), "a whole number, at least 0"),
    ],
)
def test_keywords_out_of_range_are_named_at_once(name, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=f"{name}={value}: must .*{rule}"):
            trust_region.make_update(logits_fn, **{name: value})


def test_batches_that_do_not_fit_are_named():
    for name in ("log_probs", "advantages"):
        with pytest.raises(ValueError, match=f"batch.{name} is None"):
            step(dataclasses.replace(make_batch(), **{name: None}))
    with pytest.raises(ValueError, match="num_microbatches=3 does not divide the 8 rows"):
        step(make_batch(), num_microbatches=3)
    with pytest.raises(ValueError, match="logits_fn's result has shape"):
        step(make_batch(), logits_fn=lambda p, b: logits_fn(p, b)[:, :-1])
