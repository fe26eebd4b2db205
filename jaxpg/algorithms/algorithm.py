"""What an algorithm is, and how it becomes the loss function of an update.

Experience ──advantage, critic.targets──▶ Batch ──loss, critic.loss──▶ [B, T] ──aggregate──▶ Weighted
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.estimators import aggregate, checks, kl, losses
from jaxpg.types import Array, Batch, Experience, Weighted

PolicyLoss = Callable[[Array, Batch], tuple[Array, dict[str, Array]]]


@dataclasses.dataclass(frozen=True)
class Critic:
    """What a critic is to predict, and how its predictions are judged."""

    targets: Callable[[Experience], Array]  # -> [B, T], its predictions should come to this
    loss: Callable[[Array, Batch], Array]  # (values [B, T], batch) -> loss [B, T], without the weight
    coef: float = 0.5  # weight of the loss in an update that actor and critic share


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The choices that make a policy-gradient method. Those with a default are extras.

    The KL coefficient β has one home, `kl_coef`. It is the first β of a run, which starts from
    `train_state.init(..., kl_coef=algorithm.kl_coef)`; `TrainState.kl_coef` is the β of the moment. `Batch.kl_coef` and
    `Experience.kl_coef` are views of that. An algorithm that asks for no KL has 0, and reads no reference policy.

    Raises:
      ValueError: if `kl_coef` is negative.
    """

    advantage: Callable[[Experience], Array]  # -> [P, G], one a response, or [B, T], one a token
    loss: PolicyLoss  # (log_probs [B, T], batch) -> loss [B, T], aux
    aggregate: Callable[[Array, Array], Weighted]  # (loss [B, T], action_mask [B, T]) -> Weighted
    entropy_coef: float = 0.0  # weight of the entropy bonus
    critic: Critic | None = None
    kl_coef: float = 0.0  # the first β, of a KL penalty in the loss or in the reward

    def __post_init__(self):
        checks.non_negative("kl_coef", self.kl_coef)


class Outputs(NamedTuple):
    """What a model says about the tokens of a batch."""

    log_probs: Array  # [B, T] float32
    entropy: Array  # [B, T] float32
    values: Array | None = None  # [B, T] float32, of the critic, where there is one


Policy = Callable[[dict, Batch], tuple]  # (params, batch) -> Outputs, or a tuple of its first fields


def to_batch(algorithm: Algorithm, experience: Experience) -> Batch:
    """Computes advantages and targets and lays the experience out as rows.

    A sample that no scorer applied to (`valid` False) gets advantage 0, whatever the algorithm.
    """
    rollout = experience.rollout
    shape = rollout.tokens.shape
    advantages = algorithm.advantage(experience)
    if advantages.shape != shape:
        advantages = jnp.broadcast_to(advantages.reshape(-1, 1), shape)
    advantages = jnp.where(experience.valid.reshape(-1, 1), checks.as_float(advantages), 0.0)
    recomputed = experience.trainer_log_probs is not None
    return jax.lax.stop_gradient(
        Batch(
            tokens=rollout.tokens,
            token_mask=rollout.token_mask,
            action_mask=rollout.action_mask,
            log_probs=experience.trainer_log_probs if recomputed else rollout.log_probs,
            sampler_log_probs=rollout.log_probs if recomputed else None,
            advantages=advantages,
            segments=experience.segments,
            returns=None if algorithm.critic is None else _targets(algorithm.critic, experience),
            values=experience.values,
            ref_log_probs=experience.ref_log_probs,
            observations=rollout.observations,
        )
    )


def _targets(critic: Critic, experience: Experience) -> Array:
    """The critic's targets [B, T]; where no scorer applied, what it predicted, so that it learns nothing there."""
    values = checks.require(experience, "values")
    return jnp.where(experience.valid.reshape(-1, 1), critic.targets(experience), values)


def clear(batch: Batch) -> Batch:
    """Sets every per-token number off the actions to 0."""
    names = ("log_probs", "sampler_log_probs", "advantages", "returns", "values", "ref_log_probs")
    per_token = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    cleared = {name: jnp.where(batch.action_mask, x, jnp.zeros_like(x)) for name, x in per_token.items()}
    return dataclasses.replace(batch, **cleared)


def log_prob_gap(log_probs: Array, batch: Batch) -> Array:
    """|log π − log π_sampler| of each token [B, T]: in the first update of a rollout, sampler against trainer."""
    sampled = batch.log_probs if batch.sampler_log_probs is None else batch.sampler_log_probs
    return jnp.abs(log_probs - checks.as_float(sampled))


def make_loss_fn(algorithm: Algorithm, policy: Policy, *, critic: bool = True):
    """Builds the loss function of `update.make_update` from an algorithm and a policy.

        loss = aggregate(policy loss − entropy_coef·H + critic.coef·critic loss)

    The policy loss reads the KL coefficient β from `batch.kl_coef`. `update` sets it to the train state's; where the
    batch has none, it is the algorithm's.

    Metrics are means over the actions of the batch: the entropy, the loss's own metrics, and `value_loss`, the critic's
    loss without its weight. Where the batch carries the log-probs it was sampled with, also `kl_old`, an estimate (k3)
    of KL(π_old ‖ π), and `log_prob_gap` = mean |log π − log π_sampler|: in the first update after a rollout, the
    mismatch of sampler and trainer, whether the trainer recomputed π_old or not.

    Args:
      algorithm: its losses and aggregation.
      policy: maps parameters and a batch to the log-probs of its tokens and the entropy at each, [B, T] float32, and to
        the critic's values if the loss has a share of the critic.
      critic: False leaves the critic's loss out, for a critic with an update of its own.

    Raises:
      ValueError: if the loss has a share of the critic and the policy gives no values (when the loss is traced).
    """

    def loss_fn(params, batch: Batch) -> tuple[Weighted, dict[str, Weighted]]:
        outputs = Outputs(*policy(params, batch))
        # What is no action must not reach the loss: an infinity times a masked zero would be a NaN gradient.
        batch = clear(batch)
        if batch.kl_coef is None:
            batch = dataclasses.replace(batch, kl_coef=jnp.full(batch.tokens.shape[:1], algorithm.kl_coef))
        log_probs = jnp.where(batch.action_mask, outputs.log_probs, 0.0)
        loss, aux = algorithm.loss(log_probs, batch)
        aux = aux | {"entropy": outputs.entropy}
        if algorithm.entropy_coef:
            entropy = jnp.where(batch.action_mask, outputs.entropy, 0.0)
            loss += losses.entropy_bonus(entropy, coef=algorithm.entropy_coef)[0]
        if critic and algorithm.critic is not None:
            if outputs.values is None:
                raise ValueError(
                    "the algorithm has a critic, but the policy returned no values: return them as third output, or "
                    "pass critic=False where the critic has an update of its own"
                )
            values = jnp.where(batch.action_mask, outputs.values, 0.0)
            aux["value_loss"] = algorithm.critic.loss(values, batch)
            loss += algorithm.critic.coef * aux["value_loss"]
        if batch.log_probs is not None:
            aux["kl_old"] = kl.k3(batch.log_probs, log_probs)
            aux["log_prob_gap"] = log_prob_gap(log_probs, batch)
        mean = partial(aggregate.token_mean, mask=batch.action_mask)
        metrics = {name: mean(jax.lax.stop_gradient(checks.as_float(x))) for name, x in aux.items()}
        return algorithm.aggregate(loss, batch.action_mask), metrics

    return loss_fn
