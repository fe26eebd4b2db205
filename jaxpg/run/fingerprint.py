"""A fingerprint of arrays: equal for equal bits, whatever devices they are spread over.

    f(x) = Σ_i (2·i + 1) · bits(x_i)   mod 2^32,   i the flat index

One changed word always changes it, since odd factors have an inverse mod 2^32; words that swap places nearly always do.
It is there to find damage and mistakes, not forgery.
"""

import jax
import jax.numpy as jnp

from jaxpg.parallel.paths import by_path
from jaxpg.types import Array


def of_tree(tree) -> dict[str, int]:
    """Computes the fingerprint of every array of a pytree, on the devices where it lies: path -> 32 bits."""
    found = jax.device_get(_compiled(without_key_types(tree)))
    return {path: int(value) for path, value in by_path(found).items()}


def combined(tree) -> str:
    """Says in one word which arrays a pytree holds, for records: eight hexadecimal digits."""
    return f"{sum((2 * i + 1) * value for i, value in enumerate(of_tree(tree).values())) % 2**32:08x}"


@jax.jit
def _compiled(tree):
    return jax.tree.map(of_array, tree)


def of_array(x: Array) -> Array:
    """Computes the fingerprint of one array, uint32; of any dtype but keys. An empty one has 0."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    size = x.dtype.itemsize
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):  # in place of a reshape, which would gather what is sharded
        index = index * words.shape[axis] + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum((2 * index + 1) * words, dtype=jnp.uint32)


def without_key_types(tree):
    """Replaces typed keys by their integers."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
