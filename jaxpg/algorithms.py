"""The ladder by name: an algorithm is an advantage, a per-token loss and an aggregation, and nothing else.

To read an algorithm, read its function; to compare two, compare their arguments; to write a new one, call
`Algorithm(advantage=..., loss=..., aggregate=...)` with functions of your own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxpg import advantages, aggregate, kl, losses, masked
from jaxpg.types import Array, Batch, Experience, Weighted


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The three choices that make a policy-gradient method."""

    advantage: Callable[[Experience], Array]  # -> [P, G], one a response, or [B, T], one a token
    loss: Callable[[Array, Batch], tuple[Array, dict[str, Array]]]  # (log_probs [B, T], batch) -> loss [B, T], aux
    aggregate: Callable[[Array, Array], Weighted]  # (loss [B, T], action_mask [B, T]) -> Weighted


def _group(advantage: Callable[..., Array], **options) -> Callable[[Experience], Array]:
    """Lifts a function of grouped rewards to one of an experience."""
    return lambda experience: advantage(experience.rewards, experience.valid, **options)


def _reinforce_loss(log_probs: Array, batch: Batch):
    return losses.reinforce(log_probs, batch.advantages)


def _clip_loss(log_probs: Array, batch: Batch, *, clip_low: float, clip_high: float, kl_coef: float = 0.0):
    loss, aux = losses.ppo_clip(log_probs, batch.log_probs, batch.advantages, clip_low=clip_low, clip_high=clip_high)
    if kl_coef == 0.0:
        return loss, aux
    penalty = kl.k3(log_probs, batch.ref_log_probs)
    return loss + kl_coef * penalty, aux | {"kl_ref": penalty}


def reinforce() -> Algorithm:
    """REINFORCE without a baseline: A = r (Williams 1992)."""
    return Algorithm(
        advantage=lambda experience: jnp.where(experience.valid, experience.rewards, 0.0),
        loss=_reinforce_loss,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def rloo() -> Algorithm:
    """RLOO: the baseline is the mean reward of the other samples (Kool 2019; Ahmadian 2024, eq. 8)."""
    return Algorithm(
        advantage=_group(advantages.leave_one_out),
        loss=_reinforce_loss,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """PPO's clipped objective on response rewards whitened over the batch (Schulman 2017, eq. 7), without a critic."""
    return Algorithm(
        advantage=lambda experience: masked.whiten(experience.rewards, experience.valid),
        loss=partial(_clip_loss, clip_low=clip_low, clip_high=clip_high),
        aggregate=aggregate.token_mean,
    )


def grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0) -> Algorithm:
    """GRPO: z-score in the group, mean over tokens then over samples (Shao 2024, eq. 3)."""
    return Algorithm(
        advantage=_group(advantages.group_normalized),
        loss=partial(_clip_loss, clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef),
        aggregate=aggregate.sequence_mean_token_mean,
    )


def dr_grpo(*, max_new_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """Dr. GRPO: GRPO less its two normalisers (Liu 2025, eq. 3); the budget, a constant, replaces the length."""
    return Algorithm(
        advantage=_group(advantages.group_centered),
        loss=partial(_clip_loss, clip_low=clip_low, clip_high=clip_high),
        aggregate=partial(aggregate.constant_length, length=max_new_tokens),
    )


def supervised() -> Algorithm:
    """Maximum likelihood: REINFORCE with advantage 1 on completions that somebody else wrote."""
    return Algorithm(
        advantage=lambda experience: jnp.ones_like(experience.rewards),
        loss=lambda log_probs, batch: losses.reinforce(log_probs, jnp.ones_like(log_probs)),
        aggregate=aggregate.token_mean,
    )


def to_batch(algorithm: Algorithm, experience: Experience) -> Batch:
    """Computes the advantages and lays the experience out as rows."""
    rollout = experience.rollout
    advantage = algorithm.advantage(experience)
    if advantage.shape != rollout.tokens.shape:
        advantage = jnp.broadcast_to(advantage.reshape(-1, 1), rollout.tokens.shape)
    return Batch(
        tokens=rollout.tokens,
        token_mask=rollout.token_mask,
        action_mask=rollout.action_mask,
        log_probs=rollout.log_probs,
        advantages=jax.lax.stop_gradient(advantage).astype(jnp.float32),
        values=experience.values,
        ref_log_probs=experience.ref_log_probs,
    )


Policy = Callable[[dict, Batch], tuple[Array, Array]]  # (params, batch) -> log_probs [B, T], entropy [B, T]


def make_loss_fn(algorithm: Algorithm, policy: Policy):
    """Builds the loss function of `update.make_update` from an algorithm and a policy.

    Metrics are means over the actions of the batch: the entropy, and what the loss tells about itself. Where the
    batch carries the log-probs it was sampled with, also `kl_old`, an estimate (k3) of KL(π_old ‖ π), and
    `log_prob_gap` = mean |log π − log π_old|: in the first update after a rollout, the mismatch of sampler and trainer.

    Args:
      algorithm: its loss and aggregation.
      policy: maps parameters and a batch to the log-probs of its tokens and the entropy at each, [B, T] float32.
    """

    def loss_fn(params, batch: Batch) -> tuple[Weighted, dict[str, Weighted]]:
        log_probs, entropy = policy(params, batch)
        # What is no action must not reach the loss: an infinity times a masked zero would be a NaN gradient.
        log_probs = jnp.where(batch.action_mask, log_probs, 0.0)
        loss, aux = algorithm.loss(log_probs, batch)
        aux = aux | {"entropy": entropy}
        if batch.log_probs is not None:
            aux["kl_old"] = kl.k3(batch.log_probs, log_probs)
            aux["log_prob_gap"] = jnp.abs(log_probs - batch.log_probs)
        mean = partial(aggregate.token_mean, mask=batch.action_mask)
        metrics = {name: mean(jax.lax.stop_gradient(x.astype(jnp.float32))) for name, x in aux.items()}
        return algorithm.aggregate(loss, batch.action_mask), metrics

    return loss_fn
