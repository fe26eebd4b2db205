"""REINFORCE with a baseline: what is better than usual becomes likelier, what is worse becomes less likely.

    python experiments/ladder/reinforce_baseline.py      # --smoke shows that it runs; --help lists the options

Williams 1992. Any b that does not depend on the action leaves the mean of the gradient as it is and lowers its
variance. Here b is the mean reward of all other completions of the batch. The completion itself is left out, because
its reward depends on its actions; `exact.moments` shows the bias of the plain mean.

Differs from `reinforce.py`: the baseline. Differs from `rloo.py`: one b for all prompts, easy or hard.
"""

import dataclasses

import jax.numpy as jnp

from jaxpg import algorithms, recipe
from jaxpg.algorithms.on_experience import response_rewards
from jaxpg.rollout import describe
from jaxpg.run.ranges import Positive
from jaxpg.types import Array, Experience


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of REINFORCE with a baseline."""

    group_size: Positive = 1
    minibatches: Positive = 1


def mean_of_the_others(e: Experience) -> Array:
    """b [B, 1]: the mean reward of the other completions of the batch, those without a score left out."""
    rewards = response_rewards(e).reshape(-1, 1)
    valid = e.valid.reshape(-1, 1)
    total, count = jnp.sum(jnp.where(valid, rewards, 0.0)), jnp.sum(valid)
    return (total - jnp.where(valid, rewards, 0.0)) / jnp.maximum(count - valid, 1)


def train(r: recipe.Recipe) -> None:
    """Samples, scores, and moves the log-probability by how much better than the others a completion was."""
    state, to_batch, update = r.start(algorithms.reinforce_baseline(mean_of_the_others), r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)
        batch = to_batch(rollout, scores)  # advantage = return − b
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="reinforce_baseline", description=__doc__)
