"""DAPO: GRPO without a KL, with a higher upper wall, token means, and groups that all have a signal.

    python experiments/dapo.py                           # --smoke shows that it runs; --help lists the options

Yu et al. 2025. Dynamic sampling: a group whose samples are all right or all wrong has advantage 0 and only dilutes the
batch, so it is replaced, until the batch is full or --max-resamples draws are spent. The upper wall of the clip is
higher, so that unlikely tokens may become likely. Tokens are averaged over the batch, and completions that come near
the budget are punished a little.

Differs from the paper: groups stay in the batch once the bound is reached, which keeps its shape, hence its compiled
program.
In `compare.py` held-out accuracy rose from 0.211 to 0.342 (three seeds, 50,000 samples kept of 113,000 drawn).
The log has `sampled_groups`, how often the batch was drawn.
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of DAPO."""

    rl_steps: int = 250
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_resamples: int = 3  # draws a step, beyond the first
    overlong_margin: int = 1  # tokens before the budget from where on length is punished


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    if config.max_resamples < 0:
        raise ValueError(f"--max-resamples={config.max_resamples}: must be at least 0")
    if config.overlong_margin < 1:
        raise ValueError(f"--overlong-margin={config.overlong_margin}: must be at least 1")
    return ladder.prepare(config, name="dapo")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    c = run.config
    algorithm = algorithms.dapo(
        limit=run.max_new_tokens, margin=c.overlong_margin, clip_low=c.clip_low, clip_high=c.clip_high
    )
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
            max_resamples=c.max_resamples,
        )
        ladder.fit(session, step, state)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
