"""Multilayer perceptrons as plain pytrees, for games whose state is a short vector."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.types import Array


def init(key: Array, sizes: Sequence[int], *, scale: float = 2**0.5, last_scale: float = 1.0) -> list[dict]:
    """Draws orthogonal kernels and zero biases.

    A small last_scale makes the first policy nearly uniform (Andrychowicz et al. 2021, "What matters in on-policy RL",
    section 3.2). Orthogonal, since TD(0) failed on CartPole with half of the seeds when kernels were normal.

    Args:
      key: a typed PRNG key.
      sizes: widths, input first and output last; at least two.
      scale: of all layers but the last.
      last_scale: of the last layer.

    Returns:
      A list of layers {"kernel": [m, n], "bias": [n]}, float32.

    Raises:
      ValueError: if there are fewer than two sizes, one is below 1, or a scale is negative.
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes={tuple(sizes)}: must be at least two widths, input and output, each at least 1")
    checks.non_negative("scale", scale)
    checks.non_negative("last_scale", last_scale)
    scales = [scale] * (len(sizes) - 2) + [last_scale]
    keys = jax.random.split(key, len(scales))
    return [
        {"kernel": jax.nn.initializers.orthogonal(gain)(k, shape), "bias": jnp.zeros(shape[1])}
        for k, shape, gain in zip(keys, pairwise(sizes), scales, strict=True)
    ]


def apply(layers: list[dict], x, *, activation: Callable[[Array], Array] = jnp.tanh) -> Array:
    """Computes the outputs [..., n] of inputs [..., m]; float32, and gradient flows through both arguments."""
    x = checks.as_float(x)
    for layer in layers[:-1]:
        x = activation(_affine(layer, x))
    return _affine(layers[-1], x)


def _affine(layer: dict, x: Array) -> Array:
    return jnp.matmul(x, layer["kernel"], precision="highest") + layer["bias"]
