"""Advantages: the golden table, exact zeros, brute-force oracles and the laws of groups."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import advantages

ONE_RIGHT = jnp.array([1.0, 0.0, 0.0, 0.0])
LENGTHS = jnp.array([8.0, 2.0, 2.0, 4.0])


def opo(rewards, valid=None):
    lengths = LENGTHS if rewards.shape[-1:] == (4,) else 1.0
    return advantages.length_weighted_baseline(rewards, jnp.broadcast_to(lengths, rewards.shape), valid)


def gdpo(rewards, valid=None):
    """Two rewards a sample, made from one so that it fits the tables below."""
    both = jnp.stack([rewards, 3 * rewards], axis=-1)
    both_valid = None if valid is None else jnp.stack([valid, valid], axis=-1)
    return advantages.decoupled(both, both_valid)


def greedy(rewards, valid=None):
    return advantages.greedy_baseline(rewards, jnp.full(rewards.shape[:-1], 0.25), valid)


GROUPED = {
    "group_centered": advantages.group_centered,
    "group_normalized": advantages.group_normalized,
    "group_normalized_epsilon_0": lambda r, v=None: advantages.group_normalized(r, v, epsilon=0.0, ddof=1),
    "leave_one_out": advantages.leave_one_out,
    "opo": opo,
    "maxrl": advantages.mean_normalized,
    "pass_at_1": lambda r, v=None: advantages.pass_at_k(r, v, k=1),
    "group_centered_batch_normalized": advantages.group_centered_batch_normalized,
    "group_centered_batch_scaled": advantages.group_centered_batch_scaled,
    "gdpo": gdpo,
}
ALL = GROUPED | {"greedy": greedy, "batch_normalized": advantages.batch_normalized}
CENTERED = [name for name in GROUPED if name != "opo"]


@pytest.mark.parametrize(
    ("advantage", "right", "wrong"),
    [
        (lambda r: advantages.group_normalized(r, epsilon=1e-4), 1.731651, -0.577217),
        (lambda r: advantages.group_normalized(r, ddof=1, epsilon=1e-4), 1.4997, -0.4999),
        (lambda r: advantages.group_normalized(r, ddof=1, epsilon=1e-6), 1.499997, -0.499999),
        (advantages.group_centered, 0.75, -0.25),
        (advantages.leave_one_out, 1.0, -0.333333),
        (advantages.mean_normalized, 3.0, -1.0),
        (opo, 0.5, -0.5),
        (greedy, 0.75, -0.25),
        (lambda r: advantages.greedy_baseline(r, jnp.float32(1.0)), 0.0, -1.0),
    ],
)
def test_golden_table(advantage, right, wrong):
    np.testing.assert_allclose(advantage(ONE_RIGHT), [right, wrong, wrong, wrong], atol=1.5e-6)


def test_worked_example_of_four_rollouts():
    rewards, lengths = jnp.array([1.0, 1.0, 0.0, 0.0]), np.array([7, 22, 7, 35])
    grpo = advantages.group_normalized(rewards, epsilon=0.0)
    np.testing.assert_allclose(grpo, [1, 1, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(grpo / lengths, [0.143, 0.045, -0.143, -0.029], atol=5e-4)
    np.testing.assert_allclose(advantages.group_centered(rewards), [0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("constant", [0.9, 1000.1])
def test_constant_groups_give_exactly_zero_beside_others(name, constant):
    """Three times 0.9 has a rounded mean; divided by epsilon the rounding would be an advantage."""
    valid = jnp.array([[True, True, True, False], [True, True, True, True]])
    rewards = jnp.array([[constant] * 3 + [5.0], [1.0, 0.0, 0.5, 1.0]], jnp.float32)
    result = GROUPED[name](rewards, valid)
    np.testing.assert_array_equal(result[0], np.zeros(4))
    assert np.any(result[1] != 0)
    np.testing.assert_array_equal(GROUPED[name](jnp.full((7,), constant, jnp.float32)), np.zeros(7))


@pytest.mark.parametrize("name", GROUPED)
def test_a_single_sample_has_nothing_to_compare_with(name):
    np.testing.assert_array_equal(GROUPED[name](jnp.array([[0.7], [3.0]])), np.zeros((2, 1)))
    one_valid = GROUPED[name](ONE_RIGHT, jnp.array([True, False, False, False]))
    np.testing.assert_array_equal(one_valid, np.zeros(4))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf])
def test_samples_without_a_reward_are_left_out(name, garbage):
    if name == "opo":
        shorter = advantages.length_weighted_baseline(ONE_RIGHT[:3], LENGTHS[:3])
    else:
        shorter = ALL[name](ONE_RIGHT[:3])
    valid = jnp.array([True, True, True, False])
    weights = jnp.array([0.3, -1.0, 2.0, 5.0])
    objective = jax.value_and_grad(lambda r: jnp.sum(weights * ALL[name](r, valid)))
    dirty = ONE_RIGHT.at[3].set(garbage)
    result = ALL[name](dirty, valid)
    np.testing.assert_allclose(result[:3], shorter, rtol=1e-6)
    assert result[3] == 0
    for got, expected in zip(objective(dirty), objective(ONE_RIGHT), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert objective(dirty)[1][3] == 0


@pytest.mark.parametrize("name", ALL)
def test_no_valid_sample_gives_zeros(name):
    nothing = jnp.zeros(4, bool)
    value, gradient = jax.value_and_grad(lambda r: jnp.sum(ALL[name](r, nothing)))(ONE_RIGHT)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros(4))


@pytest.mark.parametrize("name", ALL)
def test_nan_of_a_scorer_stays_nan(name):
    assert np.any(np.isnan(ALL[name](ONE_RIGHT.at[1].set(jnp.nan))))


REWARDS = st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rewards=REWARDS, shift=st.floats(-5, 5), scale=st.floats(0.25, 8))
def test_laws_of_groups(rewards, shift, scale):
    rewards = np.array(rewards, np.float32)
    size = rewards.size
    moved = (scale * rewards + shift).astype(np.float32)
    centered = advantages.group_centered(rewards)
    np.testing.assert_allclose(np.sum(centered), 0, atol=1e-5)
    np.testing.assert_allclose(advantages.group_centered(moved), scale * centered, atol=1e-4)
    np.testing.assert_allclose(advantages.leave_one_out(rewards), centered * size / (size - 1), atol=1e-5)
    others = [np.mean(np.delete(rewards, i)) for i in range(size)]
    np.testing.assert_allclose(advantages.leave_one_out(rewards), rewards - others, atol=1e-5)
    if np.std(rewards) > 0.05:
        z = advantages.group_normalized(rewards)
        np.testing.assert_allclose(advantages.group_normalized(moved), z, atol=1e-3)
        np.testing.assert_allclose(z, (rewards - rewards.mean()) / rewards.std(), atol=1e-3)
    np.testing.assert_allclose(advantages.group_centered(rewards[::-1]), centered[::-1], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "power", "shift_invariant"),
    [
        *[(name, 1, True) for name in ("group_centered", "leave_one_out", "opo")],
        *[(name, 0, True) for name in ("group_normalized", "group_normalized_epsilon_0", "batch_normalized", "gdpo")],
        *[(name, 0, True) for name in ("group_centered_batch_normalized", "group_centered_batch_scaled")],
        ("maxrl", 0, False),
    ],
)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), shift=st.floats(-3, 3), scale=st.floats(0.5, 4))
def test_a_positive_scale_and_a_shift_of_the_rewards(name, power, shift_invariant, seed, shift, scale):
    rewards = np.random.default_rng(seed).uniform(0.1, 1, (2, 4)).astype(np.float32)
    moved = np.float32(scale) * rewards + np.float32(shift if shift_invariant else 0)
    expected = scale**power * ALL[name](rewards)
    np.testing.assert_allclose(ALL[name](moved), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in ALL if name != "opo"])  # whose lengths belong to the samples
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), order=st.permutations(range(4)))
def test_order_of_samples_and_of_groups(name, seed, order):
    rewards = np.random.default_rng(seed).uniform(0.1, 1, (2, 4)).astype(np.float32)
    moved = ALL[name](rewards[::-1, order])
    np.testing.assert_allclose(moved, ALL[name](rewards)[::-1, np.array(order)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CENTERED)
def test_valid_entries_of_a_group_add_up_to_zero(name):
    rewards = jnp.array([[1.0, 0.0, 0.25, 1.0], [0.0, 0.0, 1.0, 9.0]])
    valid = jnp.array([[True] * 4, [True, True, True, False]])
    np.testing.assert_allclose(jnp.sum(GROUPED[name](rewards, valid), axis=-1), np.zeros(2), atol=1e-5)


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_average_over_all_subsets(right, k):
    rewards = np.array([1.0] * right + [0.0] * (5 - right), np.float32)
    subsets = list(itertools.combinations(range(5), k))
    scores = np.array([max(rewards[list(s)]) for s in subsets])
    expected = np.zeros(5)
    if scores.std() > 0:
        z = (scores - scores.mean()) / scores.std()
        expected = [np.mean([v for s, v in zip(subsets, z, strict=True) if i in s]) for i in range(5)]
    np.testing.assert_allclose(advantages.pass_at_k(rewards, k=k), expected, atol=2e-6)


def test_pass_at_1_is_the_z_score_and_too_few_samples_give_zero():
    np.testing.assert_allclose(
        advantages.pass_at_k(ONE_RIGHT, k=1), advantages.group_normalized(ONE_RIGHT, epsilon=0.0), atol=1e-6
    )
    two_valid = jnp.array([True, True, False, False])
    np.testing.assert_array_equal(advantages.pass_at_k(ONE_RIGHT, two_valid, k=3), np.zeros(4))


def test_maxrl_of_groups_that_never_succeed_is_zero():
    np.testing.assert_array_equal(advantages.mean_normalized(jnp.array([-1.0, 0.0, 0.5])), np.zeros(3))


def test_batch_forms_share_one_scale():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 3.0]], np.float32)
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        advantages.group_centered_batch_normalized(rewards), centered / centered.std(), atol=1e-5
    )
    np.testing.assert_allclose(
        advantages.group_centered_batch_scaled(rewards, ddof=1), centered / rewards.std(ddof=1), atol=1e-5
    )
    z = (rewards - rewards.mean()) / rewards.std()
    np.testing.assert_allclose(advantages.batch_normalized(rewards), z, atol=1e-5)


def test_decoupled_tells_apart_what_sums_confound():
    """Rewards (1, 0) and (0, 1) have one sum; a rarer success is worth more once each is normalised."""
    rewards = np.array([[[1, 0], [0, 1], [0, 1], [0, 0]]], np.float32)
    z = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, keepdims=True)
    for weights in ([1.0, 1.0], [2.0, 0.5]):
        summed = (z * np.array(weights)).sum(axis=-1)
        expected = summed / summed.std()
        np.testing.assert_allclose(advantages.decoupled(rewards, weights=jnp.array(weights)), expected, atol=1e-4)
    result = advantages.decoupled(rewards)[0]
    assert result[0] > result[1]
    assert np.isclose(
        advantages.group_centered(rewards.sum(-1))[0, 0], advantages.group_centered(rewards.sum(-1))[0, 1]
    )


def test_decoupled_leaves_out_single_scorers():
    rewards = jnp.array([[[1.0, jnp.nan], [0.0, 1.0], [0.5, 0.0], [jnp.nan, jnp.nan]]])
    valid = ~jnp.isnan(rewards)
    result = advantages.decoupled(rewards, valid)
    assert np.all(np.isfinite(result))
    assert result[0, 3] == 0
    np.testing.assert_allclose(jnp.mean(result[0, :3] ** 2), 1.0, rtol=1e-4)


def test_overlong_penalty_golden():
    lengths = jnp.array([0, 80, 90, 100, 130])
    np.testing.assert_allclose(
        advantages.overlong_penalty(lengths, limit=100, margin=20), [0, 0, -0.5, -1, -1], rtol=1e-6
    )


@pytest.mark.parametrize("name", ALL)
def test_leading_axes_are_free(name):
    one = ALL[name](ONE_RIGHT)
    many = ALL[name](jnp.broadcast_to(ONE_RIGHT, (2, 3, 4)))
    assert many.shape == (2, 3, 4)
    np.testing.assert_allclose(many, np.broadcast_to(one, (2, 3, 4)), rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_returns_float32(name, dtype):
    result = ALL[name](ONE_RIGHT.astype(dtype))
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, ALL[name](ONE_RIGHT))


@pytest.mark.parametrize("name", ALL)
def test_errors_name_argument_value_and_remedy(name):
    function = ALL[name]
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 0"):
        function(jnp.zeros((2, 0)))
    if name != "gdpo":
        with pytest.raises(ValueError, match="valid has dtype float32: must be bool; write valid > 0"):
            function(ONE_RIGHT, jnp.ones(4))
        with pytest.raises(ValueError, match=r"valid has shape \(3,\): must be \(4,\)"):
            function(ONE_RIGHT, jnp.ones(3, bool))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages.group_normalized(ONE_RIGHT, epsilon=-1.0), "epsilon=-1.0: must be 0 or greater"),
        (lambda: advantages.group_normalized(ONE_RIGHT, ddof=-1), "ddof=-1"),
        (
            lambda: advantages.greedy_baseline(ONE_RIGHT, jnp.zeros(4)),
            r"greedy_rewards has shape \(4,\): must be \(\)",
        ),
        (lambda: advantages.length_weighted_baseline(ONE_RIGHT, jnp.ones(3)), r"lengths has shape \(3,\)"),
        (lambda: advantages.pass_at_k(ONE_RIGHT, k=5), "k=5: must lie between 1 and 4"),
        (lambda: advantages.pass_at_k(ONE_RIGHT, k=0), "k=0: must lie between 1 and 4"),
        (lambda: advantages.decoupled(ONE_RIGHT), r"rewards has shape \(4,\): must be \[..., G, K\]"),
        (lambda: advantages.decoupled(jnp.ones((4, 2)), weights=jnp.ones(3)), r"weights has shape \(3,\)"),
        (
            lambda: advantages.overlong_penalty(ONE_RIGHT, limit=10, margin=0),
            "margin=0: must be greater than 0",
        ),
        (
            lambda: advantages.overlong_penalty(ONE_RIGHT, limit=10, margin=11),
            "limit=10: must be at least 11",
        ),
    ],
)
def test_errors_of_options(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*ALL.items())
    def test_same_with_and_without_jit(self, function):
        rewards = jnp.array([[1.0, 0.0, 0.25, 1.0], [0.0, 0.0, 1.0, 9.0], [0.9, 0.9, 0.9, 0.9]])
        valid = jnp.array([[True] * 4, [True, True, True, False], [True, True, True, False]])
        result = self.variant(function)(rewards, valid)
        np.testing.assert_allclose(result, function(rewards, valid), rtol=1e-5, atol=1e-6)
        if function in GROUPED.values():
            np.testing.assert_array_equal(result[2], np.zeros(4))  # fusion must not bring the rounding back
