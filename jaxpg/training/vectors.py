"""Pytrees as vectors: what conjugate gradients do with them."""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.types import Array


def dot(a, b) -> Array:
    """aᵀb of pytrees, multiplied and added in float32. No matrix product, which accelerators may round to bfloat16."""
    products = jax.tree.map(lambda x, y: jnp.sum(checks.as_float(x) * checks.as_float(y)), a, b)
    return jax.tree.reduce(jnp.add, products, jnp.float32(0))


def orthogonal(a, basis):
    """Takes out of a what lies along the orthonormal rows of a basis, pytrees like a with one more axis in front."""
    along = jax.vmap(dot, in_axes=(0, None))(basis, a)
    parts = jax.tree.map(lambda q: jnp.einsum("k,k...->...", along, q, precision="highest"), basis)
    return add_scaled(a, -1.0, parts)


def norm(a) -> Array:
    """|a| of a pytree, in float32."""
    return jnp.sqrt(dot(a, a))


def add_scaled(a, scale, b):
    """a + scale·b of pytrees, in the dtypes of a."""
    return jax.tree.map(lambda x, y: (x + scale * y).astype(x.dtype), a, b)
