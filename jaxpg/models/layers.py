"""The layers of the Transformer: norm, projections, attention, gated MLP, experts, block."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.models import rope
from jaxpg.models.attention import Past, attend, attend_past
from jaxpg.models.cache import as_keys, as_values, write
from jaxpg.models.config import Config
from jaxpg.parallel.sharding import constrain_rows, target_platform
from jaxpg.types import Array

ACTIVATION = {"silu": nn.silu, "gelu_tanh": lambda x: nn.gelu(x, approximate=True)}


class TokenContext(NamedTuple):
    """Where the tokens of a call stand; the same for every layer."""

    positions: Array  # [B, N] int32, counting real tokens
    mask: Array  # [B, N] bool, real tokens
    past_masks: Sequence[Array] = ()  # [b, S] bool of each cache: shared ones, the rows' own, and without a slot `mask`
    past_positions: Sequence[Array] = ()  # [b, S] int32, alike
    slot: Array | None = None  # [] int32, where in the rows' own cache the tokens go; None: they are not written to it
    documents: Array | None = None  # [B, N] int32, tokens see those of the same number; None: all of their row


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + scale), computed in float32 (Zhang & Sennrich 2019, eq. 4)."""

    epsilon: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.constant(1.0 - self.offset), (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        return (x32 * (self.offset + scale)).astype(x.dtype)


def norm(config: Config, name: str) -> RMSNorm:
    return RMSNorm(config.norm_epsilon, config.norm_offset, name=name)


def into(outputs: int):
    """Initializer of a projection [in, out...] with so many output axes."""
    return nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=tuple(range(1, outputs + 1)))


def back(config: Config, inputs: int):
    """Initializer of a projection [in..., out] back to the residual stream, smaller the deeper the model."""
    axes = tuple(range(inputs))
    return nn.initializers.variance_scaling(0.5 / config.num_layers, "fan_in", "normal", in_axis=axes, out_axis=inputs)


def transposed(*names: str) -> str:
    """The name of projections of the same input stored as one [out, in], see `skinny_matmul`."""
    return "_".join((*names, "transposed"))


def skinny_matmul(
    x: Array, kernel: Array, inputs: int = 1, *, dtype=None, sizes: Sequence[int] | None = None
) -> list[Array]:
    """x·Wᵀ for a kernel [out, in], contracting the last axes of x, as (W·xᵀ)ᵀ, in parts of these sizes.

    That is what a CPU does fastest with a few rows and a large matrix: at 16 rows XLA takes half to two thirds of the
    time of x·W. The barriers keep it from turning one into the other.
    """
    columns = jax.lax.optimization_barrier(x.reshape(-1, kernel.shape[-1]).T)
    product = jax.lax.optimization_barrier(jnp.matmul(kernel, columns, preferred_element_type=dtype))
    sizes = kernel.shape[:1] if sizes is None else sizes
    parts = jnp.split(product, np.cumsum(sizes)[:-1])
    return [part.T.reshape(*x.shape[:-inputs], size) for part, size in zip(parts, sizes, strict=True)]


def contract(x: Array, kernel: Array, inputs: int = 1) -> Array:
    """x·W, contracting the last axes of x with the first of the kernel.

    For a CPU it is one product of two matrices. To get the kernel's gradient from [B, T, out], XLA writes a transposed
    copy [out, B·T] first, which took a fourth of a small model's update; from [B·T, out] it needs none.
    """
    if target_platform() != "cpu":
        return jnp.tensordot(x, kernel, inputs)
    leading, out = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    size = math.prod(kernel.shape[:inputs])
    return (x.reshape(math.prod(leading), size) @ kernel.reshape(size, math.prod(out))).reshape(*leading, *out)


class Layer(nn.Module):
    """What attention and MLP share: projections, to which adapters may be added."""

    config: Config

    def project(
        self, names: Sequence[str], x: Array, shapes: Sequence[tuple[int, ...]], init, *, inputs: int = 1, bias=False
    ) -> list[Array]:
        """x·W (+ bias) (+ x·A·B · alpha/r, LoRA; Hu 2021, eq. 3) for each name, contracting the last axes of x.

        The adapter, where there is one, is the entry `name` of the collection "lora".
        """
        if self.has_variable("params", transposed(*names)):
            kernel = self.get_variable("params", transposed(*names)).astype(self.config.dtype)
            parts = skinny_matmul(x, kernel, inputs, sizes=[math.prod(shape[inputs:]) for shape in shapes])
            outs = [part.reshape(*part.shape[:-1], *shape[inputs:]) for part, shape in zip(parts, shapes, strict=True)]
        else:
            kernels = [self.param(name, init, shape) for name, shape in zip(names, shapes, strict=True)]
            outs = [contract(x, kernel.astype(self.config.dtype), inputs) for kernel in kernels]
        return [self._add_to(name, out, x, inputs, bias) for name, out in zip(names, outs, strict=True)]

    def _add_to(self, name: str, out: Array, x: Array, inputs: int, bias: bool) -> Array:
        dtype = self.config.dtype
        if bias:
            out += self.param(f"{name}_bias", nn.initializers.zeros_init(), out.shape[x.ndim - inputs :]).astype(dtype)
        if self.has_variable("lora", name):
            adapter = self.get_variable("lora", name)
            down, up = adapter["a"].astype(dtype), adapter["b"].astype(dtype)
            out += jnp.tensordot(jnp.tensordot(x, down, inputs), up, 1) * (self.config.lora_alpha / down.shape[-1])
        return out


