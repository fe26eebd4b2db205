"""Segments: which action each token belongs to, as one integer array.

`segments [..., T]` numbers the actions of a row from 0; tokens of one action share a number. The same code
then works for the three decision processes: an action is a token, a reasoning step, or the whole response.
Positions outside the mask carry −1 here, and no function reads them.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.types import Array


def token(mask) -> Array:
    """Makes every token its own action (token-level MDP).

    Args:
      mask: [..., T] bool, action tokens.

    Returns:
      [..., T] int32: 0, 1, 2, ... over the True positions, −1 elsewhere.

    Raises:
      ValueError: if `mask` is not boolean, or T is 0.
    """
    mask = _mask(mask)
    return jnp.where(mask, jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, -1)


def response(mask) -> Array:
    """Makes the whole response one action (contextual bandit).

    Args:
      mask: [..., T] bool, action tokens.

    Returns:
      [..., T] int32: 0 at the True positions, −1 elsewhere.

    Raises:
      ValueError: if `mask` is not boolean, or T is 0.
    """
    return jnp.where(_mask(mask), 0, -1).astype(jnp.int32)


def steps(tokens, mask, *, delimiter: Sequence[int]) -> Array:
    """Cuts responses into reasoning steps at a delimiter (step-level MDP).

    A step ends with the delimiter, which belongs to it; a run of delimiters ends one step, not several. A
    token of the environment between two actions ends a step as well. A match that is not made of action
    tokens alone does not count.

    Args:
      tokens: [..., T] int, of any value outside the mask.
      mask: [..., T] bool, action tokens.
      delimiter: token ids that must follow each other, e.g. those of a blank line.

    Returns:
      [..., T] int32: 0, 1, 2, ... one number a step, −1 outside the mask.

    Raises:
      ValueError: if `mask` is not boolean, shapes differ, or `delimiter` is empty.
    """
    mask = _mask(mask)
    tokens = checks.integer("tokens", tokens, mask.shape)
    if len(delimiter) == 0:
        raise ValueError(f"delimiter={delimiter!r}: must hold a token id; use response() for no steps")
    matched = mask
    for offset, token_id in enumerate(reversed(delimiter)):
        matched = matched & _shift(mask & (tokens == token_id), offset)
    continued = jnp.zeros_like(mask)
    for offset in range(1, len(delimiter) + 1):
        continued = continued | _shift(matched, -offset)
    ends = (matched & ~continued) | (mask & ~_shift(mask, -1))
    before = jnp.cumsum(ends, axis=-1, dtype=jnp.int32) - ends
    return jnp.where(mask, before, -1)


def total(x, segments, mask) -> Array:
    """Adds up x over each segment and gives every token of it the sum.

        y_t = Σ_{u: segments_u = segments_t} x_u

    Args:
      x: [..., T]; carries gradient at True positions.
      segments: [..., T] int, 0 <= segments < T at True positions.
      mask: [..., T] bool.

    Returns:
      [..., T] float32, 0 outside the mask; NaN at a True position whose number is out of range.

    Raises:
      ValueError: if `mask` is not boolean, `segments` not integer, or shapes differ.
    """
    x, segments, mask = _arrays(x, segments, mask)
    length = x.shape[-1]
    flat_x = jnp.where(mask, x, 0.0).reshape(-1, length)
    # Out of range rather than counted from the end, so that a wrong number at a True position gives NaN.
    ids = jnp.where(segments < 0, length, segments).reshape(-1, length)
    sums = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=length))(flat_x, ids)
    spread = jnp.take_along_axis(sums, ids, axis=-1, mode="fill", fill_value=jnp.nan).reshape(x.shape)
    return jnp.where(mask, spread, 0.0)


def mean(x, segments, mask) -> Array:
    """Averages x over each segment and gives every token of it the mean.

        y_t = Σ_{u: segments_u = segments_t} x_u / |segment|

    Args:
      x: [..., T]; carries gradient at True positions.
      segments: [..., T] int, 0 <= segments < T at True positions.
      mask: [..., T] bool.

    Returns:
      [..., T] float32, 0 outside the mask.

    Raises:
      ValueError: if `mask` is not boolean, `segments` not integer, or shapes differ.
    """
    size = total(jnp.ones(jnp.shape(x), jnp.float32), segments, mask)
    return total(x, segments, mask) / jnp.maximum(size, 1.0)


def first(segments, mask) -> Array:
    """Marks the first token of each segment.

    Args:
      segments: [..., T] int, never falling along a row's True positions.
      mask: [..., T] bool.

    Returns:
      [..., T] bool.

    Raises:
      ValueError: if `mask` is not boolean, `segments` not integer, or shapes differ.
    """
    mask = _mask(mask)
    segments = checks.integer("segments", segments, mask.shape)
    seen = jax.lax.cummax(jnp.where(mask, segments, -1), axis=segments.ndim - 1)
    return mask & (segments > _shift(seen, 1, fill=-1))


def last(segments, mask) -> Array:
    """Marks the last token of each segment: the place of its reward.

    Args:
      segments: [..., T] int, never falling along a row's True positions.
      mask: [..., T] bool.

    Returns:
      [..., T] bool.

    Raises:
      ValueError: if `mask` is not boolean, `segments` not integer, or shapes differ.
    """
    mask = _mask(mask)
    segments = checks.integer("segments", segments, mask.shape)
    beyond = jnp.iinfo(segments.dtype).max
    ahead = jax.lax.cummin(jnp.where(mask, segments, beyond), axis=segments.ndim - 1, reverse=True)
    return mask & (segments < _shift(ahead, -1, fill=beyond))


def place_outcome(rewards, mask) -> Array:
    """Puts a response's reward on its last action token (its stop token, if it has one).

    Args:
      rewards: [...], one reward a row; carries gradient.
      mask: [..., T] bool, action tokens.

    Returns:
      [..., T] float32, 0 elsewhere; a row without action tokens has no place for its reward.

    Raises:
      ValueError: if `mask` is not boolean or `rewards` does not have its leading shape.
    """
    mask = _mask(mask)
    checks.shape("rewards", rewards, mask.shape[:-1], "one reward for each row of mask")
    return jnp.where(last(response(mask), mask), checks.as_float(rewards)[..., None], 0.0)


def place_steps(step_rewards, segments, mask) -> Array:
    """Puts each step's reward on the step's last token.

    Args:
      step_rewards: [..., S], reward of step s at index s; carries gradient. Entries of steps that a row does
        not have are not read; steps beyond S get 0.
      segments: [..., T] int, from `steps`.
      mask: [..., T] bool, action tokens.

    Returns:
      [..., T] float32, 0 elsewhere.

    Raises:
      ValueError: if `mask` is not boolean, `segments` not integer, or leading shapes differ.
    """
    mask = _mask(mask)
    segments = checks.integer("segments", segments, mask.shape)
    step_rewards = checks.as_float(step_rewards)
    checks.has_axis("step_rewards", step_rewards, "step")
    size = step_rewards.shape[-1]
    checks.shape("step_rewards", step_rewards, (*mask.shape[:-1], size), "one row for each row of mask")
    place = last(segments, mask) & (segments < size)
    return jnp.where(place, jnp.take_along_axis(step_rewards, jnp.clip(segments, 0, size - 1), axis=-1), 0.0)


def _mask(mask) -> Array:
    checks.has_axis("mask", mask, "token")
    return checks.boolean("mask", mask, jnp.shape(mask))


def _arrays(x, segments, mask) -> tuple[Array, Array, Array]:
    checks.has_axis("x", x, "token")
    dims = jnp.shape(x)
    return checks.as_float(x), checks.integer("segments", segments, dims), checks.boolean("mask", mask, dims)


def _shift(x: Array, offset: int, *, fill=0) -> Array:
    """Moves x along time: y_t = x_{t − offset}, `fill` where nothing arrives."""
    length = x.shape[-1]
    padding = jnp.full((*x.shape[:-1], min(abs(offset), length)), fill, x.dtype)
    if offset == 0:
        return x
    if offset > 0:
        return jnp.concatenate([padding, x[..., :-offset]], axis=-1)
    return jnp.concatenate([x[..., -offset:], padding], axis=-1)
