"""Importance ratios π/π_old of tokens, steps and responses, and weights against a mismatched sampler.

Log-probs outside the mask may be anything for functions that take a mask. The others are pointwise: set the
log-probs to 0 off the actions first (`masked.fill`, as the training loop does), since the gradient of exp at
an infinity is 0 · inf = NaN, whatever mask is applied later.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.estimators import segments as segments_lib
from jaxpg.types import Array


def token(log_probs, old_log_probs) -> Array:
    """Computes each token's ratio.

        ratio_t = exp(log π(a_t) − log π_old(a_t))

    Source: Schulman et al. 2017 (PPO), section 3, r_t(θ).

    Args:
      log_probs: [..., T]; carries gradient.
      old_log_probs: [..., T]; carries gradient too if it depends on the parameters, normally it is data.

    Returns:
      [..., T] float32.

    Raises:
      ValueError: if shapes differ.
    """
    return jnp.exp(log_ratio(log_probs, old_log_probs))


def segment_product(log_probs, old_log_probs, segments, mask) -> Array:
    """Computes the ratio of each segment's probabilities, and gives it to every token of the segment.

        ratio_t = exp(Σ_{u in the segment of t} d_u),   d = log π − log π_old

    The exact importance ratio of an action that is a step or a response; its variance grows with the length.

    Args:
      log_probs: [..., T]; carries gradient at True positions.
      old_log_probs: [..., T]; normally data.
      segments: [..., T] int, 0 <= segments < T at True positions (see `segments`).
      mask: [..., T] bool, action tokens.

    Returns:
      [..., T] float32, 1 outside the mask.

    Raises:
      ValueError: if shapes differ, `mask` is not boolean or `segments` not integer.
    """
    return jnp.exp(segments_lib.total(log_ratio(log_probs, old_log_probs), segments, mask))


def segment_mean(log_probs, old_log_probs, segments, mask) -> Array:
    """Computes the geometric mean of each segment's token ratios, and gives it to every token of the segment.

        ratio_t = exp(1/|segment| Σ_{u in the segment of t} d_u),   d = log π − log π_old

    Source: Zheng et al. 2025 (GSPO), eq. 7, for segments that are whole responses.

    Args:
      log_probs: [..., T]; carries gradient at True positions.
      old_log_probs: [..., T]; normally data.
      segments: [..., T] int, 0 <= segments < T at True positions (see `segments`).
      mask: [..., T] bool, action tokens.

    Returns:
      [..., T] float32, 1 outside the mask.

    Raises:
      ValueError: if shapes differ, `mask` is not boolean or `segments` not integer.
    """
    return jnp.exp(segments_lib.mean(log_ratio(log_probs, old_log_probs), segments, mask))


def truncated(log_probs, sampler_log_probs, *, cap: float) -> Array:
    """Computes importance weights against the sampler's probabilities, truncated from above.

        weight_t = stop_gradient(min(π(a_t)/π_sampler(a_t), cap))

    To be multiplied onto a per-token loss when sampler and trainer compute different probabilities.
    Source: Ionides 2008 (truncated importance sampling); Yao et al. 2025 for sampler/trainer mismatch.

    Args:
      log_probs: [..., T], the trainer's, at the sampler's parameters; no gradient.
      sampler_log_probs: [..., T], as the sampler reported them; no gradient.
      cap: largest weight.

    Returns:
      [..., T] float32.

    Raises:
      ValueError: if shapes differ or `cap` is not positive.
    """
    checks.positive("cap", cap)
    checks.same_shape(log_probs=log_probs, sampler_log_probs=sampler_log_probs)
    return jax.lax.stop_gradient(jnp.minimum(token(log_probs, sampler_log_probs), cap))


def banded(log_probs, sampler_log_probs, *, low: float = 0.5, high: float = 5.0) -> Array:
    """Computes importance weights against the sampler's probabilities, 0 outside a band (IcePop).

        weight_t = stop_gradient(k_t if low <= k_t <= high else 0),   k_t = π(a_t)/π_sampler(a_t)

    A dropped token still counts in an aggregator's weight; take it out of the mask as well (`weight > 0`) for
    a mean over the kept tokens.
    Source: Ling Team 2025 (Ring-1T), section on IcePop, the masking function M(k; α, β).

    Args:
      log_probs: [..., T], the trainer's, at the sampler's parameters; no gradient.
      sampler_log_probs: [..., T], as the sampler reported them; no gradient.
      low: smallest weight kept.
      high: largest weight kept.

    Returns:
      [..., T] float32.

    Raises:
      ValueError: if shapes differ, `low` is negative or `high` is below `low`.
    """
    checks.non_negative("low", low)
    checks.at_least("high", high, low)
    checks.same_shape(log_probs=log_probs, sampler_log_probs=sampler_log_probs)
    weight = token(log_probs, sampler_log_probs)
    # Compared for being outside: a NaN must come out as one.
    return jax.lax.stop_gradient(jnp.where((weight < low) | (weight > high), 0.0, weight))


def log_ratio(log_probs, old_log_probs) -> Array:
    """Subtracts in float32: d = log π − log π_old, of equal shapes."""
    checks.same_shape(log_probs=log_probs, old_log_probs=old_log_probs)
    return checks.as_float(log_probs) - checks.as_float(old_log_probs)
