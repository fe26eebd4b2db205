"""Importance ratios π/π_old of tokens, steps and responses, and weights against a mismatched sampler.

Log-ratios of tokens and of segments are bounded to ±`LOG_RATIO_BOUND` before they are exponentiated. Ratios therefore
lie between e^{−20} and e^{20}, and one broken token cannot make a batch's loss infinite. Past the bound the gradient is
0. A NaN stays a NaN. verl bounds token ratios at ±20 as well.

Log-probs outside the mask may be anything for functions that take a mask. The others are pointwise: set the
log-probs to 0 off the actions first (`masked.fill`, as `make_loss_fn` does), since a NaN there would reach the
gradient, whatever mask is applied later.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.estimators import segments as segments_lib
from jaxpg.types import Array

LOG_RATIO_BOUND = 20.0  # nats; e^20 is 4.9e8, so that sums over a batch stay far below float32's 3e38


def token(log_probs, old_log_probs) -> Array:
    """Computes each token's ratio.

        ratio_t = exp(d_t),   d = log π − log π_old, bounded to ±20

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

        ratio_t = exp(Σ_{u in the segment of t} d_u),   d = log π − log π_old; d and its sum are bounded to ±20

    Within the bounds this is the exact importance ratio of an action that is a step or a response. Its variance grows
    with the length.

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
    return jnp.exp(bounded(segments_lib.total(log_ratio(log_probs, old_log_probs), segments, mask)))


def segment_mean(log_probs, old_log_probs, segments, mask) -> Array:
    """Computes the geometric mean of each segment's token ratios, and gives it to every token of the segment.

        ratio_t = exp(1/|segment| Σ_{u in the segment of t} d_u),   d = log π − log π_old, bounded to ±20

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

    To be multiplied onto a per-token loss when sampler and trainer compute different probabilities. The log-ratio is
    bounded to ±20.
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
    a mean over the kept tokens. The log-ratio is bounded to ±20.
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
    """Subtracts log-probs in float32 and bounds the difference.

        d_t = clip(log π(a_t) − log π_old(a_t), ±20)

    Args:
      log_probs: [...]; carries gradient, exactly 0 past the bound.
      old_log_probs: [...]; normally data.

    Returns:
      [...] float32.

    Raises:
      ValueError: if shapes differ.
    """
    checks.same_shape(log_probs=log_probs, old_log_probs=old_log_probs)
    return bounded(checks.as_float(log_probs) - checks.as_float(old_log_probs))


def bounded(log_ratios) -> Array:
    """Bounds log-ratios, or sums of them, before they are exponentiated.

        y = clip(d, ±20)

    Args:
      log_ratios: [...] d; carries gradient, exactly 0 past the bound.

    Returns:
      [...] float32; NaN where d is NaN.
    """
    return jnp.clip(checks.as_float(log_ratios), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
