"""REINFORCE: make each completion more likely in proportion to its reward, and that is all.

    python experiments/ladder/reinforce.py               # --smoke shows that it runs; --help lists the options

Williams 1992. The gradient is that of E[R]: the whole return weighs the log-probability of every token. There is no
baseline, so with rewards of 0 and 1 nothing is learned from a wrong answer, and the variance is the largest of all
rungs. Samples of a prompt are not compared, so the default is one a prompt. There is one update a rollout: a second
one would be off policy, which this estimator does not correct.

Differs from the paper: a language model, and AdamW with gradient clipping in place of plain ascent.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import Positive


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of REINFORCE."""

    group_size: Positive = 1
    minibatches: Positive = 1


def train(r: recipe.Recipe) -> None:
    """Samples, scores, and raises the log-probability of what was rewarded."""
    state, to_batch, update = r.start(algorithms.reinforce(), r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)
        batch = to_batch(rollout, scores)  # advantage = the whole return
        state, metrics = update(state, batch, r.key(k))  # loss = −log π · advantage
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="reinforce", description=__doc__)
