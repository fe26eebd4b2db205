"""The first train state, sharded over a mesh, and updates compiled for it."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpg.parallel import sharding
from jaxpg.training import train_state
from jaxpg.training.train_state import Trainable, TrainState
from jaxpg.training.update import take_rows
from jaxpg.types import Array, Batch


def start(
    mesh: Mesh,
    params,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    kl_coef: float = 0.0,
    trainable: Trainable | None = None,
) -> TrainState:
    """Builds the state of update 0 from copies of the parameters, since a state's arrays are donated.

    Args:
      mesh: where the state lives; parameters and moments are cut by `sharding.TRANSFORMER_RULES`.
      params: a pytree of arrays.
      optimizer: as `update.make_update` is given.
      seed: of the state's key.
      kl_coef: the first KL coefficient β.
      trainable: as `update.make_update` is given.
    """

    def init(params):
        own = jax.tree.map(jnp.copy, params)
        return train_state.init(own, optimizer, jax.random.key(seed), kl_coef=kl_coef, trainable=trainable)

    return jax.jit(init, out_shardings=sharding.shardings(mesh, jax.eval_shape(init, params)))(params)


def compiled(mesh: Mesh, update: Callable, state: TrainState) -> Callable:
    """Compiles (state, batch) -> (state, metrics): the state stays where it is and its arrays are donated."""
    places = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(update, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh)))


def minibatches(batch: Batch, key: Array, *, epochs: int, count: int) -> Iterator[Batch]:
    """Cuts a batch into `count` minibatches, `epochs` times over; the rows are shuffled anew for each pass.

    Raises:
      ValueError: if `count` does not divide the rows.
    """
    rows = batch.tokens.shape[0]
    if rows % count:
        raise ValueError(f"minibatches={count} does not divide the {rows} rows of a rollout: choose a divisor")
    for epoch in range(epochs):
        for index in range(count):
            yield batch if count == 1 else _take(batch, jax.random.fold_in(key, epoch), index, count=count)


_take = jax.jit(take_rows, static_argnames="count")
