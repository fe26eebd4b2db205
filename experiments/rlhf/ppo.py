"""RLHF, step 3: PPO against the learned reward, anchored by a KL to the policy of step 1.

    python experiments/rlhf/ppo.py                       # after sft.py and reward_model.py
    python experiments/rlhf/ppo.py --target-kl 40 --kl-coef 0.001 --learning-rate 1e-4 --name ppo_cheap_kl

Ouyang et al. 2022: the reward of a token is −β·k1, that of the last one the reward model's besides. β moves so that the
KL of a completion stays near a target (Ziegler et al. 2019, section 2.2). The reference and the reward model never
change. The log has the learned reward, which is trained on, and the true one, which nobody reads but you.

Expect the learned reward to rise as far as KL allows. With seed 0 the true one went from 1.9 to 2.7 at 3 nats (3.1 at
its highest; 3.0 with another reward model of the same recipe), by marks and not by right answers. Where the KL is cheap
the policy leaves the completions that the pairs were about (Gao et al. 2022): in the second command the true reward
rose to 2.0 and 2.2 in two runs and fell to -2.3 and -13, while the learned one rose to its maximum.
Differs from the paper: no pre-training gradients mixed in.
"""

import dataclasses
from functools import partial

import jax

from jaxpg import algorithms, ladder, rlhf
from jaxpg.estimators import aggregate, checks, kl
from jaxpg.run import cli, report
from jaxpg.training import loop
from jaxpg.training.update import make_kl_adaptation


@dataclasses.dataclass(frozen=True)
class Config(rlhf.Config):
    """Options of PPO."""

    steps: int = 200
    batch_size: int = 256  # completions, one a prompt
    learning_rate: float = 1e-3
    group_size: int = 1
    epochs: int = 2
    minibatches: int = 2
    lambda_: float = 0.95  # of GAE
    clip: float = 0.2
    value_clip: float = 1.0
    value_coef: float = 0.5
    kl_coef: float = 0.1  # the first β
    target_kl: float = 3.0  # nats a completion
    horizon: int = 2560  # completions over which β is moved


def prepare(config: Config) -> rlhf.Run:
    """Checks the options before anything is compiled or written."""
    for name in ("kl_coef", "target_kl", "horizon"):
        checks.positive(f"--{name.replace('_', '-')}", getattr(config, name))
    return rlhf.prepare(config, step="ppo", after=("sft", "reward_model"), smoke={"epochs": 1})


def kl_to_reference(log_probs, batch):
    """Estimates KL(π ‖ π_ref) of a completion from the rollout, nats (k1); the policy after the updates is not read."""
    return aggregate.sequence_mean_token_sum(kl.k1(batch.log_probs, batch.ref_log_probs), batch.action_mask)


def train(run: rlhf.Run) -> None:
    """Learns from the learned reward; the true one is looked at alone."""
    c = run.config
    algorithm = algorithms.rlhf(
        lambda_=c.lambda_, clip_low=c.clip, clip_high=c.clip, value_clip=c.value_clip, value_coef=c.value_coef
    )
    with rlhf.session(run) as session:
        reward = rlhf.load_reward(run, c.run_dir / "reward_model")
        params = ladder.with_critic(run.model, run.params, session.key)
        policy = ladder.actor_critic(run.model, temperature=c.temperature)
        rate = ladder.rise_and_fall(c.learning_rate, updates=c.steps * c.epochs * c.minibatches)
        state, update = ladder.start(run, algorithm, params, policy=policy, learning_rate=rate, kl_coef=c.kl_coef)
        controller = partial(kl.proportional, target=c.target_kl, horizon=c.horizon, batch=c.batch_size)
        adapt = make_kl_adaptation(policy, controller, measure=kl_to_reference)
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run, acting=ladder.acting),
            score=rlhf.scorer(run, reward),
            experience=ladder.experience(
                run,
                values=ladder.values(run),
                ref_log_probs=ladder.reference(run, run.params),
                kl_coef=lambda state, rollout: state.kl_coef,
            ),
            to_batch=ladder.to_batch(run, algorithm),  # GAE on the rewards less β·k1, whitened
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
            adapt=ladder.compiled(run, adapt, jax.tree.map(lambda x: x.sharding, state)),
        )
        state = rlhf.fit(session, step, state, show=("score/learned", "score/true", "kl_measured"))
        actor, rows = ladder.acting(state.params), session.rows
        found = rlhf.evaluate(run, actor, reward=reward, reference=run.params) | rlhf.peak(rows)
        found = rlhf.leave(session, found, params=actor)
    names = {"learned reward": "score/learned", "true reward": "score/true"}
    over = {"over the KL to the reference, nats": "kl_measured", "over the steps": "step"}
    curves = {
        panel: {name: ([row[x] for row in rows], [row[y] for row in rows]) for name, y in names.items()}
        for panel, x in over.items()
    }
    report.draw_curves(run.folder / "curves.png", curves, title="PPO on a learned reward", x="", limits=None)
    rlhf.compare(session, {"SFT": rlhf.summary(run, "sft"), "PPO": found})
    session.console.print(
        f"The true reward was highest around step {found['peak_step']}, {found['peak_true']:.2f} at a KL of "
        f"{found['peak_kl']:.1f} nats, and {found['last_true']:.2f} in the last steps at {found['last_kl']:.1f} nats; "
        f"the learned reward went from {found['peak_learned']:.2f} to {found['last_learned']:.2f} meanwhile. "
        f"β ended at {rows[-1]['kl_coef']:.4f}. {run.folder / 'curves.png'} draws both. {found['seconds']:.0f} seconds."
    )


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
