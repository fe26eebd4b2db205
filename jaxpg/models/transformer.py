"""The decoder-only Transformer in Flax Linen, and the functions the rest of the library sees of it."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpg.models import cache as cache_lib
from jaxpg.models.config import Config
from jaxpg.models.layers import Block, RMSNorm
from jaxpg.types import Array


class Transformer(nn.Module):
    """Embedding, scanned layers, final norm, tied or untied head."""

    config: Config

    def setup(self):
        c = self.config
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))
        block = nn.remat(Block, prevent_cse=False) if c.remat else Block
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.num_layers,
        )(c)
        self.final_norm = RMSNorm(c.norm_epsilon)
        if not c.tie_embeddings:
            self.head = self.param("head", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))

    def __call__(self, tokens: Array, positions: Array, mask: Array | None = None, past=(), past_masks=()):
        """Returns the final hidden states [B, N, E] and every layer's keys and values [L, B, N, K, D]."""
        x = self.embedding[tokens].astype(self.config.dtype)
        x, keys_values = self.layers(x, past, positions, mask, past_masks)
        return self.final_norm(x), keys_values

    def unembed(self, hidden: Array) -> Array:
        """Maps hidden states [..., E] to logits [..., V] in float32."""
        table = self.embedding if self.config.tie_embeddings else self.head
        return jnp.einsum("...e,ve->...v", hidden, table.astype(self.config.dtype), preferred_element_type=jnp.float32)

    def init_all(self, tokens: Array, positions: Array) -> Array:
        return self.unembed(self(tokens, positions)[0])


@dataclasses.dataclass(frozen=True)
class Model:
    """Pure functions of a parameter pytree; a static, hashable argument wherever it is passed."""

    config: Config

    @property
    def _module(self) -> Transformer:
        return Transformer(self.config)

    def init(self, key: Array) -> dict:
        """Draws float32 parameters as a plain nested dict."""
        dummy = jnp.zeros((1, 1), jnp.int32)
        return self._module.init(key, dummy, dummy, method="init_all")["params"]

    def hidden(self, params, tokens: Array, token_mask: Array) -> Array:
        """Runs the whole sequence; padding may stand anywhere.

        Args:
          params: from `init`.
          tokens: [B, T] int32.
          token_mask: [B, T] bool, real tokens. Positions count real tokens only.

        Returns:
          [B, T, E] in the compute dtype; at masked positions finite and meaningless.
        """
        hidden, _ = self._forward(params, tokens, token_mask)
        return hidden

    def unembed(self, params, hidden: Array) -> Array:
        """Maps hidden states [..., E] to next-token logits [..., V], float32."""
        return self._module.apply({"params": params}, hidden, method="unembed")

    def logits(self, params, tokens: Array, token_mask: Array) -> Array:
        """Next-token logits [B, T, V], float32; index t predicts token t + 1. Arguments as in `hidden`."""
        return self.unembed(params, self.hidden(params, tokens, token_mask))

    def prefill(self, params, prompts: Array, prompt_mask: Array, *, samples_per_prompt: int, slots: int):
        """Runs each prompt once and opens a cache for its samples.

        Args:
          params: from `init`.
          prompts: [P, S] int32.
          prompt_mask: [P, S] bool, padding anywhere, at least one real token a row.
          samples_per_prompt: G.
          slots: decode steps that the cache has room for.

        Returns:
          Next-token logits [P, V] float32 and a `Cache`.
        """
        hidden, (keys, values) = self._forward(params, prompts, prompt_mask)
        last = prompt_mask.shape[1] - 1 - jnp.argmax(prompt_mask[:, ::-1], axis=1)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        cache = cache_lib.start(
            self.config, keys, values, prompt_mask, samples_per_prompt=samples_per_prompt, slots=slots
        )
        return self.unembed(params, hidden), cache

    def decode(self, params, tokens: Array, cache: cache_lib.Cache):
        """Feeds one token a row.

        Args:
          params: from `init`.
          tokens: [B] int32.
          cache: with a free slot.

        Returns:
          Next-token logits [B, V] float32 and the cache with the tokens appended.
        """
        filled = jnp.arange(cache.keys.shape[2]) < cache.length
        past = ((cache.prompt_keys, cache.prompt_values), (cache.keys, cache.values))
        masks = (cache.prompt_mask, jnp.broadcast_to(filled, (tokens.shape[0], filled.shape[0])))
        hidden, (keys, values) = self._module.apply(
            {"params": params}, tokens[:, None], cache.positions[:, None], None, past, masks
        )
        return self.unembed(params, hidden[:, 0]), cache.append(keys, values)

    def _forward(self, params, tokens: Array, token_mask: Array):
        positions = jnp.maximum(jnp.cumsum(token_mask, axis=1, dtype=jnp.int32) - 1, 0)
        length = tokens.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        # A masked query sees only itself: some key is always visible, so no softmax is over nothing.
        mask = (causal & token_mask[:, None, :]) | jnp.eye(length, dtype=bool)
        return self._module.apply({"params": params}, tokens, positions, mask[:, None])


def num_parameters(params) -> int:
    """Counts the entries of a parameter pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
