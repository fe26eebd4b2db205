"""Policy losses: per token, unreduced, to be minimised after an aggregator of `aggregate`.

Each returns (loss [..., T], aux), where aux holds per-token arrays for metrics and carries no gradient.
Gradient flows through `log_probs`; `old_log_probs` and `advantages` are data (nothing here stops a gradient
through them, except where an equation says so).

- On policy (ratio 1) the surrogate's *value* is −mean(A), which is 0 for centered advantages, though its
  gradient is the policy gradient. A loss of 0 is no sign of a fault: watch the reward.
- The factor γ^t in front of the policy gradient at time t is dropped, as everybody does.
- For a step or the whole response as the action, give `segments.total(log_probs, segments, mask)` and the old
  ones alike, and aggregate over `segments.first(segments, mask)`, which counts every action once.
- d = log π − log π_old is bounded to ±20 wherever a ratio is made of it (`ratios.LOG_RATIO_BOUND`): one broken token
  cannot make the loss infinite, and has no gradient through its ratio.
- Functions without a mask are pointwise: set log-probs to 0 off the actions beforehand (`masked.fill`), so
  that no NaN there reaches the parameters. The aggregator leaves masked values out.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks, masked, ratios
from jaxpg.estimators import segments as segments_lib
from jaxpg.types import Array

Loss = tuple[Array, dict[str, Array]]


def reinforce(log_probs, advantages) -> Loss:
    """Computes the score-function loss.

        loss_t = −A_t·log π(a_t)

    Its gradient is the policy gradient's sample; its value means nothing.
    Source: Williams 1992, theorem 1 (A the return minus a baseline).

    Args:
      log_probs: [..., T] of the sampled tokens; carries gradient.
      advantages: [..., T] or [..., 1]; data.

    Returns:
      (loss [..., T] float32, aux: empty).

    Raises:
      ValueError: if `advantages` has another shape.
    """
    log_probs = checks.as_float(log_probs)
    return -_advantages(advantages, log_probs) * log_probs, {}


def surrogate(log_probs, old_log_probs, advantages) -> Loss:
    """Computes the importance-weighted surrogate.

        loss_t = −ratio_t·A_t,   ratio_t = π(a_t)/π_old(a_t)

    At ratio 1 its gradient is that of `reinforce`. Source: Schulman et al. 2015 (TRPO), eq. 14; PPO, eq. 6.

    Args:
      log_probs: [..., T]; carries gradient.
      old_log_probs: [..., T]; data.
      advantages: [..., T] or [..., 1]; data.

    Returns:
      (loss [..., T] float32, aux: ratio).

    Raises:
      ValueError: if shapes do not match.
    """
    ratio = ratios.token(log_probs, old_log_probs)
    return -ratio * _advantages(advantages, ratio), {"ratio": jax.lax.stop_gradient(ratio)}


def ppo_clip(
    log_probs, old_log_probs, advantages, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip=None
) -> Loss:
    """Computes the clipped surrogate: the pessimistic one of ratio and clipped ratio.

        loss_t = −min(ratio_t·A_t, clip(ratio_t, 1−clip_low, 1+clip_high)·A_t)
        loss_t = min(loss_t, −dual_clip·A_t) where A_t < 0, if dual_clip

    The gradient is exactly 0 past a clip bound on the side where moving on would raise the objective, and that of
    `surrogate` everywhere else. Source: Schulman et al. 2017 (PPO), eq. 7; clip_high > clip_low: Yu et al.
    2025 (DAPO), eq. 10; dual clip: Ye et al. 2020, "dual-clip PPO".

    Args:
      log_probs: [..., T]; carries gradient.
      old_log_probs: [..., T]; data.
      advantages: [..., T] or [..., 1]; data.
      clip_low: distance of the lower clip bound from ratio 1, at most 1.
      clip_high: distance of the upper clip bound from ratio 1.
      dual_clip: None, or the largest |loss/A| > 1 of tokens with A < 0.

    Returns:
      (loss [..., T] float32, aux: ratio, and bool clipped_low, clipped_high, clipped_dual: where that
      clip bound took the gradient away).

    Raises:
      ValueError: if shapes do not match, a clip is negative, clip_low > 1, or dual_clip <= 1.
    """
    d = ratios.log_ratio(log_probs, old_log_probs)
    return _clipped(d, _advantages(advantages, d), clip_low, clip_high, dual_clip)


def gspo(
    log_probs,
    old_log_probs,
    advantages,
    mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    segments=None,
) -> Loss:
    """Computes the clipped surrogate of the length-normalised ratio of the response.

        s = exp(1/|o| Σ_t d_t),   d = log π − log π_old
        loss_t = −min(s·A, clip(s, 1−clip_low, 1+clip_high)·A) for every token t of the response

    With one token a response it is `ppo_clip`. Aggregate by `sequence_mean_token_mean` for the paper's
    objective.
    Source: Zheng et al. 2025 (GSPO), eqs. 5 and 7; clip bounds as in its section 5.1.

    Args:
      log_probs: [..., T]; carries gradient at True positions.
      old_log_probs: [..., T]; data.
      advantages: [..., 1], or [..., T] constant in a segment; data.
      mask: [..., T] bool, action tokens.
      clip_low: distance of the lower clip bound from ratio 1.
      clip_high: distance of the upper clip bound from ratio 1.
      segments: [..., T] int, to have a ratio for each step instead of one for the response.

    Returns:
      (loss [..., T] float32, aux: ratio, clipped_low, clipped_high, clipped_dual as of `ppo_clip`).

    Raises:
      ValueError: if shapes do not match, `mask` is not boolean, a clip is negative, or clip_low > 1.
    """
    d = ratios.log_ratio(log_probs, old_log_probs)
    d = _response_mean(d, mask) if segments is None else segments_lib.mean(d, segments, mask)
    return _clipped(d, _advantages(advantages, d), clip_low, clip_high, None)


def gmpo(log_probs, old_log_probs, advantages, mask, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Loss:
    """Computes the surrogate of the geometric mean of the response's clipped token ratios.

        c_t = min(d_t, clip_high) where A > 0, max(d_t, −clip_low) where A < 0,   d = log π − log π_old
        loss_t = −exp(1/|o| Σ_t c_t)·A for every token t of the response

    Clipping is per token and in log space, before the mean; with one token a response it is `ppo_clip`
    between the clip bounds e^{−clip_low} and e^{clip_high}. Source: Zhao et al. 2025 (GMPO), its clipped objective,
    clip bounds (e^{−0.4}, e^{0.4}).

    Args:
      log_probs: [..., T]; carries gradient at True positions.
      old_log_probs: [..., T]; data.
      advantages: [..., 1], or [..., T] of one sign in a response; data.
      mask: [..., T] bool, action tokens.
      clip_low: lower clip bound, in nats.
      clip_high: upper clip bound, in nats.

    Returns:
      (loss [..., T] float32, aux: ratio of the response, and bool clipped_low, clipped_high of the token).

    Raises:
      ValueError: if shapes do not match, `mask` is not boolean, or a clip is negative.
    """
    checks.non_negative("clip_low", clip_low)
    checks.non_negative("clip_high", clip_high)
    d = masked.fill(ratios.log_ratio(log_probs, old_log_probs), mask)
    advantages = _advantages(advantages, d)
    high = (advantages > 0) & (d > clip_high)
    low = (advantages < 0) & (d < -clip_low)
    clipped = jnp.where(high, clip_high, jnp.where(low, -clip_low, d))
    ratio = jnp.exp(_response_mean(clipped, mask))
    aux = {"ratio": jax.lax.stop_gradient(ratio), "clipped_low": low, "clipped_high": high}
    return -ratio * advantages, aux


def cispo(log_probs, old_log_probs, advantages, *, clip_low: float = 1.0, clip_high: float) -> Loss:
    """Computes the score-function loss with a clipped importance weight: no token loses its gradient.

        loss_t = −stop_gradient(clip(ratio_t, 1−clip_low, 1+clip_high))·A_t·log π(a_t)

    Source: MiniMax 2025 (MiniMax-M1), eqs. 4 and 5; the lower clip bound is off there, which is clip_low=1 here.

    Args:
      log_probs: [..., T]; carries gradient, the weight does not.
      old_log_probs: [..., T]; data.
      advantages: [..., T] or [..., 1]; data.
      clip_low: distance of the weight's lower clip bound from 1, at most 1.
      clip_high: distance of the weight's upper clip bound from 1.

    Returns:
      (loss [..., T] float32, aux: ratio, and bool capped_low, capped_high: where a clip bound changed the
      weight).

    Raises:
      ValueError: if shapes do not match, a clip is negative, or clip_low > 1.
    """
    _check_clips(clip_low, clip_high)
    ratio = jax.lax.stop_gradient(ratios.token(log_probs, old_log_probs))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -jnp.clip(ratio, low, high) * _advantages(advantages, ratio) * checks.as_float(log_probs)
    return loss, {"ratio": ratio, "capped_low": ratio < low, "capped_high": ratio > high}


def sapo(
    log_probs,
    old_log_probs,
    advantages,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Loss:
    """Computes the softly gated surrogate: a sigmoid in place of the clip.

        loss_t = −(4/τ)·σ(τ·(ratio_t − 1))·A_t,   τ = temperature_positive where A_t > 0, else
        temperature_negative

    At ratio 1 the gradient is that of `surrogate` (the value is not: it is −2A/τ); it fades on both sides of
    it.
    Source: Gao et al. 2025 (SAPO), its objective with the gate f.

    Args:
      log_probs: [..., T]; carries gradient.
      old_log_probs: [..., T]; data.
      advantages: [..., T] or [..., 1]; data.
      temperature_positive: τ of tokens with A > 0; larger fades faster.
      temperature_negative: τ of the others.

    Returns:
      (loss [..., T] float32, aux: ratio, and gate = 4·σ(1−σ), the factor on the surrogate's gradient).

    Raises:
      ValueError: if shapes do not match or a temperature is not positive.
    """
    checks.positive("temperature_positive", temperature_positive)
    checks.positive("temperature_negative", temperature_negative)
    d = ratios.log_ratio(log_probs, old_log_probs)
    ratio = jnp.exp(d)
    advantages = _advantages(advantages, d)
    tau = jnp.where(advantages > 0, temperature_positive, temperature_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0))
    aux = {"ratio": ratio, "gate": 4.0 * gate * (1.0 - gate)}
    return -(4.0 / tau) * gate * advantages, jax.lax.stop_gradient(aux)


def entropy_bonus(entropy, *, coef: float) -> Loss:
    """Rewards entropy, to be added to a policy loss.

        loss_t = −coef·H(π(·|s_t))

    Source: Williams & Peng 1991; Mnih et al. 2016 (A3C), section 4.

    Args:
      entropy: [..., T] nats, of the tempered distribution (see `logprobs.entropy`); carries gradient.
      coef: weight; negative punishes entropy.

    Returns:
      (loss [..., T] float32, aux: entropy).
    """
    entropy = checks.as_float(entropy)
    return -coef * entropy, {"entropy": jax.lax.stop_gradient(entropy)}


def _clipped(d: Array, advantages: Array, clip_low: float, clip_high: float, dual_clip) -> Loss:
    """Evaluates the clipped surrogate of a bounded log-ratio.

    Written by cases, which equals min and clip, so that the gradient past a clip bound is exactly 0.
    """
    _check_clips(clip_low, clip_high)
    if dual_clip is not None and checks.is_number(dual_clip) and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip}: must be greater than 1, or None for no dual clip")
    ratio = jax.lax.stop_gradient(jnp.exp(d))
    high = (advantages > 0) & (ratio > 1.0 + clip_high)
    low = (advantages < 0) & (ratio < 1.0 - clip_low)
    dual = jnp.zeros_like(low) if dual_clip is None else (advantages < 0) & (ratio > dual_clip)
    bound = 1.0 if dual_clip is None else dual_clip
    bound = jnp.where(high, 1.0 + clip_high, jnp.where(low, 1.0 - clip_low, bound))
    loss = -jnp.where(high | low | dual, bound, jnp.exp(d)) * advantages
    return loss, {"ratio": ratio, "clipped_low": low, "clipped_high": high, "clipped_dual": dual}


def _response_mean(d: Array, mask: Array) -> Array:
    """The mean of each response at its tokens: `segments.mean` of one segment a row, without its scatter."""
    return masked.fill(jnp.broadcast_to(masked.mean(d, mask, axis=-1, keepdims=True), d.shape), mask)


def _check_clips(clip_low: float, clip_high: float) -> None:
    checks.non_negative("clip_low", clip_low)
    checks.non_negative("clip_high", clip_high)
    if checks.is_number(clip_low) and clip_low > 1:
        raise ValueError(f"clip_low={clip_low}: must be at most 1, which is no lower clip bound: ratios are >= 0")


def _advantages(advantages, per_token: Array) -> Array:
    """Checks advantages for [..., T] or [..., 1] and spreads them over the tokens."""
    checks.per_token("advantages", advantages, per_token.shape)
    return jnp.broadcast_to(checks.as_float(advantages), per_token.shape)
