"""RLOO: the baseline of a sample is the mean reward of the others of its prompt.

    python experiments/ladder/rloo.py                    # --smoke shows that it runs; --help lists the options

Kool et al. 2019; Ahmadian et al. 2024. A group of samples gives a baseline for free, and leaving out the sample
itself keeps the gradient unbiased. With one update a rollout the loss needs no ratio; with several, one clipped ratio
stands for the whole response, the action of a bandit.

Differs from the paper: no KL to a reference policy, and a rule scores completions in place of a reward model.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of RLOO."""

    clip_low: Share = 0.2  # of the ratio of a response, where there are several updates a rollout
    clip_high: NonNegativeFloat = 0.2


def train(r: recipe.Recipe) -> None:
    """Samples groups, scores them, and compares each sample with the others of its prompt."""
    c = r.config
    one_update = c.epochs == c.minibatches == 1
    clip = {"clip_low": c.clip_low, "clip_high": c.clip_high}
    state, to_batch, update = r.start(algorithms.rloo() if one_update else algorithms.rloo_clip(**clip), r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)
        batch = to_batch(rollout, scores)  # advantage = reward − mean reward of the others in the group
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="rloo", description=__doc__)
