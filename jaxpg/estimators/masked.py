"""Sums, means and variances over the True positions of a mask: the only place that divides by a mask.

What stands at masked positions never matters, NaN and infinities included, neither for values nor for
gradients. An empty mask gives finite zeros. Inputs are computed on in float32 (float64 stays).
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.types import Array

Axis = int | tuple[int, ...] | None


def fill(x, mask, *, value: float = 0.0) -> Array:
    """Replaces x at masked positions.

        y_t = x_t where mask_t, else value

    Apply it to log-probs before any exp: the gradient of exp at an infinity under the mask would be 0 · inf =
    NaN, which no mask applied afterwards can undo.

    Args:
      x: [...] any real dtype; carries gradient at True positions, and exactly 0 elsewhere.
      mask: [...] bool.
      value: stands at masked positions.

    Returns:
      [...] float32.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`.
    """
    x = checks.as_float(x)
    return jnp.where(checks.boolean("mask", mask, x.shape), x, value)


def sum(x, mask, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Adds up x over the True positions.

    Args:
      x: [...]; carries gradient at True positions.
      mask: [...] bool.
      axis: axes to reduce, all by default.
      keepdims: keeps reduced axes with length 1.

    Returns:
      float32, 0 for an empty mask.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`.
    """
    return jnp.sum(fill(x, mask), axis=axis, keepdims=keepdims)


def count(mask, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Counts the True positions.

    Args:
      mask: [...] bool.
      axis: axes to reduce, all by default.
      keepdims: keeps reduced axes with length 1.

    Returns:
      float32, a whole number.

    Raises:
      ValueError: if `mask` is not boolean.
    """
    mask = checks.boolean("mask", mask, jnp.shape(mask))
    # Counted as integers: float32 stops counting at 2^24.
    return jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.int32).astype(jnp.float32)


def mean(x, mask, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Averages x over the True positions.

        mean = Σ mask·x / Σ mask

    Args:
      x: [...]; carries gradient at True positions.
      mask: [...] bool.
      axis: axes to reduce, all by default.
      keepdims: keeps reduced axes with length 1.

    Returns:
      float32, 0 for an empty mask.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`.
    """
    total = sum(x, mask, axis=axis, keepdims=keepdims)
    return total / jnp.maximum(count(mask, axis=axis, keepdims=keepdims), 1.0)


def center(x, mask, *, axis: Axis = None) -> Array:
    """Subtracts the mean over the True positions.

        y = (x − top) − mean(x − top),   top = the largest unmasked x

    Subtracting `top` first changes nothing in exact arithmetic; in float32 it makes constant inputs give
    exactly 0, whatever the order and number of the summands.

    Args:
      x: [...]; carries gradient at True positions, `top` does not need to.
      mask: [...] bool.
      axis: axes that share a mean, all by default.

    Returns:
      [...] float32, 0 at masked positions.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`.
    """
    x = fill(x, mask)
    top = jnp.max(jnp.where(mask, x, -jnp.inf), axis=axis, keepdims=True, initial=-jnp.inf)
    # An empty mask leaves −inf; only that may be replaced, a NaN must stay visible.
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    shifted = x - top
    return fill(shifted - mean(shifted, mask, axis=axis, keepdims=True), mask)


def var(x, mask, *, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Array:
    """Computes the variance over the True positions, in two passes, so that it is never negative.

        var = Σ mask·(x − mean)² / (Σ mask − ddof)

    Args:
      x: [...]; carries gradient at True positions.
      mask: [...] bool.
      axis: axes to reduce, all by default.
      keepdims: keeps reduced axes with length 1.
      ddof: 0 for the population's variance, 1 for the unbiased estimate.

    Returns:
      float32, 0 where no more than `ddof` positions are True.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, or `ddof` is negative.
    """
    checks.non_negative("ddof", ddof)
    total = sum(jnp.square(center(x, mask, axis=axis)), mask, axis=axis, keepdims=keepdims)
    degrees = count(mask, axis=axis, keepdims=keepdims) - ddof
    return jnp.where(degrees > 0, total / jnp.where(degrees > 0, degrees, 1.0), 0.0)


def std(x, mask, *, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Array:
    """Computes the standard deviation over the True positions; its gradient at 0 is taken as 0.

    Args:
      x: [...]; carries gradient at True positions.
      mask: [...] bool.
      axis: axes to reduce, all by default.
      keepdims: keeps reduced axes with length 1.
      ddof: 0 for the population's, 1 for the sample's.

    Returns:
      float32, 0 where no more than `ddof` positions are True.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, or `ddof` is negative.
    """
    return safe_sqrt(var(x, mask, axis=axis, keepdims=keepdims, ddof=ddof))


def safe_sqrt(x) -> Array:
    """Takes the root, with gradient 0 where x is 0 (a plain root has gradient inf there)."""
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))


def safe_divide(x, divisor) -> Array:
    """Divides, with value and gradient 0 where the divisor is 0."""
    # Compared with 0, not tested for > 0: a NaN must come out as one.
    zero = divisor == 0
    return jnp.where(zero, 0.0, x / jnp.where(zero, 1.0, divisor))


def whiten(x, mask, *, ddof: int = 0, epsilon: float = 1e-8, shift_mean: bool = True, axis: Axis = None) -> Array:
    """Scales x to variance 1 and shifts it to mean 0 over the True positions.

        y = (x − mean) / √(var + epsilon)  [+ mean, unless shift_mean]

    Statistics are those of the arrays given: whiten the whole batch before it is cut into micro-batches.

    Args:
      x: [...]; carries gradient through x, mean and variance.
      mask: [...] bool.
      ddof: 0 for the population's variance, 1 for the sample's.
      epsilon: added to the variance; with a constant x the result is exactly 0 (or the mean).
      shift_mean: False keeps the mean, as reward scaling wants it.
      axis: axes that share statistics, all by default.

    Returns:
      [...] float32, 0 at masked positions.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, or `ddof` or `epsilon` is negative.
    """
    checks.non_negative("epsilon", epsilon)
    centered = center(x, mask, axis=axis)
    scale = safe_sqrt(var(x, mask, axis=axis, keepdims=True, ddof=ddof) + epsilon)
    y = safe_divide(centered, scale)
    return y if shift_mean else fill(y + mean(x, mask, axis=axis, keepdims=True), mask)
