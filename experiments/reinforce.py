"""REINFORCE: make each completion more likely in proportion to its reward, and that is all.

    python experiments/reinforce.py                      # --smoke shows that it runs; --help lists the options

Williams 1992. The gradient is that of E[R]: the whole return weighs the log-probability of every token. There is no
baseline, so with rewards of 0 and 1 nothing is learned from a wrong answer, and the variance is the largest of all
rungs. Samples of a prompt are not compared: the default is one a prompt. One update a rollout, since a second would be
off policy, which this estimator does not correct.

Differs from the paper: a language model, AdamW and gradient clipping in place of plain ascent.
In `compare.py` held-out accuracy rose from 0.211 to 0.340 (three seeds, 50,000 samples).
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of REINFORCE."""

    group_size: int = 1
    minibatches: int = 1


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    return ladder.prepare(config, name="reinforce")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    algorithm = algorithms.reinforce()
    with ladder.session(run) as session:
        params = ladder.warm_up(session)
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),  # iteration -> problems and their tokens
            sample=ladder.sampler(run),  # -> Rollout
            score=ladder.scorer(run),  # -> rewards [P, G], on the host
            experience=ladder.experience(run),
            to_batch=ladder.to_batch(run, algorithm),  # advantage = the whole return
            update=update,  # loss = -log π · advantage
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
