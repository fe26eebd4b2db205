"""Dynamic sampling: groups whose samples all have the same reward are replaced, until the batch is full (Yu 2025)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array, Rollout

# What scores may tell of each sample, by the names of `types.Experience`.
TOLD = ("rewards", "valid", "token_rewards", "segments", "scores", "scores_valid", "greedy_rewards")


class Drawn(NamedTuple):
    """P prompts, the G samples of each, and their scores."""

    problems: Sequence[Any]  # P
    rollout: Rollout  # B = P·G rows
    scores: Any  # a NamedTuple such as `loop.Scores`, its arrays [P, ...] or [B, ...]


def fill(draw: Callable[[int], Drawn], *, max_resamples: int) -> tuple[Drawn, int]:
    """Draws until every group has samples of different rewards, but no more than `max_resamples` times anew.

    Groups with a signal stay where they are; the first new ones with a signal take the places of those without. If the
    bound is reached, the rest keeps groups without a signal: the batch has always the same shape.

    Args:
      draw: attempt 0, 1, … -> as many groups as the batch has.
      max_resamples: the bound; 0 takes the first draw as it is.

    Returns:
      The batch, and how often it was drawn.
    """
    kept, attempts = draw(0), 1
    while attempts <= max_resamples and not has_signal(kept.scores).all():
        kept = _replace(kept, draw(attempts))
        attempts += 1
    return kept, attempts


def has_signal(scores) -> np.ndarray:
    """Says [P] whether the valid rewards of a group differ."""
    rewards = np.ma.masked_array(whole_rewards(scores), ~np.asarray(scores.valid))
    return np.ma.filled(np.ma.ptp(rewards, axis=-1), 0.0) > 0


def whole_rewards(scores) -> np.ndarray:
    """Adds up what each sample earned [P, G]: its outcome's reward and those of its tokens."""
    rewards = np.asarray(scores.rewards)
    beside = getattr(scores, "token_rewards", None)
    return rewards if beside is None else rewards + beside.sum(-1).reshape(rewards.shape)


def _replace(old: Drawn, new: Drawn) -> Drawn:
    """Puts new groups that have a signal into the places of old ones that have none."""
    groups = len(old.problems)
    places = np.flatnonzero(~has_signal(old.scores))
    found = np.flatnonzero(has_signal(new.scores))[: len(places)]
    chosen = np.arange(groups)  # among the old groups, then the new ones
    chosen[places[: len(found)]] = groups + found

    def pick(a, b):  # of arrays on the host, P groups or P·G rows
        both = np.concatenate([a, b]).reshape(2 * groups, -1, *np.shape(a)[1:])
        return both[chosen].reshape(np.shape(a))

    scores = old.scores._replace(
        **{
            name: pick(getattr(old.scores, name), getattr(new.scores, name))
            for name in TOLD
            if getattr(old.scores, name, None) is not None
        }
    )
    problems = [*old.problems, *new.problems]
    return Drawn([problems[i] for i in chosen], _pick_rows(old.rollout, new.rollout, chosen), scores)


@jax.jit
def _pick_rows(old: Rollout, new: Rollout, chosen: Array) -> Rollout:
    """Takes the rows of the chosen groups from two rollouts of one shape."""

    def pick(a, b):
        both = jnp.concatenate([a, b]).reshape(2 * chosen.shape[0], -1, *a.shape[1:])
        return both[chosen].reshape(a.shape)

    return jax.tree.map(pick, old, new)
