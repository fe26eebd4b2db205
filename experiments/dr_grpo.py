"""Dr. GRPO: GRPO less its two normalisers.

    python experiments/dr_grpo.py                        # --smoke shows that it runs; --help lists the options

Liu et al. 2025. The advantage is the reward less the group's mean, without a division by its spread, and the loss
divides by a constant, the budget of tokens, in place of each completion's length. So every token of every sample weighs
the same, a long wrong answer is not spared, and the difficulty of a prompt does not change its weight.

On policy the gradient is that of RLOO up to a constant. Constants matter to clipping, not to Adam.
In `compare.py` held-out accuracy rose from 0.211 to 0.270 (three seeds, 50,000 samples).
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of Dr. GRPO."""

    clip_low: float = 0.2
    clip_high: float = 0.2


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    return ladder.prepare(config, name="dr_grpo")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    c = run.config
    algorithm = algorithms.dr_grpo(max_new_tokens=run.max_new_tokens, clip_low=c.clip_low, clip_high=c.clip_high)
    with ladder.session(run) as session:
        params = ladder.warm_up(session)
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run),
            score=ladder.scorer(run),
            experience=ladder.experience(run),
            to_batch=ladder.to_batch(run, algorithm),  # advantage = reward - mean of the group
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
