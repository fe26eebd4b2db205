"""Critic losses: golden values and gradients, the pessimism of the clip, the proximal penalty."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import value_losses

VALUES = jnp.array([0.0, 1.0, 2.0, 0.25])
OLD = jnp.array([0.5, 0.9, 1.0, 0.25])
RETURNS = jnp.array([1.0, 1.0, 0.0, 1.25])


def test_squared_golden():
    value, gradient = jax.value_and_grad(lambda v: jnp.sum(value_losses.squared(v, RETURNS)))(VALUES)
    np.testing.assert_allclose(value_losses.squared(VALUES, RETURNS), [0.5, 0.0, 2.0, 0.5])
    np.testing.assert_allclose(value, 3.0)
    np.testing.assert_allclose(gradient, VALUES - RETURNS)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.0, 0.5, 2.0, 0.5 * 1.3**2, 0.0),  # moved too far towards the target: stopped
        (0.6, 0.5, 2.0, 0.5 * 1.4**2, -1.4),  # still near: free
        (0.0, 0.5, 2.0, 0.5 * 2.0**2, -2.0),  # moved away: must come back
        (2.5, 0.5, 1.0, 0.5 * 1.5**2, 1.5),  # overshot the target by more than it was off
    ],
)
def test_clipped_golden(value, old, target, loss, gradient):
    got = jax.value_and_grad(lambda v: value_losses.clipped(v, old, target, clip=0.2))(value)
    np.testing.assert_allclose(got, (loss, gradient), rtol=1e-5, atol=1e-7)


def test_clipped_is_never_below_squared_and_equals_it_with_a_wide_clip():
    assert np.all(value_losses.clipped(VALUES, OLD, RETURNS, clip=0.1) >= value_losses.squared(VALUES, RETURNS))
    wide = value_losses.clipped(VALUES, OLD, RETURNS, clip=100.0)
    np.testing.assert_allclose(wide, value_losses.squared(VALUES, RETURNS), rtol=1e-6)
    gradient = jax.grad(lambda v: jnp.sum(value_losses.clipped(v, OLD, RETURNS, clip=100.0)))(VALUES)
    np.testing.assert_allclose(gradient, VALUES - RETURNS, rtol=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(numbers=st.tuples(*[st.integers(-48, 48)] * 3))
def test_clipped_equals_its_definition(numbers):
    """½·max of the two squares; the gradient is that of `squared` or 0, and 0 only for a move towards the target."""
    value, old, target = np.float32(numbers) / 16
    loss, gradient = jax.value_and_grad(lambda v: value_losses.clipped(v, old, target, clip=0.5))(jnp.float32(value))
    near = old + np.clip(value - old, -0.5, 0.5)
    np.testing.assert_allclose(loss, 0.5 * max((value - target) ** 2, (near - target) ** 2), rtol=1e-5)
    if abs(near - target) > abs(value - target) + 1e-5:
        assert gradient == 0 and (value - old) * (target - old) > 0
    elif abs(value - target) > abs(near - target) + 1e-5 or value == near:
        np.testing.assert_allclose(gradient, value - target, rtol=1e-5)


def test_proximal_penalty():
    params = {"a": jnp.array([1.0, 2.0]), "b": {"c": jnp.array(3.0, jnp.bfloat16)}}
    old = {"a": jnp.array([0.0, 0.0]), "b": {"c": jnp.array(1.0, jnp.bfloat16)}}
    value, gradient = jax.value_and_grad(lambda p: value_losses.proximal(p, old, coef=0.5))(params)
    np.testing.assert_allclose(value, 0.5 * (1 + 4 + 4))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(gradient["a"], [1.0, 2.0])
    np.testing.assert_allclose(gradient["b"]["c"].astype(jnp.float32), 2.0)


def test_proximal_fit_moves_part_of_the_way():
    """min ½(φ−q)² + λ(φ−φ_i)² is at (q + 2λφ_i)/(1 + 2λ): the gradients must cancel there."""
    target, start, coef = 3.0, 1.0, 0.25
    best = (target + 2 * coef * start) / (1 + 2 * coef)

    def objective(phi):
        fit = value_losses.squared(phi, jnp.float32(target))
        return fit + value_losses.proximal({"v": phi}, {"v": jnp.float32(start)}, coef=coef)

    np.testing.assert_allclose(jax.grad(objective)(jnp.float32(best)), 0.0, atol=1e-6)


def test_bfloat16_is_computed_in_float32():
    inputs = [x.astype(jnp.bfloat16) for x in (VALUES, OLD, RETURNS)]
    wide = [x.astype(jnp.float32) for x in inputs]
    got = value_losses.clipped(*inputs, clip=0.2)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, value_losses.clipped(*wide, clip=0.2))
    np.testing.assert_array_equal(value_losses.squared(inputs[0], inputs[2]), value_losses.squared(wide[0], wide[2]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: value_losses.squared(VALUES, RETURNS[:2]), r"returns has shape \(2,\): must be \(4,\)"),
        (lambda: value_losses.clipped(VALUES, OLD[:2], RETURNS, clip=0.1), r"old_values has shape \(2,\)"),
        (lambda: value_losses.clipped(VALUES, OLD, RETURNS, clip=-0.1), "clip=-0.1: must be 0 or greater"),
        (
            lambda: value_losses.proximal({"a": OLD}, {"b": OLD}, coef=1.0),
            "old_params has another tree structure",
        ),
        (lambda: value_losses.proximal({"a": OLD}, {"a": OLD[:2]}, coef=1.0), r"old_params has shape \(2,\)"),
        (lambda: value_losses.proximal({"a": OLD}, {"a": OLD}, coef=-1.0), "coef=-1.0: must be 0 or greater"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("squared", lambda v: value_losses.squared(v, RETURNS)),
        ("clipped", lambda v: value_losses.clipped(v, OLD, RETURNS, clip=0.2)),
        ("proximal", lambda v: value_losses.proximal({"v": v}, {"v": OLD}, coef=0.1)),
    )
    def test_same_with_and_without_jit(self, function):
        np.testing.assert_allclose(self.variant(function)(VALUES), function(VALUES), rtol=1e-6)
