"""Segments: numbering, steps from a delimiter, sums over segments, and where rewards go."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import segments

MASK = jnp.array([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
X = jnp.array([[9.0, 1.0, 2.0, 9.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 9.0, 9.0]])
STEPS = jnp.array([[-1, 0, 0, -1, 1, 1], [0, 1, 1, 2, -1, -1]])


def test_token_and_response_number_the_actions():
    np.testing.assert_array_equal(segments.token(MASK), [[-1, 0, 1, -1, 2, 3], [0, 1, 2, 3, -1, -1]])
    np.testing.assert_array_equal(segments.response(MASK), [[-1, 0, 0, -1, 0, 0], [0, 0, 0, 0, -1, -1]])
    assert segments.token(MASK).dtype == segments.response(MASK).dtype == jnp.int32


@pytest.mark.parametrize(
    ("tokens", "mask", "delimiter", "expected"),
    [
        # a delimiter belongs to the step that it ends
        ([5, 9, 4, 4, 9, 3], [1] * 6, (9,), [0, 0, 1, 1, 1, 2]),
        # none, and one at the very end: no empty step
        ([5, 4, 4, 4, 3, 9], [1] * 6, (9,), [0, 0, 0, 0, 0, 0]),
        ([5, 4, 4, 4, 3, 3], [1] * 6, (9,), [0, 0, 0, 0, 0, 0]),
        # a run of delimiters ends one step
        ([5, 9, 9, 9, 3, 3], [1] * 6, (9,), [0, 0, 0, 0, 1, 1]),
        # of two tokens: a single one is none, three are one
        ([9, 5, 9, 9, 9, 3], [1] * 6, (9, 9), [0, 0, 0, 0, 0, 1]),
        ([7, 9, 5, 7, 9, 9], [1] * 6, (7, 9), [0, 0, 1, 1, 1, 2]),
        # what the environment says ends a step, but its delimiters do not count, nor does a half of one
        ([5, 5, 9, 9, 3, 3], [1, 1, 0, 0, 1, 1], (9,), [0, 0, -1, -1, 1, 1]),
        ([9, 5, 5, 9, 9, 3], [0, 1, 1, 0, 1, 1], (9, 9), [-1, 0, 0, -1, 1, 1]),
        # padding with the delimiter on both sides
        ([9, 9, 5, 9, 3, 9], [0, 0, 1, 1, 1, 0], (9,), [-1, -1, 0, 0, 1, -1]),
        # longer than the row
        ([9, 9], [1, 1], (9, 9, 9), [0, 0]),
    ],
)
def test_steps_golden(tokens, mask, delimiter, expected):
    got = segments.steps(jnp.array(tokens), jnp.array(mask, bool), delimiter=delimiter)
    np.testing.assert_array_equal(got, expected)
    batched = segments.steps(jnp.array([tokens]), jnp.array([mask], bool), delimiter=list(delimiter))
    np.testing.assert_array_equal(batched[0], expected)


def test_total_and_mean_golden():
    np.testing.assert_array_equal(segments.total(X, STEPS, MASK), [[0, 3, 3, 0, 7, 7], [1, 5, 5, 4, 0, 0]])
    np.testing.assert_array_equal(segments.mean(X, STEPS, MASK), [[0, 1.5, 1.5, 0, 3.5, 3.5], [1, 2.5, 2.5, 4, 0, 0]])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999))
def test_total_agrees_with_numpy(seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(2, 6)).astype(np.float32), rng.random((2, 6)) < 0.6
    numbers = rng.integers(0, 6, size=(2, 6)).astype(np.int32)  # in any order: sums need no sorting
    expected = [
        [x[i][mask[i] & (numbers[i] == numbers[i, t])].sum() if mask[i, t] else 0.0 for t in range(6)] for i in range(2)
    ]
    np.testing.assert_allclose(segments.total(x, numbers, mask), expected, atol=1e-5)


def test_first_and_last_mark_one_token_a_segment():
    np.testing.assert_array_equal(segments.first(STEPS, MASK), [[0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 0]])
    np.testing.assert_array_equal(segments.last(STEPS, MASK), [[0, 0, 1, 0, 0, 1], [1, 0, 1, 1, 0, 0]])
    for mark in (segments.first, segments.last):
        np.testing.assert_array_equal(mark(segments.token(MASK), MASK), MASK)
        np.testing.assert_array_equal(jnp.sum(mark(segments.response(MASK), MASK), axis=-1), [1, 1])


def test_outcome_reward_sits_on_the_last_action():
    got = segments.place_outcome(jnp.array([2.0, -1.0]), MASK)
    np.testing.assert_array_equal(got, [[0, 0, 0, 0, 0, 2], [0, 0, 0, -1, 0, 0]])
    first_token_stop = jnp.array([[0, 1, 0]], bool)
    np.testing.assert_array_equal(segments.place_outcome(jnp.array([0.25]), first_token_stop), [[0, 0.25, 0]])
    nothing = segments.place_outcome(jnp.array([5.0]), jnp.zeros((1, 3), bool))
    np.testing.assert_array_equal(nothing, np.zeros((1, 3)))
    assert segments.place_outcome(jnp.array([1, 0]), MASK).dtype == jnp.float32


def test_step_rewards_sit_on_last_tokens():
    rewards = jnp.array([[0.5, 0.25, jnp.nan], [1.0, 2.0, 3.0]])
    got = segments.place_steps(rewards, STEPS, MASK)
    np.testing.assert_array_equal(got, [[0, 0, 0.5, 0, 0, 0.25], [1, 0, 2, 3, 0, 0]])
    fewer = segments.place_steps(rewards[:, :1], STEPS, MASK)
    np.testing.assert_array_equal(fewer, [[0, 0, 0.5, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    gradient = jax.grad(lambda r: jnp.sum(segments.place_steps(r, STEPS, MASK)))(rewards)
    np.testing.assert_array_equal(gradient, [[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf])
def test_garbage_off_the_mask_does_not_matter(garbage):
    dirty_numbers = jnp.where(MASK, STEPS, 1_000_000)
    for function in (segments.total, segments.mean):
        objective = jax.value_and_grad(
            lambda x, f=function: jnp.sum(jnp.cos(jnp.arange(6.0)) * f(x, dirty_numbers, MASK))
        )
        clean, dirty = objective(X), objective(jnp.where(MASK, X, garbage))
        np.testing.assert_array_equal(dirty[0], clean[0])
        np.testing.assert_array_equal(dirty[1], clean[1])
        np.testing.assert_array_equal(dirty[1][~MASK], np.zeros(4))
    np.testing.assert_array_equal(segments.first(dirty_numbers, MASK), segments.first(STEPS, MASK))
    np.testing.assert_array_equal(segments.last(dirty_numbers, MASK), segments.last(STEPS, MASK))


@pytest.mark.parametrize("number", [-1, 6])
def test_numbers_out_of_range_are_loud_where_they_count(number):
    got = segments.total(X, STEPS.at[1, 2].set(number), MASK)
    np.testing.assert_array_equal(got, [[0, 3, 3, 0, 7, 7], [1, 2, jnp.nan, 4, 0, 0]])


def test_rows_are_independent_and_leading_axes_free():
    np.testing.assert_array_equal(segments.total(X[0], STEPS[0], MASK[0]), segments.total(X, STEPS, MASK)[0])
    deep = segments.total(X[:, None], STEPS[:, None], MASK[:, None])
    np.testing.assert_array_equal(deep[:, 0], segments.total(X, STEPS, MASK))
    assert segments.total(X.astype(jnp.bfloat16), STEPS, MASK).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: segments.token(MASK * 1.0), "mask has dtype float32: must be bool"),
        (lambda: segments.response(MASK[:, :0]), r"mask has shape \(2, 0\)"),
        (lambda: segments.steps(STEPS, MASK, delimiter=()), r"delimiter=\(\): must hold a token id"),
        (lambda: segments.steps(X, MASK, delimiter=(1,)), "tokens has dtype float32: must be integer"),
        (
            lambda: segments.steps(STEPS[0], MASK, delimiter=(1,)),
            r"tokens has shape \(6,\): must be \(2, 6\)",
        ),
        (lambda: segments.total(X, X, MASK), "segments has dtype float32: must be integer"),
        (lambda: segments.total(X, STEPS[0], MASK), r"segments has shape \(6,\): must be \(2, 6\)"),
        (lambda: segments.place_outcome(X, MASK), r"rewards has shape \(2, 6\): must be \(2,\)"),
        (
            lambda: segments.place_steps(X[:1], STEPS, MASK),
            r"step_rewards has shape \(1, 6\): must be \(2, 6\)",
        ),
        (lambda: segments.place_steps(X[:, :0], STEPS, MASK), r"step_rewards has shape \(2, 0\)"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("token", lambda: segments.token(MASK)),
        ("response", lambda: segments.response(MASK)),
        ("steps", lambda: segments.steps(jnp.where(MASK, X.astype(jnp.int32), 3), MASK, delimiter=(2,))),
        ("total", lambda: segments.total(X, STEPS, MASK)),
        ("mean", lambda: segments.mean(X, STEPS, MASK)),
        ("first", lambda: segments.first(STEPS, MASK)),
        ("last", lambda: segments.last(STEPS, MASK)),
        ("place_outcome", lambda: segments.place_outcome(X[:, 1], MASK)),
        ("place_steps", lambda: segments.place_steps(X, STEPS, MASK)),
    )
    def test_same_with_and_without_jit(self, call):
        np.testing.assert_array_equal(self.variant(call)(), call())
