"""Attention over a whole sequence, by three kernels with the same numbers, and over a cache."""

import dataclasses
import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpg.models.config import Config
from jaxpg.parallel.sharding import target_platform
from jaxpg.types import Array

SPLASH_BLOCKS = (512, 256, 128)  # splash attention works on blocks of so many tokens, the larger the faster


class Past(NamedTuple):
    """Earlier keys and values that new tokens may attend to."""

    keys: Array  # [b, K, D, S]; b divides the number of query rows, B/b adjacent rows share one entry
    values: Array  # [b, K, S, D]
    mask: Array  # [b, S] bool
    positions: Array  # [b, S] int32


def attend(
    config: Config, queries: Array, keys: Array, values: Array, positions, token_mask, is_local, documents=None
) -> Array:
    """Causal attention of a sequence to itself, through the kernel that `config.attention` names.

    Args:
      config: scale, softcap, window.
      queries: [B, T, H, D].
      keys: [B, T, K, D]; values alike.
      positions: [B, T] int32, counting real tokens.
      token_mask: [B, T] bool. A masked query sees only itself or other masked tokens: finite, meaningless.
      is_local: [] bool, whether this layer sees a window.
      documents: [B, T] int32, from 0: a token sees those of the same number; None: all of its row.

    Returns:
      [B, T, H, D].
    """
    if config.attention == "splash":
        return _splash(config, queries, keys, values, token_mask, is_local, documents)
    length = queries.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool)) & token_mask[:, None, :]
    if documents is not None:
        mask &= documents[:, None, :] == documents[:, :, None]
    if config.window is not None:
        mask &= _inside(config, positions[:, None, :], positions[:, :, None], is_local)
    # A masked query sees only itself: some key is always visible, so no softmax is over nothing.
    mask = (mask | jnp.eye(length, dtype=bool))[:, None]
    if config.attention_softcap is not None:
        return _with_softcap(config, queries, keys, values, mask)
    return jax.nn.dot_product_attention(
        queries, keys, values, mask=mask, scale=config.score_scale, implementation=config.attention
    )


def attend_past(config: Config, queries: Array, positions: Array, parts: Sequence[Past], is_local) -> Array:
    """Attends the newest tokens of each row to several caches under one softmax; causal by position.

    A part with b < B rows is read as it is stored: prompts are shared, never repeated per sample.

    Args:
      config: scale, softcap, window.
      queries: [B, M, H, D].
      positions: [B, M] int32, of the queries.
      parts: caches, the queries' own keys in one of them; together without an all-masked row.
      is_local: [] bool, whether this layer sees a window.

    Returns:
      [B, M, H, D].
    """
    tops, totals, outs = zip(*(_read(config, queries, positions, part, is_local) for part in parts), strict=True)
    top = reduce(jnp.maximum, tops)
    scales = [jnp.exp(own - top) for own in tops]
    total = sum(map(operator.mul, totals, scales))
    out = sum(map(operator.mul, outs, (scale[..., None] for scale in scales))) / total[..., None]
    rows, new, _, dim = queries.shape
    out = out.reshape(rows, out.shape[1], new, -1, dim).swapaxes(1, 2)  # [B, M, K, H/K, D]
    return out.reshape(queries.shape).astype(queries.dtype)


