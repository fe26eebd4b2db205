"""Advantages from outcome rewards: the samples of one prompt are the last axis, [..., G].

`valid` marks samples that have a reward. The others are left out of their group's statistics and get
advantage 0; a NaN reward of a valid sample is a scorer's error and stays NaN. A group whose valid rewards are
all equal gives exactly 0, and so does a group with one valid sample, except in `greedy_baseline` and
`batch_normalized`, which do not compare within groups. Results are float32, and carry gradient to the
rewards, which normally are data.
"""

import jax.numpy as jnp

from jaxpg.estimators import checks, masked
from jaxpg.types import Array


def group_centered(rewards, valid=None) -> Array:
    """Subtracts the group's mean.

        A_i = r_i − mean(r)

    The mean contains r_i itself, so the expected gradient is (G−1)/G of the true one.
    Source: Liu et al. 2025 (Dr. GRPO), its unbiased advantage.

    Args:
      rewards: [..., G].
      valid: [..., G] bool, all by default.

    Returns:
      [..., G] float32; valid entries of a group add up to 0.

    Raises:
      ValueError: if G is 0, or `valid` is not boolean or not of the shape of `rewards`.
    """
    rewards, valid = _group(rewards, valid)
    return masked.center(rewards, valid, axis=-1)


def group_normalized(rewards, valid=None, *, ddof: int = 0, epsilon: float = 1e-6) -> Array:
    """Computes the group's z-score.

        A_i = (r_i − mean(r)) / (std(r) + epsilon)

    Dividing by the std up-weights prompts that are nearly always or nearly never solved (difficulty bias).
    Source: Shao et al. 2024 (GRPO), section 4.1.2.

    Args:
      rewards: [..., G].
      valid: [..., G] bool, all by default.
      ddof: 0 for the population's std, 1 for the sample's.
      epsilon: added to the std.

    Returns:
      [..., G] float32; valid entries of a group add up to 0.

    Raises:
      ValueError: if G is 0, `valid` is not boolean or of another shape, or `ddof` or `epsilon` is negative.
    """
    checks.non_negative("epsilon", epsilon)
    rewards, valid = _group(rewards, valid)
    std = masked.std(rewards, valid, axis=-1, keepdims=True, ddof=ddof)
    return _divide(masked.center(rewards, valid, axis=-1), std, epsilon)


def leave_one_out(rewards, valid=None) -> Array:
    """Subtracts the mean of the group's other samples.

        A_i = r_i − 1/(G−1) Σ_{j≠i} r_j = G/(G−1)·(r_i − mean(r))

    Unbiased, since the baseline does not contain r_i.
    Source: Kool et al. 2019; Ahmadian et al. 2024 (RLOO).

    Args:
      rewards: [..., G].
      valid: [..., G] bool, all by default; G above counts the valid ones.

    Returns:
      [..., G] float32; valid entries of a group add up to 0.

    Raises:
      ValueError: if G is 0, or `valid` is not boolean or not of the shape of `rewards`.
    """
    rewards, valid = _group(rewards, valid)
    size = masked.count(valid, axis=-1, keepdims=True)
    return masked.center(rewards, valid, axis=-1) * size / jnp.maximum(size - 1.0, 1.0)


def greedy_baseline(rewards, greedy_rewards, valid=None) -> Array:
    """Subtracts the reward of the prompt's greedy completion.

        A_i = r_i − r(greedy)

    Unbiased, since the greedy completion does not depend on the samples.
    Source: Li et al. 2024 (ReMax).

    Args:
      rewards: [..., G].
      greedy_rewards: [...], one a prompt.
      valid: [..., G] bool, all by default.

    Returns:
      [..., G] float32.

    Raises:
      ValueError: if G is 0, or shapes or dtypes do not match.
    """
    rewards, valid = _group(rewards, valid)
    checks.shape("greedy_rewards", greedy_rewards, rewards.shape[:-1], "one for each group of rewards")
    return masked.fill(rewards - checks.as_float(greedy_rewards)[..., None], valid)


