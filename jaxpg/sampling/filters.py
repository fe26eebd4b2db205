"""Filters: functions of the tempered logits that change the distribution a token is drawn from.

A filter maps logits [..., V] to logits [..., V], float32, -inf where it rules a token out. It works in the sampler and
in the trainer alike, on whatever leading axes. One that reads which tokens a row has had so far is a `History`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpg.types import Array

Filter = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the k most likely tokens; of equal ones the lower id (Fan 2018, section 5)."""

    k: int

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"k={self.k}: top-k keeps at least 1 token; leave the filter out to keep all")

    def __call__(self, logits: Array) -> Array:
        if self.k >= logits.shape[-1]:
            return logits
        chosen = jax.lax.top_k(logits, self.k)[1]
        kept = jnp.put_along_axis(jnp.zeros(logits.shape, bool), chosen, True, axis=-1, inplace=False)
        return jnp.where(kept, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class TopP:
    """Keeps the most likely tokens, as few as reach probability p together (Holtzman 2020, eq. 2)."""

    p: float

    def __post_init__(self):
        if not 0 < self.p <= 1:
            raise ValueError(f"p={self.p}: top-p keeps a probability in (0, 1]")

    def __call__(self, logits: Array) -> Array:
        if self.p == 1:
            return logits
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # of the more likely ones; 0 for the first, which always stays
        kept = jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, before < self.p, axis=-1, inplace=False)
        return jnp.where(kept, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class MinP:
    """Keeps tokens at least p times as likely as the most likely one (Nguyen 2024, section 3)."""

    p: float

    def __post_init__(self):
        if not 0 <= self.p <= 1:
            raise ValueError(f"p={self.p}: min-p is a share of the largest probability, in [0, 1]")

    def __call__(self, logits: Array) -> Array:
        if self.p == 0:
            return logits
        return jnp.where(logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(self.p), logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class LogitBias:
    """Adds a number to the tempered logits of some tokens."""

    biases: tuple[tuple[int, float], ...]  # (token, bias)

    def __call__(self, logits: Array) -> Array:
        _check_tokens("biases", [token for token, _ in self.biases], logits)
        tokens, biases = zip(*self.biases, strict=True)
        return logits.at[..., jnp.asarray(tokens)].add(jnp.asarray(biases, logits.dtype))


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Rules out all tokens but these."""

    tokens: tuple[int, ...]

    def __post_init__(self):
        if not self.tokens:
            raise ValueError("tokens=(): allow at least one token")

    def __call__(self, logits: Array) -> Array:
        _check_tokens("tokens", self.tokens, logits)
        kept = jnp.zeros(logits.shape[-1], bool).at[jnp.asarray(self.tokens)].set(True)
        return jnp.where(kept, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Rules out ids that the tokenizer lacks: a model's vocabulary is often padded to a round number of rows."""

    size: int  # of the tokenizer

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size={self.size}: a vocabulary has at least 1 token; pass the tokenizer's size")

    def __call__(self, logits: Array) -> Array:
        if self.size >= logits.shape[-1]:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.size, logits, -jnp.inf)


class History:
    """A filter that also reads which tokens the row has had so far, prompt included: `seen` [..., V] bool."""

    def __call__(self, logits: Array, seen: Array) -> Array:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty(History):
    """Divides positive and multiplies negative logits of tokens had before (Keskar 2019, section 4.1)."""

    penalty: float

    def __post_init__(self):
        if self.penalty <= 0:
            raise ValueError(f"penalty={self.penalty}: must be positive; above 1 discourages repetition")

    def __call__(self, logits: Array, seen: Array) -> Array:
        return jnp.where(seen, jnp.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


def needs_history(filters: Sequence[Filter]) -> bool:
    """Whether a filter reads which tokens a row has had."""
    return any(isinstance(apply_filter, History) for apply_filter in filters)


def apply(filters: Sequence[Filter], logits: Array, *, seen: Array | None = None, keep: Array | None = None) -> Array:
    """Applies filters in order.

    Args:
      filters: of tempered logits.
      logits: [..., V] float32.
      seen: [..., V] bool, tokens that the row has had; needed if `needs_history`.
      keep: [...] int32, the token that was drawn, when a drawn one is scored: it was not ruled out then, so it is not
        now, though rounding moves the border of top-p by one token.
    """
    filtered = logits
    for apply_filter in filters:
        filtered = apply_filter(filtered, seen) if isinstance(apply_filter, History) else apply_filter(filtered)
    if keep is None or not filters:
        return filtered
    drawn = jnp.arange(logits.shape[-1]) == keep[..., None]
    return jnp.where(drawn & (filtered == -jnp.inf), logits, filtered)


def mark(seen: Array, tokens: Array, real: Array) -> Array:
    """Adds tokens [..., M], where real, to what rows have had [..., V]."""
    rows = seen.reshape(-1, seen.shape[-1])
    tokens = jnp.where(real, tokens, seen.shape[-1]).reshape(rows.shape[0], -1)
    return rows.at[jnp.arange(rows.shape[0])[:, None], tokens].set(True, mode="drop").reshape(seen.shape)


def _check_tokens(name: str, tokens: Sequence[int], logits: Array):
    outside = [token for token in tokens if not 0 <= token < logits.shape[-1]]
    if outside or not tokens:
        raise ValueError(f"{name}: tokens {outside} are not in a vocabulary of {logits.shape[-1]}")
