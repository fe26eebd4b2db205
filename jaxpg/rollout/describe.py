"""What a rollout was like, in numbers: rewards, groups without a signal, lengths, why rows ended."""

import numpy as np

from jaxpg.parallel import distributed
from jaxpg.rollout.dynamic_sampling import has_signal, whole_rewards
from jaxpg.types import Prompts, Rollout, Scores, StopReason


def describe(prompts: Prompts, rollout: Rollout, scores: Scores) -> dict[str, float]:
    """Says in numbers what was sampled.

    Args:
      prompts: P of them; where their problems have a `level`, rewards are told by level too.
      rollout: of B = P·G rows.
      scores: of the same samples, [P, G].

    Returns:
      The numbers of a step's row. Lengths are in tokens; shares lie between 0 and 1.
    """
    actions, stop_reason = distributed.fetch((rollout.action_mask, rollout.stop_reason))
    lengths, cut = actions.sum(-1), stop_reason == StopReason.BUDGET
    rewards = np.ma.masked_array(whole_rewards(scores), ~scores.valid)
    better = rewards.data.reshape(-1) > _mean(rewards)
    row = {
        "reward": _mean(rewards),
        "reward_std": float(np.ma.filled(rewards.std(), 0.0)),
        "scored": float(np.mean(scores.valid)),
        "scorer_failures": scores.num_failures,
        "zero_variance_groups": float(np.mean(~has_signal(scores))),
        "completion_length": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "completion_length_better": _mean(np.ma.masked_array(lengths, ~better)),  # of rewards above the mean
        "completion_length_worse": _mean(np.ma.masked_array(lengths, better)),
        "cut_completions": float(cut.mean()),
        "completion_tokens": int(lengths.sum()),
    }
    levels = np.asarray([getattr(problem, "level", 0) for problem in prompts.problems])
    if len(levels) and levels.min() != levels.max():
        row |= {f"reward/level_{level}": _mean(rewards[levels == level]) for level in np.unique(levels)}
    return row | scores.metrics()


def _mean(values: np.ma.MaskedArray) -> float:
    """The mean of what is not masked, 0 where all is."""
    return float(np.ma.filled(values.mean(), 0.0))
