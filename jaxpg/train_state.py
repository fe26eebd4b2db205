"""Everything that changes during training, as one immutable pytree of arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxpg.types import Array


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
    kl_coef: Array  # [] float32, the KL coefficient β of the moment


def init(params, optimizer: optax.GradientTransformation, key: Array, *, kl_coef: float = 0.0) -> TrainState:
    """Builds the state of update 0.

    Args:
      params: a pytree of float32 arrays.
      optimizer: the Optax transformation that `update.make_update` will be given.
      key: a typed PRNG key (`jax.random.key`).
      kl_coef: the first KL coefficient.

    Raises:
      ValueError: if the key is an untyped uint32 array.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key has dtype {key.dtype}: pass a typed key, jax.random.key(seed)")
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=key,
        kl_coef=jnp.asarray(kl_coef, jnp.float32),
    )
