"""Estimators of KL(π‖π_ref) from samples, its exact value, and controllers of its coefficient.

With a ~ π and d = log π(a) − log π_ref(a), k1, k2 and k3 all estimate KL(π‖π_ref) *as values* (k2 with a
small bias). *As losses* differentiated through log π they differ, on policy (Tang & Munos 2025; proved in
`exact`):

    E ∇k1 = 0                the KL belongs into the reward then, or use another one
    E ∇k2 = ∇KL(π‖π_ref)
    E ∇k3 = ∇KL(π_ref‖π)     gradient of the other KL

All three bound d to ±20 (`ratios.LOG_RATIO_BOUND`), so that k3 of one broken token cannot be infinite; past the bound
their gradient is 0. `clamp` tightens that.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.estimators.ratios import log_ratio
from jaxpg.types import Array

Clamp = tuple[float, float] | None


def k1(log_probs, ref_log_probs, *, clamp: Clamp = None) -> Array:
    """Estimates KL(π‖π_ref) by the log-ratio: unbiased, of either sign, high variance.

        k1 = d,   d = log π − log π_ref, bounded to ±20

    As a loss its expected gradient on policy is 0: it constrains nothing. Its place is the reward (r_t −
    β·k1_t).
    Source: Schulman 2020 (blog "Approximating KL divergence"), k1.

    Args:
      log_probs: [...] of tokens drawn from π; carries gradient.
      ref_log_probs: [...] of the same tokens under π_ref; normally data.
      clamp: None, or (tighter bound on |d|, bound on |k|); past a bound the gradient is 0.

    Returns:
      [...] float32.

    Raises:
      ValueError: if shapes differ or a bound is not positive.
    """
    return _estimate(lambda d: d, log_probs, ref_log_probs, clamp)


def k2(log_probs, ref_log_probs, *, clamp: Clamp = None) -> Array:
    """Estimates KL(π‖π_ref) by half the squared log-ratio: biased a little, low variance.

        k2 = d²/2,   d = log π − log π_ref, bounded to ±20

    As a loss its expected gradient on policy is ∇KL(π‖π_ref).
    Source: Schulman 2020 (blog "Approximating KL divergence"), k2.

    Args:
      log_probs: [...] of tokens drawn from π; carries gradient.
      ref_log_probs: [...] of the same tokens under π_ref; normally data.
      clamp: None, or (tighter bound on |d|, bound on |k|); past a bound the gradient is 0.

    Returns:
      [...] float32, never negative.

    Raises:
      ValueError: if shapes differ or a bound is not positive.
    """
    return _estimate(lambda d: 0.5 * jnp.square(d), log_probs, ref_log_probs, clamp)


def k3(log_probs, ref_log_probs, *, clamp: Clamp = None) -> Array:
    """Estimates KL(π‖π_ref) by the log-ratio and a control variate: unbiased, low variance near d = 0.

        k3 = e^{−d} + d − 1,   d = log π − log π_ref, bounded to ±20

    As a loss its expected gradient on policy is that of the *other* KL, ∇KL(π_ref‖π).
    Source: Schulman 2020 (blog "Approximating KL divergence"), k3; Shao et al. 2024 (GRPO), eq. 4.

    Args:
      log_probs: [...] of tokens drawn from π; carries gradient.
      ref_log_probs: [...] of the same tokens under π_ref; normally data.
      clamp: None, or (tighter bound on |d|, bound on |k|), (20, 10) is common; past a bound the gradient is 0.

    Returns:
      [...] float32, not negative up to rounding, at most e^{20}.

    Raises:
      ValueError: if shapes differ or a bound is not positive.
    """
    return _estimate(lambda d: jnp.expm1(-d) + d, log_probs, ref_log_probs, clamp)


def exact(logits, ref_logits) -> Array:
    """Computes KL(π‖π_ref) of two categorical distributions, summed over the whole vocabulary.

        KL = Σ_v π(v)·(log π(v) − log π_ref(v))

    As a loss its gradient is ∇KL(π‖π_ref) at the visited states. Give logits of the distributions that are
    compared, already divided by the temperature. A token of π-probability 0 (logit −inf) adds 0.

    Args:
      logits: [..., V]; carries gradient.
      ref_logits: [..., V]; normally data.

    Returns:
      [...] float32, not negative up to rounding; inf if π_ref rules out a token that π does not.

    Raises:
      ValueError: if shapes differ or V is 0.
    """
    checks.has_axis("logits", logits, "vocabulary entry")
    checks.same_shape(logits=logits, ref_logits=ref_logits)
    log_p = jax.nn.log_softmax(checks.as_float(logits), axis=-1)
    log_q = jax.nn.log_softmax(checks.as_float(ref_logits), axis=-1)
    # −inf − (−inf) must not arise, nor reach the gradient. A NaN is not −inf and stays visible.
    possible = log_p != -jnp.inf
    log_p = jnp.where(possible, log_p, 0.0)
    log_q = jnp.where(possible, log_q, 0.0)
    return jnp.sum(jnp.where(possible, jnp.exp(log_p), 0.0) * (log_p - log_q), axis=-1)


def double_or_halve(coef, kl, *, low: float, high: float) -> Array:
    """Doubles the penalty's coefficient when the policy moved too far, halves it when it moved too little.

        coef' = 2·coef if KL > high, coef/2 if KL < low, else coef

    Source: Schulman et al. 2017 (PPO), section 4, where low = target/1.5 and high = 1.5·target.

    Args:
      coef: [] coefficient β > 0.
      kl: [] measured KL, nats, of the same unit (per token or per response) as the bounds.
      low: below it β is halved.
      high: above it β is doubled.

    Returns:
      [] float32, the coefficient of the next update. Not meant to be differentiated.

    Raises:
      ValueError: if `low` is negative, `high` is below `low`, or `coef` is a plain number and not positive: 0 would
        stay 0.
    """
    checks.positive("coef", coef)
    checks.non_negative("low", low)
    checks.at_least("high", high, low)
    coef, kl = checks.as_float(coef), checks.as_float(kl)
    return jnp.where(kl > high, coef * 2.0, jnp.where(kl < low, coef / 2.0, coef))


def proportional(coef, kl, *, target: float, horizon: float, batch: float) -> Array:
    """Moves the coefficient in log-space towards a target KL, with the error clipped to ±20 %.

        coef' = coef·(1 + clip(KL/target − 1, −0.2, 0.2)·batch/horizon)

    Source: Ziegler et al. 2019, section 2.2 (there batch/horizon is K_β = 0.1).

    Args:
      coef: [] coefficient β > 0.
      kl: [] measured KL, nats, of the same unit as `target`.
      target: KL aimed at.
      horizon: samples over which the controller works.
      batch: samples that this update used.

    Returns:
      [] float32, the coefficient of the next update. Not meant to be differentiated.

    Raises:
      ValueError: if `target` or `horizon` is not positive, `batch` is negative, or `coef` is a plain number and not
        positive: 0 would stay 0.
    """
    checks.positive("coef", coef)
    checks.positive("target", target)
    checks.positive("horizon", horizon)
    checks.non_negative("batch", batch)
    error = jnp.clip(checks.as_float(kl) / target - 1.0, -0.2, 0.2)
    return checks.as_float(coef) * (1.0 + error * batch / horizon)


def _estimate(estimator, log_probs, ref_log_probs, clamp: Clamp) -> Array:
    """Applies an estimator to the bounded log-ratio, between the two optional, tighter bounds."""
    checks.same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    d = log_ratio(log_probs, ref_log_probs)
    if clamp is None:
        return estimator(d)
    if not isinstance(clamp, tuple | list) or len(clamp) != 2:
        raise ValueError(f"clamp={clamp!r}: must be None or a pair of bounds (on |d|, on |k|), e.g. (20.0, 10.0)")
    d_bound, k_bound = clamp
    checks.positive("clamp[0]", d_bound)
    checks.positive("clamp[1]", k_bound)
    return jnp.clip(estimator(jnp.clip(d, -d_bound, d_bound)), -k_bound, k_bound)
