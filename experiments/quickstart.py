"""Quickstart: a small language model learns to add two-digit numbers by policy gradients, in minutes on two CPU cores.

    make quickstart                     # or: python experiments/quickstart.py --algorithm rloo --run-dir runs/rloo

First comes a warm-up: supervised learning on solved sums, stopped while the model is still mediocre. Then comes
reinforcement learning, which sees nothing but rewards: 1 for the right answer, 0 for any other. Expect held-out greedy
accuracy to rise from below 0.5 to above 0.9. The run folder holds config.json, metrics.jsonl, checkpoints, curves.png,
summary.json and the model. Each algorithm has a file of its own in experiments/ladder.
"""

import dataclasses
from typing import Literal

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegative

# Each option swaps the advantage, the loss and the aggregation; nothing else differs between the runs.
ALGORITHMS = {
    "reinforce": lambda r: algorithms.reinforce(),
    "rloo": lambda r: algorithms.rloo(),
    "grpo": lambda r: algorithms.grpo(),
    "dr_grpo": lambda r: algorithms.dr_grpo(max_new_tokens=r.setup.max_new_tokens),
    "ppo_critic_free": lambda r: algorithms.ppo_critic_free(),
}


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of the quickstart."""

    algorithm: Literal["reinforce", "rloo", "grpo", "dr_grpo", "ppo_critic_free"] = "grpo"
    rl_steps: NonNegative = 300


def train(r: recipe.Recipe) -> None:
    """Warms up, then learns from rewards alone."""
    algorithm = ALGORITHMS[r.config.algorithm](r)
    state, to_batch, update = r.start(algorithm, r.warm_up())  # supervised, until the model is mediocre
    for k, state in r.steps(state):
        prompts = r.prompts(k)  # "37+58="
        rollout = r.sample(state.params, prompts, r.key(k))  # several completions of each prompt
        scores = r.score(prompts, rollout)  # 1 for the right answer, else 0
        batch = to_batch(rollout, scores)  # how much better a completion was than the others
        state, metrics = update(state, batch, r.key(k))  # what was better becomes likelier
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="quickstart", description=__doc__)
