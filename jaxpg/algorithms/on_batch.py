"""What the losses of `algorithms` do with a batch: whose log-probs they compare, and what counts as one action."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from jaxpg.algorithms.algorithm import Algorithm, PolicyLoss
from jaxpg.estimators import kl, losses, ratios, segments
from jaxpg.estimators.checks import require
from jaxpg.types import Array, Batch


def score(log_probs: Array, batch: Batch):
    """See `losses.reinforce`. The log-prob of a segment is the sum of its tokens', so this is one of segments too."""
    return losses.reinforce(log_probs, require(batch, "advantages"))


def old_and_advantages(batch: Batch) -> tuple[Array, Array]:
    """What every loss of ratios takes after the policy's log-probs."""
    return require(batch, "log_probs"), require(batch, "advantages")


def clip(
    log_probs: Array,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl_estimator: Callable[[Array, Array], Array] | None = None,
):
    """See `losses.ppo_clip`, over segments if there are any; with an estimator, plus β·KL(π ‖ π_ref)."""
    surrogate = partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss, aux = by_segment(surrogate, log_probs, batch, batch.segments)
    if kl_estimator is None:
        return loss, aux
    penalty = kl_estimator(log_probs, require(batch, "ref_log_probs"))
    return loss + require(batch, "kl_coef")[:, None] * penalty, aux | {"kl_ref": penalty}


def kl_penalty(log_probs: Array, batch: Batch):
    """Surrogate + β·KL(π_old ‖ π), the KL by k3 from the samples of π_old: in value and gradient unbiased there."""
    old, advantages = old_and_advantages(batch)
    loss, aux = losses.surrogate(log_probs, old, advantages)
    return loss + require(batch, "kl_coef")[:, None] * kl.k3(old, log_probs), aux


def by_segment(loss_fn: Callable, log_probs: Array, batch: Batch, ids: Array | None):
    """Applies a loss of ratios to segments as actions: the ratio of a segment is that of its tokens' product.

        loss_t = loss_fn(Σ_{u in the segment of t} d_u, A_t) / |segment|,   d = log π − log π_old, bounded to ±20

    A loss of `losses` bounds the sum to ±20 as well.

    Sums over tokens count each segment once. Means over tokens still divide by the number of tokens: `token_mean` is
    (segments / tokens) times the mean over segments, and `sequence_mean_token_mean` so for each response, so that
    longer segments mean a smaller loss and gradient, like a smaller learning rate.

    Args:
      loss_fn: (log_probs, old_log_probs, advantages) -> (loss, aux), of the difference of its first two alone.
      log_probs: [B, T]; carries gradient.
      batch: advantages must be constant in a segment.
      ids: [B, T] int, the segments; None for tokens as actions.
    """
    old, advantages = old_and_advantages(batch)
    if ids is None:
        return loss_fn(log_probs, old, advantages)
    total = partial(segments.total, segments=ids, mask=batch.action_mask)
    # The differences are summed: sums over thousands of tokens would cancel all but a few digits of each other.
    loss, aux = loss_fn(total(ratios.log_ratio(log_probs, old)), jnp.zeros_like(log_probs), advantages)
    return loss / jnp.maximum(total(jnp.ones_like(log_probs)), 1.0), aux


def weighted(algorithm: Algorithm, weight: Callable[[Array, Array], Array]) -> Algorithm:
    """Multiplies the loss by weight(trainer's log-probs, sampler's log-probs) of the policy that sampled."""
    inner: PolicyLoss = algorithm.loss

    def loss(log_probs, batch):
        weights = weight(require(batch, "log_probs"), require(batch, "sampler_log_probs"))
        per_token, aux = inner(log_probs, batch)
        return per_token * weights, aux | {"sampler_weight": weights}

    return dataclasses.replace(algorithm, loss=loss)
