"""Quickstart: a small language model learns to add two-digit numbers by policy gradients, in minutes on two CPU cores.

    make quickstart                     # or: python experiments/quickstart.py --algorithm rloo --run-dir runs/rloo

First a warm-up: supervised learning on solved sums, stopped while the model is still mediocre. Then reinforcement
learning, which sees nothing but rewards: 1 for the right answer, 0 for any other. Expect held-out greedy accuracy to
rise from below 0.5 to above 0.9. The run folder holds config.json, metrics.jsonl, checkpoints, curves.png and
summary.json. What follows is all of it put together; each rung of the ladder has a file of its own beside this one.
"""

import dataclasses
from typing import Literal

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop

# Each option swaps the advantage, the loss and the aggregation; nothing else differs between the runs.
ALGORITHMS = {
    "reinforce": lambda run: algorithms.reinforce(),
    "rloo": lambda run: algorithms.rloo(),
    "grpo": lambda run: algorithms.grpo(),
    "dr_grpo": lambda run: algorithms.dr_grpo(max_new_tokens=run.max_new_tokens),
    "ppo_clip": lambda run: algorithms.ppo_clip(),
}


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of the quickstart."""

    algorithm: Literal["reinforce", "rloo", "grpo", "dr_grpo", "ppo_clip"] = "grpo"
    rl_steps: int = 650


def prepare(config: Config) -> ladder.Run:
    """Checks every option before anything is compiled or written."""
    return ladder.prepare(config, name="quickstart")


def train(run: ladder.Run) -> None:
    """Warms up, evaluates, trains by rewards, evaluates again, reports."""
    c = run.config
    algorithm = ALGORITHMS[c.algorithm](run)
    with ladder.session(run) as session:
        params = ladder.warm_up(session)
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run),
            score=ladder.scorer(run),
            experience=ladder.experience(run),
            to_batch=ladder.to_batch(run, algorithm),
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
