"""ReMax: the reward of the most likely completion is the baseline.

    python experiments/remax.py                          # --smoke shows that it runs; --help lists the options

Li et al. 2024. What the policy would say without chance is what a sample has to beat. The baseline costs one greedy
completion a prompt, drawn in the same call from the same prefill, and no critic. It does not depend on the sample, so
the gradient stays unbiased. One sample a prompt is enough, and one update a rollout.

Differs from the paper: no KL to a reference model, rewards of a rule in place of a reward model's.
In `compare.py` held-out accuracy rose from 0.211 to 0.279 (three seeds, 50,000 samples).
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of ReMax."""

    group_size: int = 1
    minibatches: int = 1


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    return ladder.prepare(config, name="remax")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    c = run.config
    algorithm = algorithms.remax()
    with ladder.session(run) as session:
        params = ladder.warm_up(session)
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run, greedy=True),
            score=ladder.scorer(run),
            experience=ladder.experience(run),
            to_batch=ladder.to_batch(run, algorithm),  # advantage = reward - greedy reward
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
