"""Scoring continuations that are there already: the log-probs that the sampler would have given them."""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp

from jaxpg.estimators import logprobs
from jaxpg.models import Model
from jaxpg.sampling import filters as filters_lib
from jaxpg.sampling.filters import Filter
from jaxpg.types import Array


def score(
    params,
    tokens: Array,
    token_mask: Array,
    *,
    model: Model,
    temperature: float = 1.0,
    filters: Sequence[Filter] = (),
    chunk: int | None = None,
) -> tuple[Array, Array]:
    """Computes the log-probs of given tokens (teacher forcing); carries gradient to params.

        y_t = log softmax(filters(logits_{t−1} / temperature))[tokens_t]

    This is what a trainer's policy uses for a policy that was sampled with filters. The logits [B, T, V] never exist.

    Args:
      params: the model's.
      tokens: [B, T] int32, prompts and completions.
      token_mask: [B, T] bool, real tokens.
      model: as in `sample`, as `temperature` (positive) and `filters`.
      chunk: positions a row whose logits are held at a time, as in `logprobs.from_hidden`.

    Returns:
      Log-probs [B, T] of the filtered and of the plain tempered distribution, float32, nats; index t speaks about
      tokens[:, t], index 0 is 0.
    """
    hidden = model.hidden(params, tokens, token_mask)
    unembed = partial(model.unembed, params)
    of_hidden = partial(logprobs.from_hidden, hidden=hidden, tokens=tokens, chunk=chunk, with_entropy=False)
    plain, _ = of_hidden(unembed, temperature=temperature)
    if not filters:
        return plain, plain
    first = None
    if filters_lib.needs_history(filters):
        first = _first_columns(tokens, token_mask, model.config.vocab_size)

    def adjust(logits, tokens, index):
        seen = None if first is None else first[:, None] < index[..., None]
        return filters_lib.apply(filters, logits, seen=seen, keep=tokens)

    return of_hidden(unembed, temperature=temperature, adjust=adjust)[0], plain


def _first_columns(tokens: Array, token_mask: Array, vocabulary: int) -> Array:
    """The column [B, V] in which each token first stands in each row, T if in none."""
    rows, length = tokens.shape
    columns = jnp.where(token_mask, jnp.arange(length), length)
    first = jnp.full((rows, vocabulary), length)
    return first.at[jnp.arange(rows)[:, None], tokens].min(columns)
