"""Masked reductions: oracles in numpy float64, indifference to what stands under the mask, exact zeros."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import masked

MASKS = {
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "interior": [[1, 0, 1, 0, 1], [0, 1, 0, 1, 1]],
    "full": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
}
X = np.array([[0.5, -1.0, 2.0, 3.0, -0.25], [4.0, 1.0, 0.0, -2.0, 8.0]], np.float32)
FUNCTIONS = {
    "fill": masked.fill,
    "sum": masked.sum,
    "mean": masked.mean,
    "center": masked.center,
    "var": masked.var,
    "std": masked.std,
    "whiten": masked.whiten,
    "whiten_rows_keep_mean": lambda x, m: masked.whiten(x, m, axis=-1, shift_mean=False, ddof=1),
}
BY_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)
BY_MASK = pytest.mark.parametrize("layout", MASKS)


def mask_of(layout):
    return jnp.array(MASKS[layout], bool)


@BY_MASK
@pytest.mark.parametrize("ddof", [0, 1])
def test_moments_are_those_of_the_selected_numbers(layout, ddof):
    mask = mask_of(layout)
    selected = X[np.asarray(mask)].astype(np.float64)
    np.testing.assert_allclose(masked.sum(X, mask), selected.sum(), rtol=1e-6)
    np.testing.assert_allclose(masked.mean(X, mask), selected.mean(), rtol=1e-6)
    np.testing.assert_allclose(masked.var(X, mask, ddof=ddof), selected.var(ddof=ddof), rtol=1e-6)
    np.testing.assert_allclose(masked.std(X, mask, ddof=ddof), selected.std(ddof=ddof), rtol=1e-6)
    assert masked.count(mask) == selected.size


@BY_MASK
def test_axis_reduces_each_row_by_itself(layout):
    mask = mask_of(layout)
    rows = [X[i][np.asarray(mask)[i]] for i in range(2)]
    np.testing.assert_allclose(masked.mean(X, mask, axis=-1), [r.mean() for r in rows], rtol=1e-6)
    np.testing.assert_allclose(masked.var(X, mask, axis=-1), [r.var() for r in rows], rtol=1e-6)
    assert masked.var(X, mask, axis=-1, keepdims=True).shape == (2, 1)
    one_row = masked.whiten(X[0], mask[0])
    np.testing.assert_allclose(masked.whiten(X, mask, axis=-1)[0], one_row, rtol=1e-6)


def test_whiten_golden():
    x, mask = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones(4, bool)
    np.testing.assert_allclose(masked.whiten(x, mask, ddof=1), [-1.161895, -0.387298, 0.387298, 1.161895], atol=2e-6)
    np.testing.assert_allclose(masked.whiten(x, mask), [-1.341641, -0.447214, 0.447214, 1.341641], atol=2e-6)
    kept = masked.whiten(x, mask, shift_mean=False)
    np.testing.assert_allclose(kept, masked.whiten(x, mask) + 2.5, rtol=1e-6)


@pytest.mark.parametrize(("number", "value"), [(3, 0.9), (7, 1000.1), (13, -1e-3), (5, 1e30)])
def test_constant_input_has_exactly_no_spread(number, value):
    x, mask = jnp.full(number, value, jnp.float32), jnp.ones(number, bool)
    assert masked.var(x, mask) == 0
    assert not np.any(masked.center(x, mask))
    assert not np.any(masked.whiten(x, mask, epsilon=0.0))
    np.testing.assert_array_equal(masked.whiten(x, mask, shift_mean=False), masked.mean(x, mask))


def test_variance_far_from_zero_keeps_its_digits():
    x = np.float32(10_000.0) + np.arange(64, dtype=np.float32) / 64
    np.testing.assert_allclose(masked.var(x, jnp.ones(64, bool)), x.astype(np.float64).var(), rtol=1e-4)


@BY_FUNCTION
@pytest.mark.parametrize("axis", [None, -1])
def test_empty_mask_gives_zeros_and_zero_gradient(name, axis):
    empty = jnp.zeros((2, 5), bool)
    function = FUNCTIONS[name]
    options = {} if axis is None or name in ("fill", "whiten_rows_keep_mean") else {"axis": axis}
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(function(x, empty, **options)))(jnp.asarray(X))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(X))


@BY_FUNCTION
@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
def test_what_stands_under_the_mask_never_matters(name, garbage):
    mask = mask_of("interior")
    weights = jnp.cos(jnp.arange(10.0)).reshape(2, 5)  # unequal, or gradients of centered values vanish
    objective = jax.value_and_grad(lambda x: jnp.sum(weights * FUNCTIONS[name](x, mask)))
    clean, dirty = jnp.where(mask, X, 0.0), jnp.where(mask, X, garbage)
    for expected, got in zip(objective(clean), objective(dirty), strict=True):
        assert np.all(np.isfinite(got))
        np.testing.assert_array_equal(got, expected)
    assert not np.any(objective(dirty)[1][~mask])


@BY_FUNCTION
def test_a_nan_that_counts_stays_visible(name):
    x = jnp.asarray(X).at[0, 2].set(jnp.nan)
    assert np.any(np.isnan(FUNCTIONS[name](x, mask_of("interior"))))


@BY_FUNCTION
def test_gradients_match_finite_differences(name, x64):
    mask = mask_of("interior")
    x = X.astype(np.float64)
    jax.test_util.check_grads(lambda x: FUNCTIONS[name](x, mask), (x,), order=1, modes=["rev"], atol=1e-5)


def test_gradient_of_std_at_zero_spread_is_zero():
    gradient = jax.grad(lambda x: masked.std(x, jnp.ones(3, bool)))(jnp.full(3, 0.9))
    np.testing.assert_array_equal(gradient, np.zeros(3))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shift=st.floats(-50, 50), scale=st.floats(0.1, 20), seed=st.integers(0, 99))
def test_whitening_ignores_shift_scale_and_order(shift, scale, seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=12).astype(np.float32), rng.random(12) < 0.7
    mask[:2] = True
    y = masked.whiten(x, mask)
    np.testing.assert_allclose(masked.whiten(scale * x + shift, mask), y, atol=2e-3)
    order = rng.permutation(12)
    np.testing.assert_allclose(masked.whiten(x[order], mask[order]), y[order], atol=1e-5)


@BY_FUNCTION
def test_bfloat16_is_computed_in_float32(name):
    mask = mask_of("interior")
    x = jnp.asarray(X, jnp.bfloat16)
    y = FUNCTIONS[name](x, mask)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, FUNCTIONS[name](x.astype(jnp.float32), mask))


@BY_FUNCTION
def test_leading_axes_are_free(name):
    mask = mask_of("interior")
    flat = FUNCTIONS[name](X[0], mask[0])
    stacked = FUNCTIONS[name](jnp.broadcast_to(X[0], (1, 1, 5)), mask[:1, None])
    np.testing.assert_allclose(stacked.reshape(flat.shape), flat, rtol=1e-6)


@BY_FUNCTION
def test_errors_name_the_mask(name):
    with pytest.raises(ValueError, match=r"mask has dtype float32: must be bool; write mask > 0"):
        FUNCTIONS[name](X, np.ones(X.shape, np.float32))
    with pytest.raises(ValueError, match=r"mask has shape \(5,\): must be \(2, 5\)"):
        FUNCTIONS[name](X, np.ones(5, bool))


def test_errors_of_numbers():
    mask = mask_of("full")
    with pytest.raises(ValueError, match="ddof=-1: must be 0 or greater"):
        masked.var(X, mask, ddof=-1)
    with pytest.raises(ValueError, match=r"epsilon=-0.1: must be 0 or greater"):
        masked.whiten(X, mask, epsilon=-0.1)
    with pytest.raises(ValueError, match="mask has dtype int32"):
        masked.count(jnp.ones(3, jnp.int32))


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*FUNCTIONS.items())
    def test_same_with_and_without_jit(self, function):
        mask = mask_of("interior")
        np.testing.assert_allclose(self.variant(function)(X, mask), function(X, mask), rtol=1e-6, atol=1e-7)