class Attention(Layer):
    """Grouped-query attention with rotary positions (Ainslie 2023)."""

    @nn.compact
    def __call__(self, x: Array, place: TokenContext, past: Sequence[tuple[Array, Array]], is_local: Array):
        c = self.config
        shape, kv_shape = (c.hidden_size, c.num_heads, c.head_dim), (c.hidden_size, c.num_kv_heads, c.head_dim)
        queries, keys, values = self.project(
            ("query", "key", "value"), x, (shape, kv_shape, kv_shape), into(2), bias=c.qkv_bias
        )
        if c.query_key_norm:
            queries, keys = norm(c, "query_norm")(queries), norm(c, "key_norm")(keys)
        cos, sin = self._angles(place.positions, is_local)
        queries, keys = rope.rotate(queries, cos, sin), rope.rotate(keys, cos, sin)
        if not past:
            attended = attend(c, queries, keys, values, place.positions, place.mask, is_local, place.documents)
        else:
            if place.slot is None:
                past = (*past, (as_keys(keys), as_values(values)))
            else:
                *shared, own = past
                keys, values = write(*own, keys, values, place.slot)
                past = (*shared, (keys, values))
            caches = zip(past, place.past_masks, place.past_positions, strict=True)
            parts = [Past(*keys_values, mask, positions) for keys_values, mask, positions in caches]
            attended = attend_past(c, queries, place.positions, parts, is_local)
        out_shape = (c.num_heads, c.head_dim, c.hidden_size)
        (out,) = self.project(("out",), attended, (out_shape,), back(c, 2), inputs=2)
        return out, (keys, values)

    def _angles(self, positions: Array, is_local: Array) -> tuple[Array, Array]:
        everywhere = rope.tables(self.config, positions)
        if self.config.local_rope_base is None:
            return everywhere
        local = rope.tables(self.config, positions, local=True)
        return jax.tree.map(lambda a, b: jnp.where(is_local, a, b), local, everywhere)


class MLP(Layer):
    """(activation(x·gate) ⊙ x·up)·down (Shazeer 2020, eq. 6)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        gate, up = self.project(("gate", "up"), x, ((c.hidden_size, c.mlp_size),) * 2, into(1))
        (out,) = self.project(
            ("down",), ACTIVATION[c.activation](gate) * up, ((c.mlp_size, c.hidden_size),), back(c, 1)
        )
        return out


class Experts(nn.Module):
    """Σ_k w_k · MLP_k(x) over the best experts of each token (Shazeer 2017, eq. 1), without dropping any.

    Tokens are sorted by expert, so that each weight matrix meets its tokens in one ragged matmul.
    """

    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        into = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        back = nn.initializers.variance_scaling(0.5 / c.num_layers, "fan_in", "normal", batch_axis=0)
        router = self.param("router", nn.initializers.lecun_normal(), (c.hidden_size, c.num_experts)).astype(c.dtype)
        gate = self.param("gate", into, (c.num_experts, c.hidden_size, c.mlp_size)).astype(c.dtype)
        up = self.param("up", into, (c.num_experts, c.hidden_size, c.mlp_size)).astype(c.dtype)
        down = self.param("down", back, (c.num_experts, c.mlp_size, c.hidden_size)).astype(c.dtype)

        tokens = x.reshape(-1, c.hidden_size)
        shares = jax.nn.softmax((tokens @ router).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(shares, c.experts_per_token)  # [N, k] each
        if c.normalize_experts:
            weights /= weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        counts = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)
        inputs = tokens[order // c.experts_per_token]
        hidden = ACTIVATION[c.activation](jax.lax.ragged_dot(inputs, gate, counts))
        hidden *= jax.lax.ragged_dot(inputs, up, counts)
        outputs = jax.lax.ragged_dot(hidden, down, counts)[jnp.argsort(order)]  # back to the order of tokens
        outputs = outputs.reshape(*weights.shape, c.hidden_size)
        return jnp.einsum("nke,nk->ne", outputs, weights.astype(x.dtype)).reshape(x.shape)


class Block(nn.Module):
    """One layer; returns the tokens' keys and values, or where there is a slot the rows' own cache with them in it."""

    config: Config

    @nn.compact
    def __call__(self, x: Array, past: Sequence[tuple[Array, Array]], is_local: Array, place: TokenContext):
        c, x = self.config, constrain_rows(x)
        attended, keys_values = Attention(c, name="attention")(norm(c, "attention_norm")(x), place, past, is_local)
        x = constrain_rows(x + (norm(c, "attention_post_norm")(attended) if c.post_norms else attended))
        feed_forward = Experts(c, name="experts") if c.num_experts else MLP(c, name="mlp")
        out = feed_forward(norm(c, "mlp_norm")(x))
        return x + (norm(c, "mlp_post_norm")(out) if c.post_norms else out), keys_values
