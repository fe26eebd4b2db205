"""RLHF, step 1: supervised learning on demonstrations, packed several to a row, with the loss on completions only.

    python experiments/rlhf/sft.py                       # --smoke shows that it runs; --help lists the options
    python experiments/rlhf/sft.py --model HuggingFaceTB/SmolLM2-135M --run-dir runs/rlhf-smollm/sft

Ouyang et al. 2022, section 3.5. A demonstration is a sum, an answer that is right half of the time, and a few
exclamation marks (`jaxpg/tasks/taste.py`): the model learns what the writer can do, and the writer's mistakes. The
next steps start from this policy, and it is the reference that they stay near.

Any recipe with --rl-steps 0 does the same: its warm-up is all there is. With --task data:<file> that is plain
fine-tuning. Expect answers a little less often right than the writer's (0.43 for 0.5).
"""

import dataclasses
from typing import Annotated

from jaxpg import algorithms, recipe
from jaxpg.run.ranges import NonNegative, Only, Positive, PositiveFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of supervised learning."""

    task: str = "taste"
    rl_steps: Annotated[int, Only(0, "supervised learning reads no rewards")] = 0
    warmup_steps: NonNegative = 400
    warmup_accuracy: Share = 1.0  # all steps are taken
    warmup_batch_size: Positive = 128
    warmup_learning_rate: PositiveFloat | None = None  # default 2e-3, or 2e-5 with --model
    warmup_demonstrations: Positive = 8192
    held_out: Positive = 256


def train(r: recipe.Recipe) -> None:
    """Learns to write what the demonstrations hold: −log π of their tokens, averaged over them."""
    state, *_ = r.start(algorithms.supervised(), r.warm_up())
    list(r.steps(state))  # no step of it reads a reward: this evaluates what was learned


if __name__ == "__main__":
    recipe.main(Config, train, name="rlhf/sft", description=__doc__)
