"""GDPO: GRPO for several rewards, each normalized within the group before they are added.

    python experiments/ladder/gdpo.py --model models/smollm2-135m --task data:train.jsonl \\
        --scorers number regex:####

Liu et al. 2026. Where rewards of different kinds are added first, groups with different pairs of rewards may get the
same advantage, and a reward with a larger spread drowns the others. Here each scorer has a z-score of its own. With
one scorer it is GRPO.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of GDPO."""

    clip_low: Share = 0.2
    clip_high: NonNegativeFloat = 0.2


def train(r: recipe.Recipe) -> None:
    """Samples groups, scores them by every scorer, and adds the z-scores."""
    c = r.config
    algorithm = algorithms.gdpo(clip_low=c.clip_low, clip_high=c.clip_high)
    state, to_batch, update = r.start(algorithm, r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)  # also the K scorers apart: [P, G, K]
        batch = to_batch(rollout, scores)  # advantage = Σ_k z-score of scorer k in the group
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="gdpo", description=__doc__)
