"""Drawing from a softmax over a vocabulary."""

import jax
import jax.numpy as jnp

from jaxpg.types import Array

CHUNK = 256  # entries whose probabilities are added up before one is chosen among them


def categorical(keys: Array, scores: Array) -> Array:
    """Draws an index for each row, by inverting the distribution function twice: a chunk of entries, then an entry.

    Two uniform numbers a row, where the Gumbel trick of `jax.random.categorical` takes one for each entry: with a large
    vocabulary that costs as much as a third of a decode step. Adding up chunks first keeps the sums short, so that
    rounding moves a chunk's probability by about 1e-7 and, in a chunk, an entry's by as much of the chunk's own.

    Args:
      keys: [R] typed keys.
      scores: [R, V] unnormalised log-probabilities; −inf is never drawn.

    Returns:
      [R] int32.
    """
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    mass = jnp.exp(scores - scores.max(-1, keepdims=True))
    mass = jnp.pad(mass, ((0, 0), (0, -mass.shape[-1] % CHUNK))).reshape(len(mass), -1, CHUNK)
    chunk = _invert(mass.sum(-1), uniform[:, 0])
    inside = jnp.take_along_axis(mass, chunk[:, None, None], axis=1)[:, 0]
    return chunk * CHUNK + _invert(inside, uniform[:, 1])


def _invert(mass: Array, uniform: Array) -> Array:
    """The first index [R] whose cumulative mass exceeds uniform · total, uniform < 1.

    XLA adds up in a tree, so that sums need not grow with the index: entries without mass are left out by name.
    """
    upto = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0)
    return jnp.argmax(upto > uniform[:, None] * upto.max(-1, keepdims=True), axis=-1).astype(jnp.int32)


def log_prob_of(scores: Array, token: Array) -> Array:
    """Log-probability [R] of one entry a row, without writing down those of the others."""
    own = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
    return own - jax.nn.logsumexp(scores, axis=-1)
