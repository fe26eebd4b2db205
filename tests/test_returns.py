"""Returns along time: golden values, a numpy oracle that knows no masks, rlax, and the bridging of gaps."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import returns, segments

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rlax

MASK = jnp.array([1, 1, 0, 0, 1, 1], bool)
REWARDS = jnp.array([0.0, 0, 0, 0, 0, 1])
VALUES = jnp.array([0.1, 0.2, 0.9, 0.9, 0.4, 0.5])

FUNCTIONS = {
    "reward_to_go": lambda r, v, m: returns.reward_to_go(r, m, discount=0.9),
    "n_step": functools.partial(returns.n_step, n=2, discount=0.9),
    "lambda_returns": functools.partial(returns.lambda_returns, discount=0.9, lambda_=0.7),
    "gae": functools.partial(returns.gae, discount=0.9, lambda_=0.7),
    "segment_gae": lambda r, v, m: returns.segment_gae(r, v, segments.response(m), m, discount=0.9, lambda_=0.7),
}
BY_NAME = pytest.mark.parametrize("name", FUNCTIONS)


# Compiled once each: a scan that is not under jit is compiled anew at every call.
GAE = jax.jit(returns.gae)
LAMBDA_RETURNS = jax.jit(returns.lambda_returns)
N_STEP = jax.jit(returns.n_step, static_argnames="n")
REWARD_TO_GO = jax.jit(returns.reward_to_go)


def gae_by_hand(rewards, values, discount, lambda_, bootstrap):
    """GAE of one sequence without gaps, in float64."""
    advantages, ahead, next_value = np.zeros(len(rewards)), 0.0, bootstrap
    for t in reversed(range(len(rewards))):
        ahead = rewards[t] + discount * next_value - values[t] + discount * lambda_ * ahead
        advantages[t], next_value = ahead, values[t]
    return advantages


def n_step_by_hand(rewards, values, discount, n, bootstrap):
    """n-step returns of one sequence without gaps, in float64."""
    ends = [min(t + n, len(rewards)) for t in range(len(rewards))]
    values = [*values, bootstrap]
    return [
        sum(discount ** (u - t) * rewards[u] for u in range(t, end)) + discount ** (end - t) * values[end]
        for t, end in enumerate(ends)
    ]


def random_rows(seed, rows=3, length=7):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, length)) < 0.6
    rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32)
    return rewards, values, mask, rng.normal(size=rows).astype(np.float32)


def scattered(by_hand, mask):
    out = np.zeros(mask.shape)
    out[mask] = by_hand
    return out


@pytest.mark.parametrize(
    ("lambda_", "expected"),
    [(0.95, [0.808937, 0.74625, 0, 0, 0.575, 0.5]), (1.0, [0.9, 0.8, 0, 0, 0.6, 0.5])],
)
def test_gae_bridges_environment_tokens(lambda_, expected):
    np.testing.assert_allclose(returns.gae(REWARDS, VALUES, MASK, lambda_=lambda_), expected, atol=1e-6)


def test_gae_never_bootstraps_from_padding():
    got = returns.gae(
        jnp.array([0.0, 0, 1, 0]),
        jnp.array([0.5, 0.6, 0.7, 100]),
        jnp.array([1, 1, 1, 0], bool),
        lambda_=0.95,
    )
    np.testing.assert_allclose(got, [0.46575, 0.385, 0.3, 0], atol=1e-6)


def test_td_zero_ends():
    errors = returns.gae(REWARDS, VALUES, MASK, lambda_=0.0)
    np.testing.assert_allclose(errors, [0.1, 0.2, 0, 0, 0.1, 0.5], atol=1e-6)
    one_step = returns.n_step(REWARDS, VALUES, MASK, n=1)
    np.testing.assert_allclose(one_step, jnp.where(MASK, errors + VALUES, 0.0), atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
    n=st.sampled_from([1, 3, 7]),
)
def test_masked_rows_equal_the_sequences_they_hold(seed, discount, lambda_, n):
    rewards, values, mask, bootstrap = random_rows(seed)
    options = {"discount": discount, "bootstrap": bootstrap}
    gae = GAE(rewards, values, mask, lambda_=lambda_, **options)
    lambda_returns = LAMBDA_RETURNS(rewards, values, mask, lambda_=lambda_, **options)
    n_step = N_STEP(rewards, values, mask, n=n, **options)
    to_go = REWARD_TO_GO(rewards, mask, discount=discount)
    for i, row in enumerate(mask):
        r, v = rewards[i][row].astype(np.float64), values[i][row].astype(np.float64)
        by_hand = gae_by_hand(r, v, discount, lambda_, bootstrap[i])
        np.testing.assert_allclose(gae[i], scattered(by_hand, row), atol=2e-5)
        np.testing.assert_allclose(lambda_returns[i], scattered(by_hand + v, row), atol=2e-5)
        np.testing.assert_allclose(
            n_step[i], scattered(n_step_by_hand(r, v, discount, n, bootstrap[i]), row), atol=2e-5
        )
        np.testing.assert_allclose(to_go[i], scattered(gae_by_hand(r, 0 * v, discount, 1.0, 0.0), row), atol=2e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999))
def test_laws_of_lambda_and_n(seed):
    rewards, values, mask, bootstrap = random_rows(seed)
    clean = np.where(mask, values, 0.0)
    to_go = REWARD_TO_GO(rewards, mask)
    np.testing.assert_allclose(GAE(rewards, values, mask, lambda_=1.0), to_go - clean, atol=1e-5)
    np.testing.assert_allclose(N_STEP(rewards, values, mask, n=99), to_go, atol=1e-5)
    options = {"discount": 0.9, "bootstrap": bootstrap}
    np.testing.assert_allclose(
        LAMBDA_RETURNS(rewards, values, mask, lambda_=0.0, **options),
        N_STEP(rewards, values, mask, n=1, **options),
        atol=1e-5,
    )


def test_agrees_with_rlax():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 9)).astype(np.float32)
    bootstrap, mask = np.float32(0.7), np.ones(9, bool)
    discounts, ahead = np.full(9, 0.9, np.float32), np.append(values[1:], bootstrap)
    options = {"discount": 0.9, "bootstrap": bootstrap}
    np.testing.assert_allclose(
        returns.gae(rewards, values, mask, lambda_=0.8, **options),
        rlax.truncated_generalized_advantage_estimation(rewards, discounts, 0.8, np.append(values, bootstrap)),
        atol=1e-5,
    )
    np.testing.assert_allclose(
        returns.lambda_returns(rewards, values, mask, lambda_=0.8, **options),
        rlax.lambda_returns(rewards, discounts, ahead, 0.8),
        atol=1e-5,
    )
    for n in (1, 3, 9):
        np.testing.assert_allclose(
            returns.n_step(rewards, values, mask, n=n, **options),
            rlax.n_step_bootstrapped_returns(rewards, discounts, ahead, n),
            atol=1e-5,
        )


def test_termination_and_truncation_are_told_apart():
    """Three episodes in a row, discount 0.5: terminated at index 1, truncated at 3 in a state of V 8, cut at 5, V 4."""
    mask = jnp.ones(6, bool)
    rewards, values = jnp.array([1.0, 2, 3, 4, 5, 6]), jnp.array([1.0, 1, 2, 2, 3, 3])
    ends = jnp.array([0, 1, 0, 1, 0, 0], bool)
    bootstrap = jnp.array([9.0, 0, 9, 8, 9, 4])  # 9 where an episode goes on: never read
    options = {"discount": 0.5, "bootstrap": bootstrap, "ends": ends}
    # Backwards, e.g. δ_3 = 4 + 0.5·8 − 2 = 6 and δ_2 = 3 + 0.5·2 − 2 = 2.
    td_errors = np.array([0.5, 1, 2, 6, 3.5, 5])
    np.testing.assert_allclose(returns.gae(rewards, values, mask, lambda_=0.0, **options), td_errors)
    half = td_errors + np.array([0.25 * 1, 0, 0.25 * 6, 0, 0.25 * 5, 0])
    np.testing.assert_allclose(returns.gae(rewards, values, mask, lambda_=0.5, **options), half)
    whole = [1 + 0.5 * 2, 2, 3 + 0.5 * (4 + 0.5 * 8), 4 + 0.5 * 8, 5 + 0.5 * (6 + 0.5 * 4), 6 + 0.5 * 4]
    for n in (2, 3, 99):
        np.testing.assert_allclose(returns.n_step(rewards, values, mask, n=n, **options), whole)
    np.testing.assert_allclose(returns.n_step(rewards, values, mask, n=1, **options), td_errors + values)
    to_go = returns.reward_to_go(rewards, mask, discount=0.5, ends=ends)
    np.testing.assert_allclose(to_go, [2, 2, 5, 4, 8, 6])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), lambda_=st.sampled_from([0.0, 0.95, 1.0]), n=st.sampled_from([1, 3, 7]))
def test_rows_with_ends_equal_the_episodes_they_hold(seed, lambda_, n):
    rewards, values, mask, _ = random_rows(seed)
    rng = np.random.default_rng(seed + 1000)
    ends, bootstrap = rng.random(mask.shape) < 0.4, rng.normal(size=mask.shape).astype(np.float32)
    options = {"discount": 0.9, "bootstrap": bootstrap, "ends": ends}
    gae, n_step = GAE(rewards, values, mask, lambda_=lambda_, **options), N_STEP(rewards, values, mask, n=n, **options)
    for i, row in enumerate(mask):
        actions = np.flatnonzero(row)
        advantages, targets = [], []
        for episode in np.split(actions, np.flatnonzero(ends[i][actions]) + 1):
            if episode.size:
                r, v = (x[i][episode].astype(np.float64) for x in (rewards, values))
                after = float(bootstrap[i][episode[-1]])
                advantages.extend(gae_by_hand(r, v, 0.9, lambda_, after))
                targets.extend(n_step_by_hand(r, v, 0.9, n, after))
        np.testing.assert_allclose(gae[i], scattered(advantages, row), atol=2e-5)
        np.testing.assert_allclose(n_step[i], scattered(targets, row), atol=2e-5)


def test_step_level_gae_runs_over_steps():
    """Two steps of two and three tokens; γ and λ act once a step, and V is read before its first token."""
    mask = jnp.array([0, 1, 1, 0, 1, 1, 1, 0], bool)
    steps = jnp.array([-1, 0, 0, -1, 1, 1, 1, -1])
    rewards = jnp.array([9.0, 0.0, 0.5, 9.0, 0.25, 0.0, 1.0, 9.0])
    values = jnp.array([9.0, 0.2, 7.0, 9.0, 0.6, 7.0, 7.0, 9.0])
    got = returns.segment_gae(rewards, values, steps, mask, discount=0.9, lambda_=0.5, bootstrap=jnp.float32(2.0))
    second = 1.25 + 0.9 * 2.0 - 0.6
    first = 0.5 + 0.9 * 0.6 - 0.2 + 0.45 * second
    np.testing.assert_allclose(got, [0, first, first, 0, second, second, second, 0], atol=1e-5)


def test_segment_gae_between_its_two_extremes():
    rewards, values, mask, bootstrap = random_rows(3)
    options = {"discount": 0.9, "lambda_": 0.8, "bootstrap": bootstrap}
    by_token = returns.segment_gae(rewards, values, segments.token(mask), mask, **options)
    np.testing.assert_allclose(by_token, returns.gae(rewards, values, mask, **options), atol=1e-6)
    whole = returns.segment_gae(rewards, values, segments.response(mask), mask)
    for i, row in enumerate(mask):
        bandit = rewards[i][row].sum() - values[i][row][0]
        np.testing.assert_allclose(whole[i], np.where(row, bandit, 0.0), atol=1e-5)


@BY_NAME
@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf])
def test_garbage_off_the_actions_reaches_neither_value_nor_gradient(name, garbage):
    weights = jnp.cos(jnp.arange(6.0))
    objective = jax.value_and_grad(lambda r, v: jnp.sum(weights * FUNCTIONS[name](r, v, MASK)), argnums=(0, 1))
    clean = objective(REWARDS, VALUES)
    dirty = objective(jnp.where(MASK, REWARDS, garbage), jnp.where(MASK, VALUES, garbage))
    for got, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        assert np.all(np.isfinite(got))
        np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_array_equal(dirty[1][0][~MASK], np.zeros(2))


@BY_NAME
def test_padding_on_either_side_changes_nothing(name):
    expected = FUNCTIONS[name](REWARDS, VALUES, MASK)
    for pad in ((3, 0), (0, 2)):
        padded = [jnp.pad(x, pad, constant_values=50) for x in (REWARDS, VALUES)]
        got = FUNCTIONS[name](*padded, jnp.pad(MASK, pad))
        np.testing.assert_allclose(got, np.pad(expected, pad), atol=1e-6)


@BY_NAME
def test_gradients_match_finite_differences(name, x64):
    rewards, values = (np.asarray(x, np.float64) for x in (REWARDS, VALUES))
    jax.test_util.check_grads(
        lambda r, v: FUNCTIONS[name](r, v, MASK), (rewards, values), order=1, modes=["rev"], atol=1e-6
    )


@BY_NAME
def test_no_action_gives_zeros(name):
    np.testing.assert_array_equal(FUNCTIONS[name](REWARDS, VALUES, jnp.zeros(6, bool)), np.zeros(6))


@BY_NAME
def test_leading_axes_are_free_and_bfloat16_is_computed_in_float32(name):
    expected = FUNCTIONS[name](REWARDS, VALUES, MASK)
    deep = [jnp.broadcast_to(x, (2, 3, 6)) for x in (REWARDS, VALUES, MASK)]
    np.testing.assert_allclose(FUNCTIONS[name](*deep), np.broadcast_to(expected, (2, 3, 6)), atol=1e-6)
    half = VALUES.astype(jnp.bfloat16)
    got = FUNCTIONS[name](REWARDS.astype(jnp.bfloat16), half, MASK)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, FUNCTIONS[name](REWARDS, half.astype(jnp.float32), MASK))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: returns.gae(REWARDS, VALUES, MASK * 1.0),
            "mask has dtype float32: must be bool; write mask > 0",
        ),
        (lambda: returns.gae(REWARDS, VALUES[:3], MASK), r"values has shape \(3,\): must be \(6,\)"),
        (lambda: returns.gae(REWARDS, VALUES, MASK[:3]), r"mask has shape \(3,\): must be \(6,\)"),
        (lambda: returns.gae(REWARDS, VALUES, MASK, discount=1.1), "discount=1.1: must lie between 0 and 1"),
        (lambda: returns.gae(REWARDS, VALUES, MASK, lambda_=-0.1), "lambda_=-0.1: must lie between 0 and 1"),
        (
            lambda: returns.gae(REWARDS, VALUES, MASK, bootstrap=VALUES),
            r"bootstrap has shape \(6,\): must be \(\)",
        ),
        (
            lambda: returns.gae(REWARDS, VALUES, MASK, bootstrap=jnp.float32(1), ends=MASK),
            r"bootstrap has shape \(\): must be \(6,\), one value for each action",
        ),
        (lambda: returns.gae(REWARDS, VALUES, MASK, ends=VALUES), "ends has dtype float32: must be bool"),
        (lambda: returns.n_step(REWARDS, VALUES, MASK, n=0), "n=0: must be at least 1"),
        (lambda: returns.n_step(REWARDS, VALUES, MASK, n=1, discount=-1), "discount=-1"),
        (lambda: returns.reward_to_go(REWARDS[:0], MASK[:0]), r"rewards has shape \(0,\)"),
        (lambda: returns.segment_gae(REWARDS, VALUES, VALUES, MASK), "segments has dtype float32"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*FUNCTIONS.items())
    def test_same_with_and_without_jit(self, function):
        got = self.variant(function)(REWARDS, VALUES, MASK)
        np.testing.assert_allclose(got, function(REWARDS, VALUES, MASK), rtol=1e-6, atol=1e-7)
