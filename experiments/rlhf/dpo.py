"""DPO on the pairs of step 2: no reward model, no sampling, one supervised loss.

    python experiments/rlhf/dpo.py                       # after sft.py and reward_model.py, beside ppo.py

Rafailov et al. 2023, equation 7. The policy's log-ratio to the reference, times β, is a reward in itself; it is fitted
to the same pairs by the same likelihood as the reward model. β says how far from the reference the policy may go.

With seed 0 the true reward was 2.8 at 2.0 nats (SFT 1.8, PPO 2.7 at 3.0 nats), with more right answers than PPO's: 0.69
against 0.39. The pairs were drawn from the reference and stay as they are: the policy is never told about completions
that only it writes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import ladder, rlhf
from jaxpg.estimators import checks, preference
from jaxpg.parallel import sharding
from jaxpg.run import cli
from jaxpg.training import loop
from jaxpg.training.update import adamw
from jaxpg.types import Batch, Weighted


@dataclasses.dataclass(frozen=True)
class Config(rlhf.Config):
    """Options of DPO."""

    steps: int = 200
    batch_size: int = 128  # pairs
    learning_rate: float = 3e-4
    beta: float = 0.3
    label_smoothing: float = 0.0


def prepare(config: Config) -> rlhf.Run:
    """Checks the options before anything is compiled or written."""
    checks.positive("--beta", config.beta)
    return rlhf.prepare(config, step="dpo", after=("sft", "reward_model"))


def token_log_probs(run: rlhf.Run):
    """Builds (params, batch [N, 2, T]) -> log π of each token [N, 2, T]."""
    log_probs = ladder.actor(run.model, temperature=run.config.temperature)

    def of(params, batch):
        rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), dataclasses.replace(batch, kl_coef=None))
        return log_probs(params, rows)[0].reshape(batch.tokens.shape)

    return of


def with_reference(run: rlhf.Run, pairs: Batch) -> Batch:
    """Adds the reference's log-probs, once for all steps: neither it nor the pairs change."""
    of, size = jax.jit(token_log_probs(run), out_shardings=sharding.replicated(run.mesh)), run.config.batch_size
    parts = [jax.tree.map(lambda x, i=i: x[i : i + size], pairs) for i in range(0, len(pairs.tokens), size)]
    return dataclasses.replace(pairs, ref_log_probs=np.concatenate([of(run.params, part) for part in parts]))


def loss_fn(run: rlhf.Run):
    """The mean of −log σ(β·(log-ratio of the chosen − log-ratio of the rejected)) over pairs."""
    c, of = run.config, token_log_probs(run)

    def loss(params, batch):
        ours = preference.sequence_log_probs(of(params, batch), batch.action_mask)
        theirs = preference.sequence_log_probs(batch.ref_log_probs, batch.action_mask)
        per_pair, aux = preference.dpo(*ours.T, *theirs.T, beta=c.beta, label_smoothing=c.label_smoothing)
        count = jnp.float32(len(ours))
        return Weighted(per_pair.sum(), count), {
            "accuracy": Weighted(aux["correct"].sum().astype(jnp.float32), count),
            "chosen_reward": Weighted(aux["chosen_reward"].sum(), count),
            "rejected_reward": Weighted(aux["rejected_reward"].sum(), count),
        }

    return loss


def train(run: rlhf.Run) -> None:
    """Learns which completions are preferred, as a policy."""
    c, before = run.config, run.config.run_dir / "reward_model"
    with rlhf.session(run) as session:
        pairs = with_reference(run, rlhf.encode_pairs(run, rlhf.read_pairs(before / "pairs.jsonl")))
        optimizer = adamw(ladder.rise_and_fall(c.learning_rate, updates=c.steps), b2=0.99)
        state, update = ladder.start_loss(run, loss_fn(run), run.params, optimizer=optimizer)
        step = loop.supervised_step(rlhf.pair_batches(run, pairs), update)
        state = rlhf.fit(session, step, state, show=("loss", "accuracy"))
        reward = rlhf.load_reward(run, before)
        found = rlhf.evaluate(run, state.params, reward=reward, reference=run.params)
        found = rlhf.leave(session, found, params=state.params)
    last = session.rows[-1]
    rlhf.compare(session, {"SFT": rlhf.summary(run, "sft"), "DPO": found})
    session.console.print(
        f"Its implicit reward ended at {last['chosen_reward']:.2f} for the chosen completions and at "
        f"{last['rejected_reward']:.2f} for the rejected ones, and agreed with {last['accuracy']:.0%} "
        f"of the last labels. {found['seconds']:.0f} seconds."
    )


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
