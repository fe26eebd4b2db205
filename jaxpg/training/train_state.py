"""Everything that changes during training, as one immutable pytree of arrays."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxpg.parallel.paths import path_name
from jaxpg.types import Array

Trainable = Callable[[str], bool]  # of a parameter's path, such as "actor/layers/attention/query"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update maps to its successor, and all that a run needs to resume.

    Functions (the model's apply, the optimizer) are closed over, never stored here. The key never changes:
    the randomness of iteration k is `jax.random.fold_in(key, k)`, so resuming needs no iterator state.
    """

    step: Array  # [] int32, optimizer updates done
    params: dict  # float32; actor and critic, where there are two, are two subtrees
    opt_state: optax.OptState
    key: Array  # typed PRNG key
    kl_coef: Array  # [] float32, the KL coefficient β of the moment; the first one is `Algorithm.kl_coef`


def init(
    params,
    optimizer: optax.GradientTransformation,
    key: Array,
    *,
    kl_coef: float = 0.0,
    trainable: Trainable | None = None,
) -> TrainState:
    """Builds the state of update 0.

    A run starts from `init(..., kl_coef=algorithm.kl_coef)`. An update reads β from the state alone, so that with
    the default of 0 an algorithm with a KL penalty trains without it.

    Args:
      params: a pytree of arrays, float32 where they are trained.
      optimizer: the Optax transformation that `update.make_update` will be given.
      key: a typed PRNG key (`jax.random.key`).
      kl_coef: the first KL coefficient β.
      trainable: which parameters are trained, by their path; default all. The optimizer keeps nothing of the others.
        Give `update.make_update` the same.

    Raises:
      ValueError: if the key is an untyped uint32 array, or nothing is trainable.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key has dtype {key.dtype}: pass a typed key, jax.random.key(seed)")
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(split(params, trainable)[0]),
        key=key,
        kl_coef=jnp.asarray(kl_coef, jnp.float32),
    )


def split(params, trainable: Trainable | None = None) -> tuple:
    """Cuts parameters into what is trained and what is frozen: two trees, None where the other one has the array.

    Raises:
      ValueError: if nothing is trainable.
    """
    names = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), params)
    chosen = jax.tree.map(lambda name: trainable is None or bool(trainable(name)), names)
    if trainable is not None and not any(jax.tree.leaves(chosen)):
        listed = ", ".join(jax.tree.leaves(names))
        raise ValueError(f"trainable chooses none of the parameters: must be True for some of {listed}")
    trained = jax.tree.map(lambda leaf, yes: leaf if yes else None, params, chosen)
    frozen = jax.tree.map(lambda leaf, yes: None if yes else leaf, params, chosen)
    return trained, frozen


def join(trained, frozen):
    """Puts together what `split` cut."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
