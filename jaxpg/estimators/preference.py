"""Losses on pairs of a chosen and a rejected response: reward models (Bradley-Terry) and the DPO family.

Each returns (loss [...], aux), one entry a pair, unreduced; aux carries no gradient. Online DPO is `dpo` on
pairs that the current policy has drawn.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks, masked
from jaxpg.types import Array

Loss = tuple[Array, dict[str, Array]]


def bradley_terry(chosen_rewards, rejected_rewards, *, margin=0.0) -> Loss:
    """Computes the negative log-likelihood of the preference under a reward model.

        loss = −log σ(r_chosen − r_rejected − margin)

    Source: Ouyang et al. 2022 (InstructGPT), eq. 1; margin: Touvron et al. 2023 (Llama 2), eq. 2.

    Args:
      chosen_rewards: [...]; carries gradient.
      rejected_rewards: [...]; carries gradient.
      margin: a number or [...], how much better the chosen one was judged; data.

    Returns:
      (loss [...] float32, aux: margin = r_chosen − r_rejected, correct = bool, whether it is positive).

    Raises:
      ValueError: if shapes differ.
    """
    checks.same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    difference = checks.as_float(chosen_rewards) - checks.as_float(rejected_rewards)
    if jnp.ndim(margin):
        checks.same_shape(chosen_rewards=chosen_rewards, margin=margin)
    observed = jax.lax.stop_gradient(difference)
    return -jax.nn.log_sigmoid(difference - margin), {"margin": observed, "correct": observed > 0}


def dpo(
    chosen_log_probs,
    rejected_log_probs,
    ref_chosen_log_probs,
    ref_rejected_log_probs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Loss:
    """Computes direct preference optimisation's loss.

        h = (log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l))
        loss = −(1 − ε)·log σ(β·h) − ε·log σ(−β·h)

    Source: Rafailov et al. 2023 (DPO), eq. 7; label smoothing ε (conservative DPO): its author's note,
    Mitchell 2023.

    Args:
      chosen_log_probs: [...] summed over the response (`sequence_log_probs`); carries gradient.
      rejected_log_probs: [...]; carries gradient.
      ref_chosen_log_probs: [...] under the reference; data.
      ref_rejected_log_probs: [...] under the reference; data.
      beta: strength of the KL anchor.
      label_smoothing: ε, the probability that a label is wrong, in [0, 0.5).

    Returns:
      (loss [...] float32, aux: chosen_reward and rejected_reward = β·log-ratio, margin their difference,
      correct).

    Raises:
      ValueError: if shapes differ, `beta` is not positive or `label_smoothing` leaves [0, 0.5).
    """
    checks.positive("beta", beta)
    if checks.is_number(label_smoothing) and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}: must lie in [0, 0.5), or labels count as wrong")
    chosen, rejected = _log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    logit = beta * (chosen - rejected)
    loss = -jax.nn.log_sigmoid(logit)
    if not _is_zero(label_smoothing):
        loss = (1.0 - label_smoothing) * loss - label_smoothing * jax.nn.log_sigmoid(-logit)
    return loss, _implicit_rewards(chosen, rejected, beta)


def ipo(
    chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, *, beta: float = 0.1
) -> Loss:
    """Computes identity preference optimisation's loss: the log-ratio gap is drawn to 1/(2β).

        loss = (h − 1/(2β))²,   h as in `dpo`

    Source: Azar et al. 2023 (IPO), eq. 17, where β is called τ.

    Args:
      chosen_log_probs: [...] summed over the response (`sequence_log_probs`); carries gradient.
      rejected_log_probs: [...]; carries gradient.
      ref_chosen_log_probs: [...] under the reference; data.
      ref_rejected_log_probs: [...] under the reference; data.
      beta: strength of the KL anchor.

    Returns:
      (loss [...] float32, aux as of `dpo`).

    Raises:
      ValueError: if shapes differ or `beta` is not positive.
    """
    checks.positive("beta", beta)
    chosen, rejected = _log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    return jnp.square(chosen - rejected - 0.5 / beta), _implicit_rewards(chosen, rejected, beta)


def sequence_log_probs(log_probs, mask) -> Array:
    """Adds up the log-probs of each response.

        log π(y) = Σ_t log π(y_t)

    Args:
      log_probs: [..., T] of its tokens; carries gradient at True positions.
      mask: [..., T] bool, the response's tokens.

    Returns:
      [...] float32.

    Raises:
      ValueError: if `mask` is not boolean or not of the shape of `log_probs`.
    """
    checks.has_axis("log_probs", log_probs, "token")
    return masked.sum(log_probs, mask, axis=-1)


def _log_ratios(chosen, rejected, ref_chosen, ref_rejected) -> tuple[Array, Array]:
    checks.same_shape(
        chosen_log_probs=chosen,
        rejected_log_probs=rejected,
        ref_chosen_log_probs=ref_chosen,
        ref_rejected_log_probs=ref_rejected,
    )
    chosen, rejected, ref_chosen, ref_rejected = map(checks.as_float, (chosen, rejected, ref_chosen, ref_rejected))
    return chosen - ref_chosen, rejected - ref_rejected


def _implicit_rewards(chosen: Array, rejected: Array, beta: float) -> dict[str, Array]:
    chosen, rejected = jax.lax.stop_gradient((beta * chosen, beta * rejected))
    aux = {"chosen_reward": chosen, "rejected_reward": rejected}
    return aux | {"margin": chosen - rejected, "correct": chosen > rejected}


def _is_zero(value) -> bool:
    # 0 · inf would be NaN where the policy is sure.
    return checks.is_number(value) and value == 0
