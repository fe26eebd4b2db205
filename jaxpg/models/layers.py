"""The layers of the Transformer: norm, rotary positions, attention, gated MLP, block."""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpg.models.config import Config
from jaxpg.types import Array


class Past(NamedTuple):
    """Earlier keys and values that new tokens may attend to."""

    keys: Array  # [b, S, K, D]; b divides the number of query rows, B/b adjacent rows share one entry
    values: Array  # [b, S, K, D]
    mask: Array  # [b, S] bool


class RMSNorm(nn.Module):
    """x / rms(x) · scale, computed in float32 (Zhang & Sennrich 2019, eq. 4)."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        return (x32 * scale).astype(x.dtype)


def rotary(x: Array, positions: Array, base: float) -> Array:
    """Rotates the two halves of each head by the position's angles (RoPE; Su 2021, eq. 34).

    Args:
      x: [B, N, H, D].
      positions: [B, N] int32.
      base: wavelength base.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend_past(queries: Array, parts: Sequence[Past]) -> Array:
    """Attends one token a row to several caches under one softmax.

    A part with b < B rows is read as it is stored: prompts are shared, never repeated per sample.

    Args:
      queries: [B, 1, H, D].
      parts: caches, together without an all-masked row.

    Returns:
      [B, 1, H, D].
    """
    rows, _, heads, dim = queries.shape
    scores = []
    for part in parts:
        b, slots, kv_heads, _ = part.keys.shape
        grouped = queries.reshape(b, rows // b, kv_heads, heads // kv_heads, dim)
        score = jnp.einsum("bgkrd,bskd->bgkrs", grouped, part.keys, preferred_element_type=jnp.float32)
        score = jnp.where(part.mask[:, None, None, None, :], score * dim**-0.5, -jnp.inf)
        scores.append(score.reshape(rows, heads, slots))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)
    out, offset = 0, 0
    for part in parts:
        b, slots, kv_heads, _ = part.keys.shape
        weight = weights[..., offset : offset + slots].reshape(b, rows // b, kv_heads, heads // kv_heads, slots)
        out += jnp.einsum("bgkrs,bskd->bgkrd", weight, part.values).reshape(rows, 1, heads, dim)
        offset += slots
    return out


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie 2023)."""

    config: Config

    @nn.compact
    def __call__(self, x: Array, positions: Array, mask: Array | None, past: Sequence[Past] = ()):
        c = self.config
        into = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
        back = nn.initializers.variance_scaling(0.5 / c.num_layers, "fan_in", "normal", in_axis=(0, 1), out_axis=2)
        query = self.param("query", into, (c.hidden_size, c.num_heads, c.head_dim)).astype(c.dtype)
        key = self.param("key", into, (c.hidden_size, c.num_kv_heads, c.head_dim)).astype(c.dtype)
        value = self.param("value", into, (c.hidden_size, c.num_kv_heads, c.head_dim)).astype(c.dtype)
        out = self.param("out", back, (c.num_heads, c.head_dim, c.hidden_size)).astype(c.dtype)

        queries = rotary(jnp.einsum("bne,ehd->bnhd", x, query), positions, c.rope_base)
        keys = rotary(jnp.einsum("bne,ehd->bnhd", x, key), positions, c.rope_base)
        values = jnp.einsum("bne,ehd->bnhd", x, value)
        if past:
            itself = Past(keys, values, jnp.ones(x.shape[:2], bool))
            attended = attend_past(queries, (*past, itself))
        else:
            attended = jax.nn.dot_product_attention(queries, keys, values, mask=mask)
        return jnp.einsum("bnhd,hde->bne", attended, out), (keys, values)


class MLP(nn.Module):
    """(silu(x·gate) ⊙ x·up)·down (Shazeer 2020, eq. 6)."""

    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        into = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        back = nn.initializers.variance_scaling(0.5 / c.num_layers, "fan_in", "normal")
        gate = self.param("gate", into, (c.hidden_size, c.mlp_size)).astype(c.dtype)
        up = self.param("up", into, (c.hidden_size, c.mlp_size)).astype(c.dtype)
        down = self.param("down", back, (c.mlp_size, c.hidden_size)).astype(c.dtype)
        return (nn.silu(x @ gate) * (x @ up)) @ down


class Block(nn.Module):
    """One pre-norm layer; returns its keys and values so that a caller may cache them."""

    config: Config

    @nn.compact
    def __call__(self, x: Array, past, positions: Array, mask: Array | None, past_masks: Sequence[Array]):
        c = self.config
        parts = [Past(keys, values, m) for (keys, values), m in zip(past, past_masks, strict=True)]
        normed = RMSNorm(c.norm_epsilon, name="attention_norm")(x)
        attended, keys_values = Attention(c, name="attention")(normed, positions, mask, parts)
        x = x + attended
        x = x + MLP(c, name="mlp")(RMSNorm(c.norm_epsilon, name="mlp_norm")(x))
        return x, keys_values
