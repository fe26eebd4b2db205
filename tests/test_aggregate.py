"""Aggregations: the worked table, and invariance to how a batch is split, ordered and padded."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import aggregate

X = jnp.array([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 7.0, 7.0], [9.0, 9.0, 9.0, 9.0]])
MASK = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
AGGREGATORS = {
    "token_mean": aggregate.token_mean,
    "sequence_mean_token_sum": aggregate.sequence_mean_token_sum,
    "sequence_mean_token_mean": aggregate.sequence_mean_token_mean,
    "sequence_mean_token_mean_count_empty": functools.partial(aggregate.sequence_mean_token_mean, count_empty=True),
    "constant_length": functools.partial(aggregate.constant_length, length=4),
}
GOLDEN = {
    "token_mean": 1.333333,
    "sequence_mean_token_sum": 4.0,
    "sequence_mean_token_mean": 1.5,
    "sequence_mean_token_mean_count_empty": 1.0,
    "constant_length": 0.666667,
}
BY_NAME = pytest.mark.parametrize("name", AGGREGATORS)


@BY_NAME
def test_golden_table(name):
    np.testing.assert_allclose(AGGREGATORS[name](X, MASK).mean, GOLDEN[name], atol=1e-6)


def test_empty_rows_may_be_counted_in_sums_too():
    counted = aggregate.sequence_mean_token_sum(X, MASK, count_empty=True)
    np.testing.assert_allclose(counted.mean, 8 / 3, rtol=1e-6)


def test_micro_batches_weigh_by_their_tokens():
    first = aggregate.token_mean(jnp.ones(4), jnp.ones(4, bool))
    second = aggregate.token_mean(jnp.array([5.0]), jnp.ones(1, bool))
    np.testing.assert_allclose((first + second).mean, 1.8, rtol=1e-6)


def test_length_bias_of_grpo_and_its_cure():
    """Derivatives by one token of each of four responses, with the lengths of the 12 × 13 example."""
    lengths = [7, 22, 7, 35]
    mask = jnp.arange(35)[None] < jnp.array(lengths)[:, None]

    def per_token(aggregator):
        return np.asarray(jax.grad(lambda x: aggregator(x, mask).mean)(jnp.zeros(mask.shape)))[:, 0]

    np.testing.assert_allclose(per_token(aggregate.sequence_mean_token_mean), 1 / (4 * np.array(lengths)), rtol=1e-5)
    np.testing.assert_allclose(per_token(aggregate.token_mean), np.full(4, 1 / 71), rtol=1e-5)
    constant = functools.partial(aggregate.constant_length, length=35)
    np.testing.assert_allclose(per_token(constant), np.full(4, 1 / 140), rtol=1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), parts=st.sampled_from([1, 2, 3, 6]), padding=st.sampled_from([0, 3]))
def test_splitting_reordering_and_padding_change_nothing(seed, parts, padding):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(6, 5)).astype(np.float32), rng.random((6, 5)) < 0.6
    order = rng.permutation(6)
    left = np.pad(x[order], ((0, 0), (padding, 0)), constant_values=np.nan)
    left_mask = np.pad(mask[order], ((0, 0), (padding, 0)))
    for aggregator in AGGREGATORS.values():
        whole = aggregator(x, mask)
        split = [aggregator(a, m) for a, m in zip(np.split(left, parts), np.split(left_mask, parts), strict=True)]
        summed = functools.reduce(operator.add, split)
        np.testing.assert_allclose(summed.total, whole.total, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(summed.weight, whole.weight, rtol=1e-6)


@BY_NAME
@pytest.mark.parametrize("garbage", [jnp.nan, -jnp.inf])
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(name, garbage):
    objective = jax.value_and_grad(lambda x: AGGREGATORS[name](x, MASK).mean)
    value, gradient = objective(jnp.where(MASK, X, garbage))
    np.testing.assert_allclose(value, GOLDEN[name], atol=1e-6)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(gradient[~MASK], np.zeros(6))
    assert np.all(gradient[MASK] > 0)


@BY_NAME
def test_no_token_at_all_gives_zero(name):
    nothing = jnp.zeros(X.shape, bool)
    value, gradient = jax.value_and_grad(lambda x: AGGREGATORS[name](x, nothing).mean)(X)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros(X.shape))


@BY_NAME
def test_float32_out_and_free_leading_axes(name):
    half = AGGREGATORS[name](X.astype(jnp.bfloat16), MASK)
    assert half.total.dtype == half.weight.dtype == jnp.float32
    assert half.total.shape == half.weight.shape == ()
    np.testing.assert_allclose(half.mean, GOLDEN[name], atol=1e-6)
    deep = AGGREGATORS[name](X.reshape(3, 1, 4), MASK.reshape(3, 1, 4))
    np.testing.assert_allclose(deep.mean, GOLDEN[name], atol=1e-6)
    row = AGGREGATORS[name](X[1], MASK[1])
    row_of_batch = AGGREGATORS[name](X[1:2], MASK[1:2])
    np.testing.assert_allclose([row.total, row.weight], [row_of_batch.total, row_of_batch.weight])


@BY_NAME
def test_errors_name_argument_value_and_remedy(name):
    with pytest.raises(ValueError, match="mask has dtype float32: must be bool; write mask > 0"):
        AGGREGATORS[name](X, MASK.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"mask has shape \(4,\): must be \(3, 4\)"):
        AGGREGATORS[name](X, MASK[0])
    with pytest.raises(ValueError, match=r"x has shape \(3, 0\)"):
        AGGREGATORS[name](X[:, :0], MASK[:, :0])


@pytest.mark.parametrize("length", [0, -3])
def test_length_must_be_positive(length):
    with pytest.raises(ValueError, match=f"length={length}: must be greater than 0"):
        aggregate.constant_length(X, MASK, length=length)


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*AGGREGATORS.items())
    def test_same_with_and_without_jit(self, function):
        chex.assert_trees_all_close(self.variant(function)(X, MASK), function(X, MASK), rtol=1e-6)
