"""The decoder-only Transformer in Flax Linen, and the functions the rest of the library sees of it."""

import dataclasses
import math
import operator
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpg.models import cache as cache_lib
from jaxpg.models.config import Config
from jaxpg.models.layers import Block, TokenContext, norm, skinny_matmul, transposed
from jaxpg.parallel.sharding import constrain, constrain_rows
from jaxpg.types import Array


class Transformer(nn.Module):
    """Embedding, scanned layers, final norm, tied or untied head."""

    config: Config

    def setup(self):
        c = self.config
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))
        policy = getattr(jax.checkpoint_policies, c.remat_policy)
        block = nn.remat(Block, prevent_cse=False, policy=policy) if c.remat else Block
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast),
            length=c.num_layers,
        )(c)
        self.final_norm = norm(c, "final_norm")
        if not c.tie_embeddings:
            self.head = self.param("head", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))

    def __call__(self, tokens: Array, place: TokenContext, past=()):
        """Returns the final hidden states [B, N, E] and the keys and values of the tokens [L, B, N, K, D]."""
        x = self.embed(tokens)
        x, keys_values = self.layers(x, past, jnp.asarray(self.config.locality), place)
        return self.finish(x), keys_values

    def finish(self, x: Array) -> Array:
        return self.final_norm(x)

    def embed(self, tokens: Array) -> Array:
        c = self.config
        # Gathered over fsdp for the look-up, cut along features over tensor; then rows are spread, as everywhere.
        x = constrain_rows(constrain(self.embedding.astype(c.dtype), None, "tensor")[tokens])
        return x if c.embedding_scale == 1 else x * jnp.asarray(c.embedding_scale, c.dtype)

    def unembed(self, hidden: Array) -> Array:
        """Maps hidden states [..., E] to logits [..., V] in float32."""
        c = self.config
        if self.has_variable("params", transposed("head")):
            table = self.get_variable("params", transposed("head")).astype(c.dtype)
            (logits,) = skinny_matmul(hidden, table, dtype=jnp.float32)
        else:
            table = (self.embedding if c.tie_embeddings else self.head).astype(c.dtype)
            # Whole features: over tensor the logits are cut along the vocabulary, and not added up. Gathered over fsdp,
            # then exchanged over tensor: in one go XLA would make the whole table on every device.
            table, hidden = constrain(constrain(table, None, "tensor"), "tensor"), constrain_rows(hidden)
            logits = jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32)
            leading = [("data", "fsdp"), *[None] * hidden.ndim][: hidden.ndim - 1]
            logits = constrain(logits, *leading, "tensor")
        return logits if c.final_softcap is None else c.final_softcap * jnp.tanh(logits / c.final_softcap)

    def init_all(self, tokens: Array) -> Array:
        return self.unembed(self(tokens, TokenContext(jnp.zeros_like(tokens), jnp.ones_like(tokens, bool)))[0])


@dataclasses.dataclass(frozen=True)
class Model:
    """Pure functions of a parameter pytree; a static, hashable argument wherever it is passed."""

    config: Config

    @property
    def _module(self) -> Transformer:
        return Transformer(self.config)

    def init(self, key: Array) -> dict:
        """Draws float32 parameters as a plain nested dict."""
        return _init(self, key)

    def hidden(self, params, tokens: Array, token_mask: Array, documents: Array | None = None) -> Array:
        """Runs the whole sequence; padding may stand anywhere.

        Args:
          params: from `init`.
          tokens: [B, T] int32.
          token_mask: [B, T] bool, real tokens. Positions count real tokens only.
          documents: [B, T] int32, from 0, where rows hold several (`data.pack`): adjacent tokens with the same number
            are a document. Tokens see their own one alone, and positions restart with each. Nothing predicts the first
            token of a document: what stands at the index before it speaks about the document before.

        Returns:
          [B, T, E] in the compute dtype. A masked position repeats the last real token before it, so that index t − 1
          speaks about the token at t wherever padding stands; in front of a row's first token it means nothing.
        """
        latest = jax.lax.cummax(jnp.where(token_mask, jnp.arange(tokens.shape[1]), 0), axis=1)
        if documents is not None:  # padding belongs to the document before it
            documents = jnp.take_along_axis(documents, latest, axis=1)
        hidden, _ = self._forward(params, tokens, token_mask, documents)
        return jnp.take_along_axis(hidden, latest[..., None], axis=1)

    def unembed(self, params, hidden: Array) -> Array:
        """Maps hidden states [..., E] to next-token logits [..., V], float32."""
        return self._module.apply(_variables(params), hidden, method="unembed")

    def logits(self, params, tokens: Array, token_mask: Array, documents: Array | None = None) -> Array:
        """Next-token logits [B, T, V], float32; index t predicts token t + 1. Arguments as in `hidden`."""
        return self.unembed(params, self.hidden(params, tokens, token_mask, documents))

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

    def extend(self, params, tokens: Array, token_mask: Array, cache: cache_lib.Cache):
        """Feeds the next tokens of each row.

        Args:
          params: from `init`, or with layers that `unstack` took apart; the cache must be split alike.
          tokens: [R, M] int32.
          token_mask: [R, M] bool, real tokens.
          cache: with M free slots.

        Returns:
          Final hidden states [R, M, E] and the cache with the tokens appended.
        """
        before, (cache, positions) = cache, cache.reserve(token_mask)
        past = ((cache.prompt_keys, cache.prompt_values), (cache.keys, cache.values))
        shared = count(cache.prompt_mask)
        if isinstance(params["layers"], tuple):
            # Each layer writes before it reads: a loop whose steps read the old cache would copy it on a CPU.
            masks, places = (cache.prompt_mask, cache.mask), (shared, cache.positions)
            place = TokenContext(positions, token_mask, masks, places, slot=before.length)
            hidden, (keys, values) = self._unrolled(params, tokens, place, past)
        else:
            # What a scan writes it copies, each layer's cache out and back: all layers are written together after it.
            masks, places = (cache.prompt_mask, before.mask, token_mask), (shared, before.positions, positions)
            hidden, new = self._scanned(params, tokens, TokenContext(positions, token_mask, masks, places), past)
            keys, values = cache_lib.write(cache.keys, cache.values, *new, before.length)
        return hidden, dataclasses.replace(cache, keys=keys, values=values)

    def decode(self, params, tokens: Array, cache: cache_lib.Cache, token_mask: Array | None = None):
        """Feeds one token a row.

        Args:
          params: from `init`.
          tokens: [R] int32.
          cache: with a free slot.
          token_mask: [R] bool, rows that go on; default all. The others' logits mean nothing.

        Returns:
          Next-token logits [R, V] float32 and the cache with the tokens appended.
        """
        token_mask = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
        hidden, cache = self.extend(params, tokens[:, None], token_mask[:, None], cache)
        return self.unembed(params, hidden[:, 0]), cache

    def _forward(self, params, tokens: Array, token_mask: Array, documents: Array | None = None):
        place = TokenContext(count(token_mask, documents), token_mask, documents=documents)
        return self._scanned(params, tokens, place)

    def _scanned(self, params, tokens: Array, place: TokenContext, past=()):
        return self._module.apply(_variables(params), tokens, place, past)

    def _unrolled(self, params, tokens: Array, place: TokenContext, past):
        """Layer after layer. In a loop over steps on a CPU, a scan would copy each layer's weights before use."""
        c, outside = self.config, {name: value for name, value in params.items() if name not in ("layers", "lora")}
        x = self._module.apply({"params": outside}, tokens, method="embed")
        adapters = params.get("lora", {}).get("layers", [None] * c.num_layers)
        new = []
        for i, (layer, adapter) in enumerate(zip(params["layers"], adapters, strict=True)):
            variables = {"params": layer} if adapter is None else {"params": layer, "lora": adapter}
            own = tuple((keys[i], values[i]) for keys, values in past)
            x, keys_values = Block(c).apply(variables, x, own, jnp.asarray(c.locality[i]), place)
            new.append(keys_values)
        return self._module.apply({"params": outside}, x, method="finish"), tuple(zip(*new, strict=True))


