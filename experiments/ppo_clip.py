"""PPO: actor and critic take several small updates a rollout, and the clip takes away the gain of going too far.

    python experiments/ppo_clip.py                       # --smoke shows that it runs; --help lists the options

Schulman et al. 2017, equations 7 and 9. The advantage is GAE, whitened over the batch; the ratio is clipped to
[1 - clip_low, 1 + clip_high]; the critic's change is clipped too. A clipped token has no gradient. The log has the
share of clipped tokens and `kl_old`, an estimate of how far the policy went.

Differs from the paper: actor and critic share no weights, and start from the same trunk.
In `compare.py` held-out accuracy rose from 0.211 to 0.383 (three seeds, 50,000 samples).
Without a critic: `experiments/quickstart.py --algorithm ppo_clip`.
"""

import dataclasses

from jaxpg import algorithms, ladder
from jaxpg.run import cli
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(ladder.Config):
    """Options of PPO."""

    group_size: int = 1
    minibatches: int = 2
    epochs: int = 2
    rl_steps: int = 200
    lambda_: float = 1.0  # of GAE
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0


def prepare(config: Config) -> ladder.Run:
    """Checks the options before anything is compiled or written."""
    return ladder.prepare(config, name="ppo_clip")


def train(run: ladder.Run) -> None:
    """Warms up on solved problems, then learns from rewards alone."""
    c = run.config
    algorithm = algorithms.ppo(
        lambda_=c.lambda_,
        clip_low=c.clip_low,
        clip_high=c.clip_high,
        value_clip=c.value_clip,
        value_coef=c.value_coef,
        entropy_coef=c.entropy_coef,
    )
    with ladder.session(run) as session:
        params = ladder.with_critic(run.model, ladder.warm_up(session), session.key)
        policy = ladder.actor_critic(run.model, temperature=c.temperature)
        state, update = ladder.start(run, algorithm, params, policy=policy)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run, acting=ladder.acting),
            score=ladder.scorer(run),
            experience=ladder.experience(run, values=ladder.values(run)),  # V before the updates
            to_batch=ladder.to_batch(run, algorithm),  # GAE, whitened; targets for the critic
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        ladder.fit(session, step, state, acting=ladder.acting)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
