"""The data that flows through a training step, as frozen pytrees.

Shapes: P prompts, G samples of each, B = P·G rows (the rows of one prompt are adjacent), T tokens a row.
Every `[B, T]` array is token-aligned: index t speaks about `tokens[:, t]`, never about the next token.
Fields that an algorithm does not need stay None; None is an empty pytree, so jit, scan and sharding pass over it.
`Prompts` and `Scores` stay on the host and are no pytrees.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def pytree(cls):
    """Makes a frozen dataclass that JAX sees as a pytree of its fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


class StopReason(enum.IntEnum):
    """Why a rollout row ended."""

    BUDGET = 0  # cut after `max_new_tokens`; its last token is not a stop token
    STOP_TOKEN = 1
    STOP_STRING = 2  # its text contains a stop string since its last token


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of a step: arrays for the sampler, problems for the scorer."""

    tokens: Array  # [P, S] int32, left-padded
    mask: Array  # [P, S] bool, real tokens
    problems: Sequence[Any]  # P of the task's own type


@pytree
class Rollout:
    """What the sampler returns."""

    tokens: Array  # [B, T] int32, prompt then completion; what stands at masked positions has no meaning
    token_mask: Array  # [B, T] bool, real tokens
    action_mask: Array  # [B, T] bool, tokens the policy drew, the first stop token included
    log_probs: Array  # [B, T] float32, of the distribution sampled from (temperature, filters); 0 off the actions
    stop_reason: Array  # [B] int32, a StopReason
    plain_log_probs: Array | None = None  # [B, T] float32, of the tempered distribution without filters; 0 off actions
    observations: Array | None = None  # [B, T, F] float32, what a game shows after each token (experiments/games)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """What the scorers say about G samples of each of P prompts, by the names of `Experience`."""

    rewards: np.ndarray  # [P, G] float32, Σ weight · score over the scorers that apply
    valid: np.ndarray  # [P, G] bool, False where no scorer applied; the reward there has no meaning
    scores: np.ndarray | None = None  # [P, G, K] float32, each scorer's own number, without its weight
    scores_valid: np.ndarray | None = None  # [P, G, K] bool, where each scorer applied; None for everywhere
    names: tuple[str, ...] = ()  # [K], of the scorers
    failures: np.ndarray | None = None  # [K] int64, samples on which a scorer failed; None for no failures
    token_rewards: np.ndarray | None = None  # [B, T] float32, of tokens or steps, besides `rewards`; 0 off actions
    segments: np.ndarray | None = None  # [B, T] int32, the action each token belongs to
    greedy_rewards: np.ndarray | None = None  # [P] float32, of the greedy completions

    @property
    def num_failures(self) -> int:
        """How often a scorer failed, over all scorers."""
        return 0 if self.failures is None else int(np.sum(self.failures))

    def metrics(self) -> dict[str, float]:
        """Returns each scorer's mean where it applies, the share where it applies, and how often it failed."""
        row = {}
        for k, name in enumerate(self.names):
            scores = np.asarray(self.scores[..., k])
            applies = np.ones(scores.shape, bool) if self.scores_valid is None else self.scores_valid[..., k]
            row[f"score/{name}"] = float(scores[applies].mean()) if applies.any() else 0.0
            row[f"score_applies/{name}"] = float(applies.mean())
            row[f"score_failures/{name}"] = 0 if self.failures is None else int(self.failures[k])
        return row


@pytree
class Experience:
    """A rollout with what scoring it added: the input of an algorithm's `advantage`."""

    rollout: Rollout
    rewards: Array  # [P, G] float32, one outcome reward a sample
    valid: Array  # [P, G] bool, False where no scorer applied
    token_rewards: Array | None = None  # [B, T] float32, rewards of single tokens or steps, besides `rewards`
    scores: Array | None = None  # [P, G, K] float32, the rewards of K scorers apart (GDPO)
    scores_valid: Array | None = None  # [P, G, K] bool, where each scorer applied; None for everywhere
    greedy_rewards: Array | None = None  # [P] float32, reward of the greedy completion (ReMax)
    values: Array | None = None  # [B, T] float32, the critic's V before each action
    bootstrap: Array | None = None  # [B] float32, the critic's V after the last action of a response that was cut
    ends: Array | None = None  # [B, T] bool, last actions of episodes inside a row; then bootstrap is [B, T]
    segments: Array | None = None  # [B, T] int32, the action each token belongs to; None for a token each
    ref_log_probs: Array | None = None  # [B, T] float32, of the reference policy
    trainer_log_probs: Array | None = None  # [B, T] float32, the rollout's as the trainer computes them, if recomputed
    kl_coef: Array | None = None  # [] float32, the KL coefficient β, for a KL penalty in the reward


@pytree
class Batch:
    """What a loss reads. All arrays have a leading row axis, so that a batch may be split anywhere."""

    tokens: Array  # [B, T] int32
    token_mask: Array  # [B, T] bool
    action_mask: Array  # [B, T] bool
    log_probs: Array | None = None  # [B, T] float32, of the policy that sampled (π_old)
    sampler_log_probs: Array | None = None  # [B, T] float32, the sampler's own, where the trainer recomputed log_probs
    advantages: Array | None = None  # [B, T] float32
    segments: Array | None = None  # [B, T] int32, the action each token belongs to
    returns: Array | None = None  # [B, T] float32, the critic's targets
    values: Array | None = None  # [B, T] float32, the critic's predictions when the rollout was made
    ref_log_probs: Array | None = None  # [B, T] float32, of the reference policy
    kl_coef: Array | None = None  # [B] float32, the train state's β on every row; `update` fills it in
    observations: Array | None = None  # [B, T, F] float32, what a game shows after each token
    documents: Array | None = None  # [B, T] int32, which document of a packed row each token belongs to


@pytree
class Weighted:
    """A mean kept as its numerator and denominator, so that parts add up exactly.

    Micro-batches, devices and hosts add totals and weights; the division happens once, in `mean`.
    """

    total: Array  # [] float32
    weight: Array  # [] float32

    def __add__(self, other: "Weighted") -> "Weighted":
        return Weighted(total=self.total + other.total, weight=self.weight + other.weight)

    @property
    def mean(self) -> Array:
        """total / weight, and 0 where the weight is 0."""
        empty = self.weight == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.weight))
