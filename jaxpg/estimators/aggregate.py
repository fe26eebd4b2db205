"""Reductions of per-token values to (total, weight), which add up over micro-batches, devices and hosts.

The division happens once, at the end (`Weighted.mean`), so no aggregation depends on how a batch was split. A
row is the last axis: a response. Values under the mask never matter, NaN and infinities included.
"""

import jax.numpy as jnp

from jaxpg.estimators import checks, masked
from jaxpg.types import Array, Weighted


def token_mean(x, mask) -> Weighted:
    """Averages over all tokens of the batch: every token weighs the same, a long response more.

        Σ_i Σ_t x_it / Σ_i |o_i|

    Source: Yu et al. 2025 (DAPO), eq. 12.

    Args:
      x: [..., T]; carries gradient at True positions, exactly 0 elsewhere.
      mask: [..., T] bool.

    Returns:
      Weighted(total, weight = number of tokens), float32.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, or T is 0.
    """
    checks.has_axis("x", x, "token")
    return Weighted(total=masked.sum(x, mask), weight=masked.count(mask))


def sequence_mean_token_mean(x, mask, *, count_empty: bool = False) -> Weighted:
    """Averages over the tokens of each response, then over responses: a token of a long response weighs less.

        1/N Σ_i 1/|o_i| Σ_t x_it

    The length bias of GRPO. Source: Shao et al. 2024 (GRPO), eq. 3.

    Args:
      x: [..., T]; carries gradient at True positions, exactly 0 elsewhere.
      mask: [..., T] bool.
      count_empty: True counts responses without tokens as zeros.

    Returns:
      Weighted(total, weight = number of responses N), float32.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, or T is 0.
    """
    checks.has_axis("x", x, "token")
    return Weighted(total=jnp.sum(masked.mean(x, mask, axis=-1)), weight=_rows(mask, count_empty))


def sequence_mean_token_sum(x, mask, *, count_empty: bool = False) -> Weighted:
    """Adds up the tokens of each response, then averages over responses: the policy gradient's own weighting.

        1/N Σ_i Σ_t x_it

    Source: Liu et al. 2025 (Dr. GRPO), its objective, without a constant.

    Args:
      x: [..., T]; carries gradient at True positions, exactly 0 elsewhere.
      mask: [..., T] bool.
      count_empty: True counts responses without tokens as zeros.

    Returns:
      Weighted(total, weight = number of responses N), float32.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, or T is 0.
    """
    checks.has_axis("x", x, "token")
    return Weighted(total=masked.sum(x, mask), weight=_rows(mask, count_empty))


def constant_length(x, mask, *, length: float) -> Weighted:
    """Divides the sum of each response by one constant, then averages over all, empty ones included.

        1/N Σ_i 1/length Σ_t x_it

    No bias by length: the constant only rescales the learning rate. Source: Liu et al. 2025 (Dr. GRPO),
    its objective and listing, where the constant is the generation budget.

    Args:
      x: [..., T]; carries gradient at True positions, exactly 0 elsewhere.
      mask: [..., T] bool.
      length: tokens, e.g. max_new_tokens; 1 gives the mean over responses of plain sums.

    Returns:
      Weighted(total, weight = number of rows N), float32.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `x`, T is 0, or `length` is not positive.
    """
    checks.positive("length", length)
    checks.has_axis("x", x, "token")
    return Weighted(total=masked.sum(x, mask) / length, weight=_rows(mask, True))


def _rows(mask, count_empty: bool) -> Array:
    """Counts the responses, or those that have a token."""
    filled = jnp.any(jnp.asarray(mask), axis=-1)
    return masked.count(jnp.ones_like(filled) if count_empty else filled)