@partial(jax.jit, static_argnums=0)  # compiled once for a configuration, not operation by operation at each call
def _init(model: Model, key: Array) -> dict:
    dummy = jnp.zeros((1, 1), jnp.int32)
    plain = Model(dataclasses.replace(model.config, attention="xla"))  # one row cannot be spread over a mesh
    return plain._module.init(key, dummy, method="init_all")["params"]


INPUT_AXES = {"query": 1, "key": 1, "value": 1, "out": 2, "gate": 1, "up": 1, "down": 1}  # of projections
TOGETHER = (("query", "key", "value"), ("out",), ("gate", "up"), ("down",))  # which of them have the same input


def unstack(params: dict, *, transpose: bool = False) -> dict:
    """Takes the stacked layers of parameters (and of adapters) apart into tuples, for decoding: a copy of them.

    Args:
      params: from `init`.
      transpose: store projections [out, in], those of the same input as one, which is faster on CPUs
        (`layers.skinny_matmul`).
    """
    taken = params | {"layers": _split(params["layers"], transpose)}
    if "lora" in params:
        taken["lora"] = params["lora"] | {"layers": _split(params["lora"]["layers"], False)}
    if transpose:
        taken[transposed("head")] = params.get("head", params["embedding"])
    return taken


@partial(jax.jit, static_argnums=1)
def _split(tree: dict, transpose: bool) -> tuple[dict, ...]:
    size = jax.tree.leaves(tree)[0].shape[0]
    layers = tuple(jax.tree.map(operator.itemgetter(i), tree) for i in range(size))
    if not transpose:
        return layers
    return tuple({name: _transpose(part) for name, part in layer.items()} for layer in layers)


def _transpose(part: dict) -> dict:
    """The projections of an attention or an MLP; experts, whose kernels have an axis more, stay as they are."""
    if "router" in part:
        return part
    groups = [names for names in TOGETHER if names[0] in part]
    turned = {
        transposed(*names): jnp.concatenate([_as_matrix(part[name], INPUT_AXES[name]).T for name in names])
        for names in groups
    }
    return {name: value for name, value in part.items() if name not in INPUT_AXES} | turned


def _as_matrix(kernel: Array, inputs: int) -> Array:
    """A kernel [in..., out...] as [in, out]."""
    return kernel.reshape(math.prod(kernel.shape[:inputs]), -1)


def count(token_mask: Array, documents: Array | None = None) -> Array:
    """Positions [B, T] int32 of the real tokens: 0 for the first of a row, or of each document in it."""
    through = jnp.cumsum(token_mask, axis=1, dtype=jnp.int32)
    if documents is None:
        return jnp.maximum(through - 1, 0)
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    before = jax.lax.cummax(jnp.where(begins, through - token_mask, 0), axis=1)
    return jnp.maximum(through - 1 - before, 0)


def _variables(params: dict) -> dict:
    """Splits parameters into Flax collections: the model's own, and adapters if there are any."""
    own = {name: value for name, value in params.items() if name != "lora"}
    return {"params": own, "lora": params["lora"]} if "lora" in params else {"params": own}


def num_parameters(params) -> int:
    """Counts the entries of a parameter pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
