"""The KV cache: prompts stored once per prompt, completions once per sample."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpg.models.config import Config
from jaxpg.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of P shared prompts and of B = P·G completions, for L layers."""

    prompt_keys: Array  # [L, P, S, K, D]
    prompt_values: Array  # [L, P, S, K, D]
    prompt_mask: Array  # [P, S] bool
    keys: Array  # [L, B, N, K, D]
    values: Array  # [L, B, N, K, D]
    length: Array  # [] int32, how many of the N slots are filled

    @property
    def positions(self) -> Array:
        """[B] int32, the position of the token decoded next."""
        samples = self.keys.shape[1] // self.prompt_mask.shape[0]
        return jnp.repeat(self.prompt_mask.sum(-1, dtype=jnp.int32), samples) + self.length

    def append(self, keys: Array, values: Array) -> "Cache":
        """Writes one token's keys and values [L, B, 1, K, D] into the next slot."""
        start = (0, 0, self.length, 0, 0)
        return dataclasses.replace(
            self,
            keys=jax.lax.dynamic_update_slice(self.keys, keys.astype(self.keys.dtype), start),
            values=jax.lax.dynamic_update_slice(self.values, values.astype(self.values.dtype), start),
            length=self.length + 1,
        )


def start(config: Config, prompt_keys, prompt_values, prompt_mask, *, samples_per_prompt: int, slots: int) -> Cache:
    """Puts empty completion slots behind prefilled prompts.

    Args:
      config: the model's.
      prompt_keys: [L, P, S, K, D]; prompt_values alike.
      prompt_mask: [P, S] bool.
      samples_per_prompt: G, completions that share a prompt.
      slots: N, decode steps the cache has room for.
    """
    rows = prompt_mask.shape[0] * samples_per_prompt
    shape = (config.num_layers, rows, slots, config.num_kv_heads, config.head_dim)
    empty = jnp.zeros(shape, prompt_keys.dtype)
    return Cache(prompt_keys, prompt_values, prompt_mask, empty, empty, jnp.int32(0))
