"""The KV cache: prompts stored once per prompt, what follows them once per row."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpg.models.config import Config
from jaxpg.types import Array, pytree

Layers = Array | tuple[Array, ...]  # [L, ...], or L arrays


@pytree
class Cache:
    """Keys and values of P shared prompts and of R rows, for L layers; R / P adjacent rows share a prompt.

    All rows fill the same slot at the same time. A slot that a row does not use, because it has ended or waits, is
    masked for that row, and positions count real tokens only. Layers are stacked, for layers that are scanned, or a
    tuple, for layers that are unrolled (`split`).
    """

    prompt_keys: Layers  # [P, K, D, S] a layer: scores are sums over D, which a CPU adds up slot beside slot
    prompt_values: Layers  # [P, K, S, D]
    prompt_mask: Array  # [P, S] bool
    keys: Layers  # [R, K, D, N] a layer
    values: Layers  # [R, K, N, D]
    mask: Array  # [R, N] bool
    positions: Array  # [R, N] int32
    next_position: Array  # [R] int32
    length: Array  # [] int32, how many of the N slots are used

    @property
    def capacity(self) -> int:
        """N, how many slots there are."""
        return self.mask.shape[1]

    def reserve(self, token_mask: Array) -> tuple["Cache", Array]:
        """Makes the next M slots those of new tokens, which the layers `write`; token_mask [R, M] says which are real.

        Returns:
          The cache and the tokens' positions [R, M] int32.
        """
        positions = jnp.maximum(self.next_position[:, None] + jnp.cumsum(token_mask, 1, dtype=jnp.int32) - 1, 0)
        reserved = dataclasses.replace(
            self,
            mask=jax.lax.dynamic_update_slice_in_dim(self.mask, token_mask, self.length, 1),
            positions=jax.lax.dynamic_update_slice_in_dim(self.positions, positions, self.length, 1),
            next_position=self.next_position + token_mask.sum(1, dtype=jnp.int32),
            length=self.length + token_mask.shape[1],
        )
        return reserved, positions

    def split(self) -> "Cache":
        """The same cache with a tuple of layers."""
        names = ("prompt_keys", "prompt_values", "keys", "values")
        return dataclasses.replace(self, **{name: tuple(getattr(self, name)) for name in names})

    def grow(self, capacity: int) -> "Cache":
        """Adds empty slots up to a capacity."""
        more = capacity - self.capacity

        def pad(x, axis):
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, more)
            return jnp.pad(x, widths)

        return dataclasses.replace(
            self,
            keys=jax.tree.map(lambda x: pad(x, -1), self.keys),
            values=jax.tree.map(lambda x: pad(x, -2), self.values),
            mask=pad(self.mask, 1),
            positions=pad(self.positions, 1),
        )

    def take(self, prompts: Array, rows: Array) -> "Cache":
        """Keeps these prompts and these rows, in this order."""
        return Cache(
            prompt_keys=jax.tree.map(lambda x: x[..., prompts, :, :, :], self.prompt_keys),
            prompt_values=jax.tree.map(lambda x: x[..., prompts, :, :, :], self.prompt_values),
            prompt_mask=self.prompt_mask[prompts],
            keys=jax.tree.map(lambda x: x[..., rows, :, :, :], self.keys),
            values=jax.tree.map(lambda x: x[..., rows, :, :, :], self.values),
            mask=self.mask[rows],
            positions=self.positions[rows],
            next_position=self.next_position[rows],
            length=self.length,
        )


def write(keys: Array, values: Array, new_keys: Array, new_values: Array, slot: Array) -> tuple[Array, Array]:
    """Writes M tokens, [..., R, M, K, D], into the slots from `slot` on, of a layer or of all stacked layers."""
    new_keys, new_values = as_keys(new_keys).astype(keys.dtype), as_values(new_values).astype(values.dtype)
    return (
        jax.lax.dynamic_update_slice_in_dim(keys, new_keys, slot, -1),
        jax.lax.dynamic_update_slice_in_dim(values, new_values, slot, -2),
    )


def as_keys(new: Array) -> Array:
    """[..., M, K, D], as a layer returns keys, to [..., K, D, M]."""
    return jnp.moveaxis(new, -3, -1)


def as_values(new: Array) -> Array:
    """[..., M, K, D], as a layer returns values, to [..., K, M, D]."""
    return new.swapaxes(-3, -2)


def start(config: Config, prompt_keys, prompt_values, prompt_mask, *, samples_per_prompt: int, slots: int) -> Cache:
    """Puts empty slots behind prefilled prompts.

    Args:
      config: the model's.
      prompt_keys: [L, P, S, K, D] as the layers return them; prompt_values alike.
      prompt_mask: [P, S] bool.
      samples_per_prompt: G, rows that share a prompt.
      slots: N, tokens a row has room for.
    """
    rows = prompt_mask.shape[0] * samples_per_prompt
    shape = (config.num_layers, rows, config.num_kv_heads)
    return Cache(
        prompt_keys=as_keys(prompt_keys),
        prompt_values=as_values(prompt_values),
        prompt_mask=prompt_mask,
        keys=jnp.zeros((*shape, config.head_dim, slots), prompt_keys.dtype),
        values=jnp.zeros((*shape, slots, config.head_dim), prompt_values.dtype),
        mask=jnp.zeros((rows, slots), bool),
        positions=jnp.zeros((rows, slots), jnp.int32),
        next_position=jnp.repeat(prompt_mask.sum(-1, dtype=jnp.int32), samples_per_prompt),
        length=jnp.int32(0),
    )
