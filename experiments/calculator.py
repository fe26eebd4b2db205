"""Calculator: a small language model learns in conversations to use a tool, in a few minutes on two CPU cores.

    python experiments/calculator.py                    # or with --rl-steps 300 --seed 1
    python experiments/calculator.py --model models/smollm2-135m --lora-rank 16

Asked "37*48=", the policy may write a call, "[37*48]". The calculator answers "1776|", and the policy goes on with
the answer and a stop token. First comes a warm-up on demonstrations, half of which call the calculator while the
others know the product by heart; it is stopped while the model is mediocre. Then comes reinforcement learning, which
sees nothing but rewards: 1 for the right final answer. Nobody rewards a call, yet expect nearly every conversation to
have one in the end (`calls`).

What the calculator says is read, but is no action: neither phase puts a gradient on its tokens. A checkpoint is told
in words what it may write. The task is in `jaxpg/tasks/calculator.py`; every recipe takes it by --task calculator.
"""

import dataclasses
from typing import ClassVar

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import Positive, PositiveFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of the calculator."""

    NEEDS = ("environment",)

    task: str = "calculator"
    batch_size: Positive | None = None  # conversations a step; default 256, or 64 with --model
    rl_steps: Positive = 120
    rl_learning_rate: PositiveFloat | None = None  # default 1e-3; with --model 2e-5, or 2e-4 for LoRA
    minibatches: Positive = 1
    warmup_accuracy: Share = 0.2  # what counts as mediocre, on training problems

    DEFAULTS: ClassVar = {"batch_size": (256, 64), "rl_learning_rate": (1e-3, 2e-5), "held_out": (256, 64)}


def train(r: recipe.Recipe) -> None:
    """Lets the policy take turns with the calculator, and compares the conversations of a prompt."""
    state, to_batch, update = r.start(algorithms.rloo(), r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)  # "37*48="
        rollout = r.converse(state.params, prompts, r.key(k))  # "[37*48]", read "1776|", "1776"
        scores = r.score(prompts, rollout)  # 1 for the right final answer, else 0
        batch = to_batch(rollout, scores)  # advantage = reward − mean reward of the other conversations
        state, metrics = update(state, batch, r.key(k))  # what the calculator said has no loss
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="calculator", description=__doc__)
