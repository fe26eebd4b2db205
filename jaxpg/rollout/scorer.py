"""Scoring a rollout: each process the rows on its own devices, and all of them get all scores."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxpg.data import decode_completions
from jaxpg.parallel import distributed
from jaxpg.rollout.dynamic_sampling import whole_rewards
from jaxpg.types import Prompts, Rollout, Scores


def make_scorer(judge: Callable[..., Scores], tokenizer: PreTrainedTokenizerBase, mesh: Mesh) -> Callable[..., Scores]:
    """Builds (prompts, rollout, greedy=None) -> Scores.

    A sample without a score is not valid, and no sample of a prompt is whose greedy completion has none. The scores
    raise ValueError for a reward that is not finite.

    Args:
      judge: of `tasks.scoring.combine`.
      tokenizer: turns completions into text.
      mesh: of the rollout.
    """

    def of(prompts: Prompts, rollout: Rollout) -> Scores:
        mine = distributed.pick_local(mesh, prompts.problems)
        found = judge(mine, decode_completions(tokenizer, distributed.local(rollout)))
        failures = np.broadcast_to(found.failures / len(mine), (len(mine), len(found.names)))  # a row's share of them
        own = (found.rewards, found.valid, found.scores, found.scores_valid, failures)
        rewards, valid, scores, scores_valid, failures = distributed.gather(mesh, own)
        return Scores(
            rewards=rewards,
            valid=valid,
            scores=scores,
            scores_valid=scores_valid,
            names=found.names,
            failures=np.rint(failures.sum(0)).astype(np.int64),
        )

    def score(prompts: Prompts, rollout: Rollout, greedy: Rollout | None = None) -> Scores:
        scores = of(prompts, rollout)
        if greedy is not None:
            baseline = of(prompts, greedy)
            scores = dataclasses.replace(
                scores,
                valid=scores.valid & baseline.valid,
                greedy_rewards=baseline.rewards[:, 0],
                failures=scores.failures + baseline.failures,
            )
        check_finite(scores)
        return scores

    return score


def check_finite(scores: Scores) -> None:
    """Raises ValueError where a reward that counts is not finite."""
    rewards = whole_rewards(scores)
    bad = np.argwhere(scores.valid & ~np.isfinite(rewards))
    if len(bad):
        prompt, sample = bad[0]
        raise ValueError(
            f"score: reward {rewards[prompt, sample]} for sample {sample} of prompt {prompt}, one of {len(bad)} "
            "that are not finite: mend the scorer, or set valid=False where it does not apply"
        )
