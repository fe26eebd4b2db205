"""Actor and critic trained by separate updates: a state with two halves, each with parameters and optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxpg.estimators import aggregate, value_losses
from jaxpg.ladder.config import Run
from jaxpg.ladder.parts import compiled
from jaxpg.models import heads
from jaxpg.parallel import sharding
from jaxpg.training import train_state
from jaxpg.training.train_state import TrainState
from jaxpg.training.update import make_update


def start_halves(run: Run, params: dict, update, *, optimizers: dict[str, optax.GradientTransformation]):
    """Builds the sharded first state, from a copy of the parameters, and compiles an update of `update_halves`.

    Args:
      run: its mesh and key.
      params: {"actor": ..., "critic": ...}, of `with_critic`.
      update: (state, batch) -> (state, metrics).
      optimizers: of each half, as its own update was given; `optax.identity()` for TRPO, which needs none.
    """

    def init(params):
        own = jax.tree.map(jnp.copy, params)
        opt_state = {name: optimizer.init(own[name]) for name, optimizer in optimizers.items()}
        state = train_state.init(own, optax.identity(), jax.random.key(run.config.seed))
        return dataclasses.replace(state, opt_state=opt_state)

    places = sharding.shardings(run.mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=places)(params), compiled(run, update, places)


def update_halves(actor_update, critic_update):
    """Builds the update that moves the critic by one and the actor by the other, on the same batch.

    Their order makes no difference: the advantages were computed beforehand.
    """

    def half(state: TrainState, name: str) -> TrainState:
        return dataclasses.replace(state, params=state.params[name], opt_state=state.opt_state[name])

    def update(state: TrainState, batch) -> tuple[TrainState, dict]:
        critic, told = critic_update(half(state, "critic"), batch)
        actor, metrics = actor_update(half(state, "actor"), batch)
        joined = dataclasses.replace(
            actor,
            params={"actor": actor.params, "critic": critic.params},
            opt_state={"actor": actor.opt_state, "critic": critic.opt_state},
        )
        return joined, metrics | {f"critic/{name}": value for name, value in told.items()}

    return update


def fit_critic(run: Run, optimizer: optax.GradientTransformation, *, updates: int, proximal_coef: float = 0.0):
    """Builds the critic's update: some gradient steps on its proximal fit to the batch's returns.

        mean_t (Q_t − V_φ)² / 2 + coef·‖φ − φ_i‖²,   φ_i the critic before the first step

    Args:
      run: its model and micro-batches.
      optimizer: the critic's.
      updates: gradient steps a call.
      proximal_coef: of the second term; 0 leaves it out.
    """

    def fit(state: TrainState, batch) -> tuple[TrainState, dict]:
        old = state.params

        def loss_fn(critic, batch):
            hidden = run.model.hidden(critic["trunk"], batch.tokens, batch.token_mask)
            losses = value_losses.squared(heads.values(critic["head"], hidden), batch.returns)
            loss = aggregate.token_mean(losses, batch.action_mask)
            if proximal_coef:
                near = value_losses.proximal(critic, old, coef=proximal_coef)
                loss = dataclasses.replace(loss, total=loss.total + near * loss.weight)
            return loss, {}

        step = make_update(loss_fn, optimizer, num_microbatches=run.config.num_microbatches)
        state, metrics = jax.lax.scan(lambda state, _: step(state, batch), state, length=updates)
        return state, jax.tree.map(lambda x: x[-1], metrics)

    return fit
