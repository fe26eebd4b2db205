"""DPO on the pairs of step 2: no reward model, no sampling, one supervised loss.

    python experiments/rlhf/dpo.py                       # after sft.py and reward_model.py, beside ppo.py

Rafailov et al. 2023, equation 7. The policy's log-ratio to the reference, times β, is a reward in itself; it is
fitted to the same pairs by the same likelihood as the reward model. β says how far from the reference the policy may
go.

With seed 0 the true reward was 2.8 at 2.0 nats (SFT 1.8, PPO 2.7 at 3.0 nats), with more right answers than PPO's:
0.69 against 0.39. The pairs were drawn from the reference and stay as they are: the policy is never told about
completions that only it writes.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from pairs import encode_pairs, pair_batches, read_pairs
from reward import check_done

from jaxpg import preference, recipe
from jaxpg.parallel import sharding
from jaxpg.rollout import policies
from jaxpg.run import cli
from jaxpg.run.ranges import Between, Positive, PositiveFloat
from jaxpg.training.update import make_update
from jaxpg.types import Batch, Weighted


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of DPO."""

    model: str = "runs/rlhf/sft"  # the folder of step 1
    pairs: Path = Path("runs/rlhf/reward_model")  # the folder of step 2, which has the pairs
    task: str = "taste"
    rl_steps: Positive = 200
    batch_pairs: Positive = 128  # a step
    rl_learning_rate: PositiveFloat = 3e-4
    minibatches: Positive = 1
    beta: PositiveFloat = 0.3
    label_smoothing: Annotated[float, Between(0, 0.5)] = 0.0


def prepare(config: Config) -> recipe.Setup:
    """Checks the options before anything is compiled or written."""
    check_done(Path(config.model), script="sft.py")
    check_done(config.pairs, script="reward_model.py")
    if config.smoke:
        config = dataclasses.replace(config, batch_pairs=32)
    return recipe.prepare(config, name="rlhf/dpo")


def token_log_probs(r: recipe.Recipe):
    """Builds (params, batch [N, 2, T]) -> log π of each token [N, 2, T]."""
    policy = policies.actor(r.model, r.sampling)

    def of(params, batch):
        rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), dataclasses.replace(batch, kl_coef=None))
        return policy(params, rows)[0].reshape(batch.tokens.shape)

    return of


def with_reference(r: recipe.Recipe, params: dict, pairs: Batch) -> Batch:
    """Adds the reference's log-probs, once for all steps: neither it nor the pairs change."""
    of, size = jax.jit(token_log_probs(r), out_shardings=sharding.replicated(r.mesh)), r.config.batch_pairs
    parts = [jax.tree.map(lambda x, i=i: x[i : i + size], pairs) for i in range(0, len(pairs.tokens), size)]
    return dataclasses.replace(pairs, ref_log_probs=np.concatenate([of(params, part) for part in parts]))


def loss_fn(r: recipe.Recipe):
    """The mean of −log σ(β·(log-ratio of the chosen − log-ratio of the rejected)) over pairs."""
    c, of = r.config, token_log_probs(r)

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


def train(r: recipe.Recipe) -> None:
    """Learns which completions are preferred, as a policy."""
    c, params = r.config, r.warm_up()
    pairs = encode_pairs(r.setup, read_pairs(c.pairs / "pairs.jsonl"))
    batch = pair_batches(r.setup, with_reference(r, params, pairs), c.batch_pairs)
    optimizer = r.optimizer(c.rl_learning_rate)
    trainable = r.trainable(critic=False)
    step = make_update(loss_fn(r), optimizer, num_microbatches=c.num_microbatches, trainable=trainable)
    state = r.first_state(params, optimizer, trainable=trainable)
    update = r.compiled(step, state)
    for k, state in r.steps(state):
        state, metrics = update(state, batch(k))
        r.commit(k, state, metrics)


if __name__ == "__main__":
    cli.main(Config, prepare, partial(recipe.execute, train=train), description=__doc__)