def _read(config: Config, queries: Array, positions: Array, part: Past, is_local) -> tuple[Array, Array, Array]:
    """One part's share of a softmax that runs over several (Milakov & Gimelshein 2018, section 3.1).

    Returns:
      m = max_s score and Σ_s exp(score − m), [B, K, M·H/K], and Σ_s exp(score − m)·value, [B, K, M·H/K, D]; float32.
    """
    (rows, new, heads, dim), (b, kv_heads, *_) = queries.shape, part.keys.shape
    group = (rows // b, new, heads // kv_heads)  # whatever meets the same keys
    grouped = queries.reshape(b, *group[:2], kv_heads, group[2], dim).transpose(0, 3, 1, 2, 4, 5)
    scores = jnp.einsum(
        "bkqd,bkds->bkqs", grouped.reshape(b, kv_heads, -1, dim), part.keys, preferred_element_type=jnp.float32
    )
    key_positions, query_positions = part.positions[:, None, :], positions.reshape(b, -1, 1)
    mask = part.mask[:, None, :] & (key_positions <= query_positions)  # [b, B/b·M, S]
    if config.window is not None:
        mask &= _inside(config, key_positions, query_positions, is_local)
    mask = jnp.repeat(mask, group[2], axis=1)[:, None]
    scores = jnp.where(mask, _cap(config, scores * config.score_scale), -jnp.inf)
    top = jnp.maximum(scores.max(-1), jnp.finfo(jnp.float32).min)  # finite where all is masked
    weights = jnp.exp(scores - top[..., None])
    out = jnp.einsum(
        "bkqs,bksd->bkqd", weights.astype(part.values.dtype), part.values, preferred_element_type=jnp.float32
    )

    def by_row(x):  # [b, K, B/b·M·H/K, ...] -> [B, K, M·H/K, ...]; the same where rows have caches of their own
        apart = x.reshape(b, kv_heads, group[0], -1, *x.shape[3:]).swapaxes(1, 2)
        return apart.reshape(rows, kv_heads, -1, *x.shape[3:])

    return by_row(top), by_row(weights.sum(-1)), by_row(out)


def _inside(config: Config, key_positions: Array, query_positions: Array, is_local) -> Array:
    """Whether a key lies in the query's window; always, for a layer that is not local."""
    return (key_positions > query_positions - config.window) | ~is_local


def _cap(config: Config, scores: Array) -> Array:
    cap = config.attention_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _with_softcap(config: Config, queries, keys, values, mask) -> Array:
    """Attention with capped scores, which `jax.nn.dot_product_attention` lacks (Gemma 2 report, section 2)."""
    rows, length, heads, dim = queries.shape
    grouped = queries.reshape(rows, length, keys.shape[2], -1, dim)
    scores = jnp.einsum("btkrd,bskd->bkrts", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, :, None], _cap(config, scores * config.score_scale), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkrts,bskd->btkrd", weights, values).reshape(rows, length, heads, dim)


def _splash(config: Config, queries, keys, values, token_mask, is_local, documents) -> Array:
    """Splash attention: block-sparse flash attention in Pallas, which never holds the [T, T] scores.

    Windows are counted in columns, so padding may stand left or right of a sequence, but not inside it.
    """
    length = queries.shape[1]
    pad = -length % min(SPLASH_BLOCKS)

    def prepare(x):  # [B, T, H, D] -> [B, H, T padded to whole blocks, D]
        return jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    own = token_mask if documents is None else jnp.where(token_mask, documents + 1, 0)
    segments = jnp.pad(own, ((0, 0), (0, pad))).astype(jnp.int32)
    arguments = (prepare(queries * jnp.asarray(config.score_scale, queries.dtype)), prepare(keys), prepare(values))

    def run(window):
        kernel = partial(_splash_kernel, config, window, interpret=target_platform() == "cpu")
        return _over_mesh(kernel)(*arguments, segments)

    if config.window is None or not any(config.locality):
        out = run(None)
    elif all(config.locality):
        out = run(config.window)
    else:
        out = jax.lax.cond(is_local, lambda: run(config.window), lambda: run(None))
    return out.transpose(0, 2, 1, 3)[:, :length]


def _splash_kernel(config: Config, window: int | None, queries, keys, values, segments, *, interpret: bool) -> Array:
    """One device's share: [b, h, T, D] each, segments [b, T]."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (queries.shape[2], queries.shape[2])
    block = next(size for size in SPLASH_BLOCKS if shape[0] % size == 0)
    names = [field.name for field in dataclasses.fields(splash.BlockSizes) if field.name.startswith("block_")]
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * queries.shape[1]),
        attn_logits_soft_cap=config.attention_softcap,
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        interpret=interpret,
    )
    return jax.vmap(kernel)(queries, keys, values, splash.SegmentIds(segments, segments))


def _over_mesh(kernel):
    """Runs a Pallas kernel, which XLA cannot partition, on each device's rows and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel
    rows = tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)
    heads = "tensor" if "tensor" in mesh.axis_names else None
    spec = PartitionSpec(rows, heads)
    return jax.shard_map(kernel, in_specs=(spec, spec, spec, PartitionSpec(rows)), out_specs=spec, check_vma=False)
