"""Actor and critic trained by updates of their own: one state, two optimizers, the same batch."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from jaxpg.algorithms import Algorithm
from jaxpg.estimators import aggregate, checks, value_losses
from jaxpg.training import train_state
from jaxpg.training.train_state import Trainable, TrainState
from jaxpg.training.update import Metrics, make_update
from jaxpg.types import Array, Batch

Update = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Part(NamedTuple):
    """How one of the two is trained."""

    update: Update  # on the whole parameters and the part's own optimizer state
    optimizer: optax.GradientTransformation  # `optax.identity()` for TRPO, which needs none
    trainable: Trainable  # of a path such as "actor/layers/mlp/up"


def optimizer_of(actor: Part, critic: Part) -> optax.GradientTransformation:
    """The two optimizers as one whose state is {"actor": ..., "critic": ...}; it is there to be initialized."""

    def init(params):
        return {
            name: part.optimizer.init(train_state.split(params, part.trainable)[0])
            for name, part in (("actor", actor), ("critic", critic))
        }

    def update(updates, state, params=None):
        raise TypeError("use `alternate`: actor and critic have updates of their own")

    return optax.GradientTransformation(init, update)


def alternate(actor: Part, critic: Part) -> Update:
    """Builds the update that moves the critic by one and the actor by the other.

    Both start from the same state and read the same batch, whose advantages were computed before: their order makes no
    difference. Metrics of the critic begin with "critic/".
    """

    def own(state: TrainState, name: str) -> TrainState:
        return dataclasses.replace(state, opt_state=state.opt_state[name])

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        fitted, told = critic.update(own(state, "critic"), batch)
        moved, metrics = actor.update(own(state, "actor"), batch)
        joined = dataclasses.replace(
            moved,
            params={"actor": moved.params["actor"], "critic": fitted.params["critic"]},
            opt_state={"actor": moved.opt_state, "critic": fitted.opt_state},
        )
        return joined, metrics | {f"critic/{name}": value for name, value in told.items()}

    return update


def fit_critic(
    algorithm: Algorithm,
    values: Callable[[dict, Batch], Array],
    optimizer: optax.GradientTransformation,
    *,
    updates: int = 1,
    proximal_coef: float = 0.0,
    num_microbatches: int = 1,
) -> Part:
    """Builds the critic's part: some gradient steps on its proximal fit to the batch's targets.

        mean_t loss(V_φ, targets)_t + coef·‖φ − φ_i‖²,   φ_i the critic before the first step

    Args:
      algorithm: its critic's loss, without the coefficient that it has beside an actor's loss.
      values: (params, batch) -> V [B, T]; nothing but the critic's own parameters is trained.
      optimizer: the critic's.
      updates: gradient steps a call.
      proximal_coef: of the second term; 0 leaves it out.
      num_microbatches: as of `update.make_update`.

    Raises:
      ValueError: if `updates` is below 1 or `proximal_coef` is negative.
    """
    checks.at_least("updates", updates, 1)
    checks.non_negative("proximal_coef", proximal_coef)

    def trainable(path: str) -> bool:
        return path.startswith("critic/")

    def fit(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        old = state.params["critic"]

        def loss_fn(params, batch):
            loss = aggregate.token_mean(algorithm.critic.loss(values(params, batch), batch), batch.action_mask)
            if proximal_coef:
                near = value_losses.proximal(params["critic"], old, coef=proximal_coef)
                loss = dataclasses.replace(loss, total=loss.total + near * loss.weight)
            return loss, {}

        step = make_update(loss_fn, optimizer, num_microbatches=num_microbatches, trainable=trainable)
        state, metrics = jax.lax.scan(lambda state, _: step(state, batch), state, length=updates)
        return state, jax.tree.map(lambda x: x[-1], metrics)

    return Part(fit, optimizer, trainable)