def length_weighted_baseline(rewards, lengths, valid=None) -> Array:
    """Subtracts the length-weighted mean of the group's rewards (OPO).

        A_i = r_i − Σ_j L_j·r_j / Σ_j L_j

    The baseline of least variance if the squared norm of a response's score grows with its length.
    Source: Hao et al. 2025 (OPO), the simplified optimal baseline.

    Args:
      rewards: [..., G].
      lengths: [..., G], action tokens of each sample.
      valid: [..., G] bool, all by default.

    Returns:
      [..., G] float32; 0 for a group without tokens.

    Raises:
      ValueError: if G is 0, or shapes or dtypes do not match.
    """
    rewards, valid = _group(rewards, valid)
    checks.same_shape(rewards=rewards, lengths=lengths)
    lengths = masked.fill(lengths, valid)
    # Centered before weighting: a constant group is then exactly 0.
    centered = masked.center(rewards, valid, axis=-1)
    total = jnp.sum(lengths, axis=-1, keepdims=True)
    baseline = jnp.sum(lengths * centered, axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    return masked.fill(jnp.where(total > 0, centered - baseline, 0.0), valid)


def mean_normalized(rewards, valid=None) -> Array:
    """Divides the centered rewards by their mean (MaxRL).

        A_i = (r_i − mean(r)) / mean(r)

    For binary rewards it climbs a truncation of log P(right) instead of P(right): rarely solved prompts weigh
    more.
    Source: Tajwar et al. 2026 (MaxRL), its estimator for G samples.

    Args:
      rewards: [..., G], not negative.
      valid: [..., G] bool, all by default.

    Returns:
      [..., G] float32; 0 for a group whose mean is not positive.

    Raises:
      ValueError: if G is 0, or `valid` is not boolean or not of the shape of `rewards`.
    """
    rewards, valid = _group(rewards, valid)
    mean = masked.mean(rewards, valid, axis=-1, keepdims=True)
    # mean · 0 and not 0, so that a NaN stays one.
    return _divide(masked.center(rewards, valid, axis=-1), jnp.where(mean > 0, mean, mean * 0.0), 0.0)


def pass_at_k(rewards, valid=None, *, k: int, threshold: float = 0.5, epsilon: float = 0.0) -> Array:
    """Computes each sample's advantage under the reward "one of k samples is right".

        R = 1 − C(N₋,k)/C(N,k),  σ = √(R(1−R)),  N samples, N₋ of them wrong
        A₊ = (1 − R)/(σ + epsilon),  A₋ = (1 − R − C(N₋−1,k−1)/C(N−1,k−1))/(σ + epsilon)

    The average over all k-subsets of a group that hold the sample, in closed form. k = 1 is the z-score.
    Source: Chen et al. 2025 (Pass@k Training), its analytical derivation.

    Args:
      rewards: [..., G].
      valid: [..., G] bool, all by default; N counts the valid ones.
      k: samples that share an answer, 1 <= k <= G.
      threshold: a sample is right if its reward exceeds it. Carries no gradient.
      epsilon: added to σ.

    Returns:
      [..., G] float32; valid entries add up to 0; all 0 where fewer than k samples are valid or R is 0 or 1.

    Raises:
      ValueError: if G is 0, k is not in 1..G, `epsilon` is negative, or `valid` is not boolean or of another
        shape.
    """
    checks.non_negative("epsilon", epsilon)
    rewards, valid = _group(rewards, valid)
    if not 1 <= k <= rewards.shape[-1]:
        raise ValueError(f"k={k}: must lie between 1 and {rewards.shape[-1]}, the samples of a group")
    right = valid & (rewards > threshold)
    number = masked.count(valid, axis=-1, keepdims=True)
    wrong = number - masked.count(right, axis=-1, keepdims=True)
    none_right = _choose_ratio(wrong, number, k)
    none_of_others = _choose_ratio(wrong - 1.0, number - 1.0, k - 1)
    raw = jnp.where(right, none_right, none_right - none_of_others)
    # A NaN reward is an error of the scorer: compared with a threshold it would pass for a wrong answer.
    raw = raw + jnp.where(jnp.isnan(rewards), rewards, 0.0)
    std = jnp.where(number >= k, masked.safe_sqrt(none_right * (1.0 - none_right)), 0.0)
    return masked.fill(_divide(raw, std, epsilon), valid)


def batch_normalized(rewards, valid=None, *, ddof: int = 0, epsilon: float = 1e-8) -> Array:
    """Whitens rewards over the whole batch, groups or not (REINFORCE++).

        A = (r − mean_batch(r)) / √(var_batch(r) + epsilon)

    With a KL penalty in the reward, whiten per token instead: `masked.whiten` on the [B, T] return.
    Source: Hu et al. 2025 (REINFORCE++), section on global advantage normalisation.

    Args:
      rewards: [..., G]; statistics are those of the array given, so give the whole batch.
      valid: [..., G] bool, all by default.
      ddof: 0 for the population's variance, 1 for the sample's.
      epsilon: added to the variance.

    Returns:
      [..., G] float32; a constant batch gives exactly 0.

    Raises:
      ValueError: if G is 0, `valid` is not boolean or of another shape, or `ddof` or `epsilon` is negative.
    """
    rewards, valid = _group(rewards, valid)
    return masked.whiten(rewards, valid, ddof=ddof, epsilon=epsilon)


def group_centered_batch_normalized(rewards, valid=None, *, epsilon: float = 1e-8) -> Array:
    """Subtracts the group's mean, then whitens over the batch (REINFORCE++ with baseline).

        c_i = r_i − mean_group(r),   A = c / √(mean_batch(c²) + epsilon)

    The batch's mean of c is 0 already; not subtracting it again keeps constant groups at exactly 0.
    Source: Hu et al. 2025 (REINFORCE++), its baseline form.

    Args:
      rewards: [..., G]; statistics are those of the array given, so give the whole batch.
      valid: [..., G] bool, all by default.
      epsilon: added to the variance.

    Returns:
      [..., G] float32.

    Raises:
      ValueError: if G is 0, `valid` is not boolean or of another shape, or `epsilon` is negative.
    """
    checks.non_negative("epsilon", epsilon)
    rewards, valid = _group(rewards, valid)
    centered = masked.center(rewards, valid, axis=-1)
    return masked.safe_divide(centered, masked.safe_sqrt(masked.mean(jnp.square(centered), valid) + epsilon))


def group_centered_batch_scaled(rewards, valid=None, *, ddof: int = 0, epsilon: float = 1e-6) -> Array:
    """Subtracts the group's mean and divides by the std of all rewards of the batch.

        A_i = (r_i − mean_group(r)) / (std_batch(r) + epsilon)

    No difficulty bias: all groups share the scale. Source: Liu et al. 2025 (Tricks or Traps, "Lite PPO"),
    section on group-mean, batch-std normalisation.

    Args:
      rewards: [..., G]; the batch's std is that of the array given, so give the whole batch.
      valid: [..., G] bool, all by default.
      ddof: 0 for the population's std, 1 for the sample's.
      epsilon: added to the std.

    Returns:
      [..., G] float32.

    Raises:
      ValueError: if G is 0, `valid` is not boolean or of another shape, or `ddof` or `epsilon` is negative.
    """
    checks.non_negative("epsilon", epsilon)
    rewards, valid = _group(rewards, valid)
    return _divide(masked.center(rewards, valid, axis=-1), masked.std(rewards, valid, ddof=ddof), epsilon)


def decoupled(rewards, valid=None, *, weights=None, ddof: int = 0, epsilon: float = 1e-6) -> Array:
    """Normalises each of K rewards in its group before adding them up, then scales over the batch (GDPO).

        z_ik = (r_ik − mean_i(r_k)) / (std_i(r_k) + epsilon)
        s_i = Σ_k w_k·z_ik,   A = s / (std_batch(s) + epsilon)

    Adding first and normalising then, as GRPO does, makes different reward combinations with equal sums
    alike. The batch's mean of s is 0 already and is not subtracted, so that constant groups stay exactly 0.
    Source: Liu et al. 2026 (GDPO), its two normalisation steps.

    Args:
      rewards: [..., G, K].
      valid: [..., G, K] bool, where a scorer applied; all by default.
      weights: [K], all 1 by default.
      ddof: of the group's std.
      epsilon: added to both stds.

    Returns:
      [..., G] float32; 0 for a sample that no scorer applied to.

    Raises:
      ValueError: if G or K is 0, or shapes or dtypes do not match, or `ddof` or `epsilon` is negative.
    """
    checks.non_negative("epsilon", epsilon)
    rewards = checks.as_float(rewards)
    if rewards.ndim < 2 or 0 in rewards.shape[-2:]:
        raise ValueError(f"rewards has shape {rewards.shape}: must be [..., G, K] with G and K at least 1")
    valid = jnp.ones(rewards.shape, bool) if valid is None else checks.boolean("valid", valid, rewards.shape)
    weights = jnp.ones(rewards.shape[-1]) if weights is None else checks.as_float(weights)
    checks.shape("weights", weights, rewards.shape[-1:], "one for each reward")
    groups, groups_valid = jnp.swapaxes(rewards, -1, -2), jnp.swapaxes(valid, -1, -2)  # [..., K, G]
    z = group_normalized(groups, groups_valid, ddof=ddof, epsilon=epsilon)
    summed = jnp.sum(weights[:, None] * z, axis=-2)
    std = masked.safe_sqrt(masked.mean(jnp.square(summed), jnp.any(valid, axis=-1)))
    return _divide(summed, std, epsilon)


def overlong_penalty(lengths, *, limit: int, margin: int) -> Array:
    """Computes the soft punishment of long responses, to be added to the reward.

        penalty = 0 for n <= limit − margin,  (limit − margin − n)/margin up to n = limit,  −1 beyond

    Source: Yu et al. 2025 (DAPO), eq. 13.

    Args:
      lengths: [...] tokens of each response.
      limit: tokens from which the penalty is −1.
      margin: tokens before `limit` over which it builds up.

    Returns:
      [...] float32 in [−1, 0].

    Raises:
      ValueError: if `margin` is not positive or exceeds `limit`.
    """
    checks.positive("margin", margin)
    checks.at_least("limit", limit, margin)
    return jnp.clip((limit - margin - checks.as_float(lengths)) / margin, -1.0, 0.0)


def _divide(x: Array, scale: Array, epsilon: float) -> Array:
    """x / (scale + epsilon), and 0 where the scale is 0: there x is 0 too, up to rounding."""
    return masked.safe_divide(x, jnp.where(scale == 0, 0.0, scale + epsilon))


def _choose_ratio(part: Array, whole: Array, k: int) -> Array:
    """C(part, k) / C(whole, k) as a product of k factors; 0 where part < k."""
    index = jnp.arange(k, dtype=part.dtype)
    factors = jnp.maximum(part[..., None] - index, 0.0) / jnp.maximum(whole[..., None] - index, 1.0)
    return jnp.prod(factors, axis=-1)


def _group(rewards, valid) -> tuple[Array, Array]:
    checks.has_axis("rewards", rewards, "sample")
    rewards = checks.as_float(rewards)
    valid = jnp.ones(rewards.shape, bool) if valid is None else checks.boolean("valid", valid, rewards.shape)
    return rewards, valid
