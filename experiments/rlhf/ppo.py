"""RLHF, step 3: PPO against the learned reward, anchored by a KL to the policy of step 1.

    python experiments/rlhf/ppo.py                       # after sft.py and reward_model.py
    python experiments/rlhf/ppo.py --target-kl 40 --kl-coef 0.001 --rl-learning-rate 1e-4 --run-dir runs/rlhf/cheap_kl

Ouyang et al. 2022: the reward of a token is −β·k1, and the last token has the reward model's besides. β moves so that
the KL of a completion stays near a target (Ziegler et al. 2019, section 2.2). The reference and the reward model
never change. The log has the learned reward, which is trained on, and the true one, which nobody reads but you.

Expect the learned reward to rise as far as the KL allows. With seed 0 the true one went from 1.9 to 2.7 at 3 nats
(3.1 at its highest; 3.0 with another reward model of the same recipe), by marks and not by right answers. Where the
KL is cheap the policy leaves the completions that the pairs were about (Gao et al. 2022): in the second command the
true reward rose to 2.0 and 2.2 in two runs and fell to −2.3 and −13, while the learned one rose to its maximum.
Differs from the paper: no pre-training gradients mixed in.
"""

import dataclasses
from functools import partial
from pathlib import Path

from reward import check_done, in_place_of, load_reward

from jaxpg import aggregate, algorithms, kl, recipe
from jaxpg.rollout import describe
from jaxpg.run import cli
from jaxpg.run.ranges import NonNegativeFloat, Positive, PositiveFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of PPO on a learned reward."""

    model: str = "runs/rlhf/sft"  # the folder of step 1
    reward_model: Path = Path("runs/rlhf/reward_model")  # the folder of step 2
    task: str = "taste"
    rl_steps: Positive = 200
    batch_size: Positive = 256  # completions, one a prompt
    rl_learning_rate: PositiveFloat = 1e-3
    epochs: Positive = 2
    minibatches: Positive = 2
    warmup_steps: int = 0  # the policy of step 1 is the warm-up
    lambda_: Share = 0.95  # of GAE
    clip_low: Share = 0.2
    clip_high: NonNegativeFloat = 0.2
    value_clip: PositiveFloat = 1.0
    value_coef: NonNegativeFloat = 0.5
    kl_coef: PositiveFloat = 0.1  # the first β
    target_kl: PositiveFloat = 3.0  # nats a completion
    horizon: PositiveFloat = 2560  # completions over which β is moved


def prepare(config: Config) -> recipe.Setup:
    """Checks the options before anything is compiled or written."""
    check_done(Path(config.model), script="sft.py")
    check_done(config.reward_model, script="reward_model.py")
    return recipe.prepare(config, name="rlhf/ppo")


def kl_to_reference(log_probs, batch):
    """Estimates KL(π ‖ π_ref) of a completion from the rollout, nats (k1); the policy after the updates is not read."""
    return aggregate.sequence_mean_token_sum(kl.k1(batch.log_probs, batch.ref_log_probs), batch.action_mask)


def train(r: recipe.Recipe) -> None:
    """Learns from the learned reward; the true one is looked at alone."""
    c, params = r.config, r.warm_up()
    names = ("lambda_", "clip_low", "clip_high", "value_clip", "value_coef", "kl_coef")
    algorithm = algorithms.rlhf(**{name: getattr(c, name) for name in names})
    learned, reference = load_reward(r.setup, c.reward_model), r.reference(params)
    state, to_batch, update = r.start(algorithm, params)
    controller = partial(kl.proportional, target=c.target_kl, horizon=c.horizon, batch=c.batch_size)
    adapt = r.adaptation(state, controller, measure=kl_to_reference)
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = in_place_of(r.score(prompts, rollout), learned(rollout))
        anchor = {"ref_log_probs": reference(state, rollout), "kl_coef": state.kl_coef}
        batch = to_batch(rollout, scores, values=r.critic(state, rollout), **anchor)  # GAE on r − β·k1, whitened
        state, metrics = update(state, batch, r.key(k))
        state, penalty = adapt(state, batch)  # β follows the KL to the reference
        r.commit(k, state, describe(prompts, rollout, scores) | metrics | penalty)


if __name__ == "__main__":
    cli.main(Config, prepare, partial(recipe.execute, train=train), description=__doc__)
