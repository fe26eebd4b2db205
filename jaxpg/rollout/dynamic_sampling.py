"""Dynamic sampling: groups whose samples all have the same reward are replaced, until the batch is full (Yu 2025)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array, Prompts, Rollout, Scores

# The fields of `Scores` that describe samples, by the names of `types.Experience`.
TOLD = ("rewards", "valid", "token_rewards", "segments", "scores", "scores_valid", "greedy_rewards")


class Drawn(NamedTuple):
    """P prompts, the G samples of each, and their scores."""

    prompts: Prompts  # P
    rollout: Rollout  # B = P·G rows
    scores: Scores  # its arrays are [P, ...] or [B, ...]


def has_signal(scores: Scores) -> np.ndarray:
    """Says [P] whether the valid rewards of a group differ."""
    rewards = np.ma.masked_array(whole_rewards(scores), ~np.asarray(scores.valid))
    return np.ma.filled(np.ma.ptp(rewards, axis=-1), 0.0) > 0


def whole_rewards(scores: Scores) -> np.ndarray:
    """Adds up what each sample earned [P, G]: its outcome's reward and those of its tokens."""
    rewards = np.asarray(scores.rewards)
    if scores.token_rewards is None:
        return rewards
    return rewards + np.asarray(scores.token_rewards).sum(-1).reshape(rewards.shape)


def replace_groups(old: Drawn, new: Drawn) -> Drawn:
    """Puts new groups that have a signal into the places of old ones that have none.

    Args:
      old: P groups of G samples.
      new: as many, of rows as long.

    Returns:
      P groups: those of `old` with a signal in their places, the first of `new` with a signal in the places of the
      others as far as they go. Scorers' failures add up, since all samples were scored.
    """
    groups = len(old.prompts.problems)
    places = np.flatnonzero(~has_signal(old.scores))
    found = np.flatnonzero(has_signal(new.scores))[: len(places)]
    chosen = np.arange(groups)  # among the old groups, then the new ones
    chosen[places[: len(found)]] = groups + found
    problems = [*old.prompts.problems, *new.prompts.problems]
    arrays = [(drawn.prompts.tokens, drawn.prompts.mask) for drawn in (old, new)]
    return Drawn(
        prompts=Prompts(*_pick_rows(*arrays, chosen), [problems[i] for i in chosen]),
        rollout=_pick_rows(old.rollout, new.rollout, chosen),
        scores=_pick_scores(old.scores, new.scores, chosen),
    )


def _pick_scores(old: Scores, new: Scores, chosen: np.ndarray) -> Scores:
    """Takes the scores of the chosen groups from two batches."""

    def pick(a, b):  # of arrays on the host, P groups or P·G rows
        both = np.concatenate([a, b]).reshape(2 * len(chosen), -1, *np.shape(a)[1:])
        return both[chosen].reshape(np.shape(a))

    pairs = {name: (getattr(old, name), getattr(new, name)) for name in TOLD}
    picked = {name: pick(*pair) for name, pair in pairs.items() if pair[0] is not None}
    counted = [scores.failures for scores in (old, new) if scores.failures is not None]
    return dataclasses.replace(old, **picked, failures=sum(counted) if counted else None)


@jax.jit
def _pick_rows(old, new, chosen: Array):
    """Takes the rows of the chosen groups from the arrays [P·n, ...] of two trees."""

    def pick(a, b):
        both = jnp.concatenate([a, b]).reshape(2 * chosen.shape[0], -1, *a.shape[1:])
        return both[chosen].reshape(a.shape)

    return jax.tree.map(pick, old, new)
