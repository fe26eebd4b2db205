"""Dr. GRPO: GRPO without its two normalizers.

    python experiments/ladder/dr_grpo.py                 # --smoke shows that it runs; --help lists the options

Liu et al. 2025. The advantage is the reward less the mean of the group, without a division by its spread. The loss
divides by a constant, the budget of tokens, in place of each completion's length. So every token of every sample
weighs the same, a long wrong answer is not spared, and the difficulty of a prompt does not change its weight.

On policy the gradient is that of RLOO up to a constant. Constants matter to clipping, not to Adam.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of Dr. GRPO."""

    clip_low: Share = 0.2
    clip_high: NonNegativeFloat = 0.2


def train(r: recipe.Recipe) -> None:
    """Samples groups, scores them, and follows the clipped surrogate of their centered rewards."""
    c, budget = r.config, r.setup.max_new_tokens
    algorithm = algorithms.dr_grpo(max_new_tokens=budget, clip_low=c.clip_low, clip_high=c.clip_high)
    state, to_batch, update = r.start(algorithm, r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)
        batch = to_batch(rollout, scores)  # advantage = reward − mean of the group
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="dr_grpo", description=__doc__)
