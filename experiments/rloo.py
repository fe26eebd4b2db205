"""RLOO: the mean reward of a prompt's other samples is the baseline.

    python experiments/rloo.py                           # --smoke shows that it runs; --help lists the options

Kool et al. 2019, Ahmadian et al. 2024. Samples of the same prompt say how hard it is, without a critic. A sample is
left out of its own baseline, so the gradient stays unbiased. The whole completion is one action and there is one update
a rollout.

Differs from the paper: no KL to a reference model, rewards of a rule in place of a reward model's.
In `compare.py` held-out accuracy rose from 0.211 to 0.250 (three seeds, 50,000 samples).
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of RLOO."""

    minibatches: int = 1


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    return ladder.prepare(config, name="rloo")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    c = run.config
    algorithm = algorithms.rloo()
    with ladder.session(run) as session:
        params = ladder.warm_up(session)
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run),
            score=ladder.scorer(run),
            experience=ladder.experience(run),
            to_batch=ladder.to_batch(run, algorithm),  # advantage = reward - mean of the others
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
