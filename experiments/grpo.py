"""GRPO: the mean reward of a group is the baseline and its spread the unit; PPO's clip, and no critic.

    python experiments/grpo.py                           # --smoke shows that it runs; --help lists the options

Shao et al. 2024. The advantage of a sample is its z-score among the samples of its prompt. Tokens are averaged within a
completion first, then completions. Groups whose samples all have the same reward have advantage 0. --kl-coef puts the
KL to the model after the warm-up into the loss (k3), as the paper does.

Differs from the paper: no KL by default, rewards of a rule in place of a reward model's. Both normalisers bias the
gradient, towards short right answers and towards prompts that are nearly always or nearly never solved: see
`dr_grpo.py` and `experiments/estimator_lab.py`.
In `compare.py` held-out accuracy rose from 0.211 to 0.287 (three seeds, 50,000 samples).
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of GRPO."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # of the KL to the model after the warm-up


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    return ladder.prepare(config, name="grpo")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    c = run.config
    algorithm = algorithms.grpo(clip_low=c.clip_low, clip_high=c.clip_high, kl_coef=c.kl_coef)
    with ladder.session(run) as session:
        params = ladder.warm_up(session)
        anchor = {"ref_log_probs": ladder.reference(run, params)} if c.kl_coef else {}
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run),
            score=ladder.scorer(run),
            experience=ladder.experience(run, **anchor),
            to_batch=ladder.to_batch(run, algorithm),  # advantage = (reward - mean) / std of the group
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
