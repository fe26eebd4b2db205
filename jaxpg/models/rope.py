"""Rotary positions (RoPE) and the ways to stretch them to longer contexts."""

import math

import jax.numpy as jnp
import numpy as np

from jaxpg.models.config import Config, RopeScaling
from jaxpg.types import Array


def tables(config: Config, positions: Array, *, local: bool = False) -> tuple[Array, Array]:
    """Cosines and sines of every pair's angle, position · frequency (Su 2021, eq. 34).

    Args:
      config: its `rope_base` and `rope_scaling`; for local layers its `local_rope_base`, unscaled.
      positions: [B, N] int32.
      local: those of local layers?

    Returns:
      Two arrays [B, N, 1, head_dim / 2], float32.
    """
    if local and config.local_rope_base is not None:
        frequency, factor = inverse_wavelengths(config.head_dim, config.local_rope_base), 1.0
    else:
        frequency, factor = scaled(config.head_dim, config.rope_base, config.rope_scaling)
    angle = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the two halves of each head [B, N, H, D], in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def inverse_wavelengths(head_dim: int, base: float) -> np.ndarray:
    """base^(−2i/D) for i < D/2, radians a token."""
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def scaled(head_dim: int, base: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """The frequencies [D/2] under a scaling, and the factor of cosines and sines."""
    plain = inverse_wavelengths(head_dim, base)
    if scaling is None:
        return plain, 1.0
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched, 1.0
    keep = _llama3_share(plain, scaling) if scaling.kind == "llama3" else _yarn_share(head_dim, base, scaling)
    return keep * plain + (1 - keep) * stretched, scaling.attention_factor


def _llama3_share(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """How much of each frequency Llama 3.1 leaves alone: 1 for short waves, 0 for long ones."""
    turns = scaling.original_length * plain / (2 * math.pi)  # within the first training's context
    return np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)


def _yarn_share(head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """How much of each frequency YaRN leaves alone (Peng 2023, eq. 18), by a ramp over pairs."""

    def pair(turns: float) -> float:
        return head_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.high), pair(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / max(last - first, 0.001)
    return 1 - np.clip(ramp, 0, 1)
