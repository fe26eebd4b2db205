"""GSPO: GRPO with one ratio for the whole response, the geometric mean of its tokens' ratios.

    python experiments/ladder/gspo.py                    # --smoke shows that it runs; --help lists the options

Zheng et al. 2025. Rewards are given to responses, so the importance ratio and the clip are of responses too. The
exponent is divided by the length, which makes the ratio move little: its clip bounds are a thousand times closer to 1
than those of tokens.

Differs from the paper: no KL, and a rule scores completions.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of GSPO."""

    clip_low: Share = 3e-4
    clip_high: NonNegativeFloat = 4e-4


def train(r: recipe.Recipe) -> None:
    """Samples groups, scores them, and clips one ratio a response."""
    c = r.config
    algorithm = algorithms.gspo(clip_low=c.clip_low, clip_high=c.clip_high)
    state, to_batch, update = r.start(algorithm, r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)
        batch = to_batch(rollout, scores)  # advantage = (reward − mean) / std of the group
        state, metrics = update(state, batch, r.key(k))  # ratio = exp(mean of log π − log π_old over the response)
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="gspo", description=__doc__)
