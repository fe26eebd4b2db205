"""Scoring continuations that are there already: the log-probs that the sampler would have given them."""

from collections.abc import Callable, Sequence
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

    The logits [B, T, V] never exist. `rollout.policies` trains with the same numbers.

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
    adjust = adjustment(filters, tokens, token_mask, vocabulary=model.config.vocab_size)
    return of_hidden(unembed, temperature=temperature, adjust=adjust)[0], plain


def adjustment(
    filters: Sequence[Filter], tokens: Array, token_mask: Array, *, vocabulary: int
) -> Callable[[Array, Array, Array], Array] | None:
    """Builds the `adjust` of `logprobs.from_hidden` that applies the sampler's filters.

    A token that was drawn keeps its logit, see `filters.apply`.

    Args:
      filters: of tempered logits; those that read a row's history included.
      tokens: [B, T] int32, prompts and completions.
      token_mask: [B, T] bool, real tokens.
      vocabulary: V, the columns of the logits.

    Returns:
      (tempered logits [B, chunk, V], their tokens [B, chunk], the columns these stand in [B, chunk]) -> logits; None
      without filters.
    """
    if not filters:
        return None
    first = _first_columns(tokens, token_mask, vocabulary) if filters_lib.needs_history(filters) else None

    def adjust(logits, tokens, index):
        seen = None if first is None else first[:, None] < index[..., None]
        return filters_lib.apply(filters, logits, seen=seen, keep=tokens)

    return adjust


def _first_columns(tokens: Array, token_mask: Array, vocabulary: int) -> Array:
    """The column [B, V] in which each token first stands in each row, T if in none."""
    rows, length = tokens.shape
    columns = jnp.where(token_mask, jnp.arange(length), length)
    first = jnp.full((rows, vocabulary), length)
    return first.at[jnp.arange(rows)[:, None], tokens].min(columns)
