"""ReMax: the reward of the most likely completion is the baseline.

    python experiments/ladder/remax.py                   # --smoke shows that it runs; --help lists the options

Li et al. 2024. A sample has to beat what the policy would say without chance. The baseline costs one greedy
completion a prompt, drawn in the same call from the same prefill, and no critic. It does not depend on the sample, so
the gradient stays unbiased. One sample a prompt is enough, and there is one update a rollout.

Differs from the paper: no KL to a reference policy, and a rule scores completions in place of a reward model.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import Positive


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of ReMax."""

    group_size: Positive = 1
    minibatches: Positive = 1


def train(r: recipe.Recipe) -> None:
    """Samples, also greedily, scores both, and compares them."""
    state, to_batch, update = r.start(algorithms.remax(), r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout, greedy = r.sample(state.params, prompts, r.key(k), greedy=True)
        scores = r.score(prompts, rollout, greedy)
        batch = to_batch(rollout, scores)  # advantage = reward − reward of the greedy completion
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="remax", description=__doc__)
