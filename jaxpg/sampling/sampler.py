"""The rollout sampler: one prefill a prompt, then one `while_loop`, no Python per token."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.models import Cache, Model
from jaxpg.types import Array, Rollout, StopReason

Filter = Callable[[Array], Array]  # logits [B, V] -> logits [B, V], -inf where a token is ruled out


class _Decoding(NamedTuple):
    """What the loop carries: N = max_new_tokens columns, of which `step` are written."""

    step: Array  # [] int32
    tokens: Array  # [B, N] int32
    log_probs: Array  # [B, N] float32
    drawn: Array  # [B, N] bool, the policy drew this token
    running: Array  # [B] bool, no stop token yet
    cache: Cache


def sample(
    params,
    prompts: Array,
    prompt_mask: Array,
    key: Array,
    *,
    model: Model,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    samples_per_prompt: int = 1,
    temperature: float = 1.0,
    filters: Sequence[Filter] = (),
    prompt_ids: Array | None = None,
) -> Rollout:
    """Draws completions from the policy.

    Token t of sample g of prompt p is drawn with the key fold(key, prompt_ids[p], g, t), so a row does not depend
    on which other rows are in the batch, on their order, or on the mesh.

    Args:
      params: the model's parameters.
      prompts: [P, S] int32.
      prompt_mask: [P, S] bool; padding may stand on any side, each row needs one real token.
      key: a typed PRNG key.
      model: whose distribution to sample (static).
      max_new_tokens: N, the budget (static).
      stop_tokens: ids that end a row; may be empty (static).
      samples_per_prompt: G (static).
      temperature: divides the logits, which are then filtered; 0 takes the most likely token (static).
      filters: applied to the tempered logits in order (static).
      prompt_ids: [P] int32, which prompt each row is; default 0 … P−1.

    Returns:
      A Rollout of B = P·G rows and T = S + N columns; rows of one prompt are adjacent. `log_probs` are of the
      tempered and filtered distribution, float32, and 0 at temperature 0.

    Raises:
      ValueError: if an argument is out of range or the prompt and the budget exceed the model's `max_length`.
    """
    _check(prompts, prompt_mask, model, max_new_tokens, stop_tokens, samples_per_prompt, temperature, prompt_ids)
    num_prompts = prompts.shape[0]
    if prompt_ids is None:
        prompt_ids = jnp.arange(num_prompts)
    row_keys = _fold(_fold(key, prompt_ids)[:, None], jnp.arange(samples_per_prompt)[None]).reshape(-1)
    stops = jnp.asarray(tuple(stop_tokens), jnp.int32)

    # The last token drawn is never fed back, so the cache needs one slot less than the budget.
    slots = max(max_new_tokens - 1, 1)
    logits, cache = model.prefill(params, prompts, prompt_mask, samples_per_prompt=samples_per_prompt, slots=slots)
    logits = jnp.repeat(logits, samples_per_prompt, axis=0)
    rows = logits.shape[0]

    def record(state: _Decoding, logits: Array) -> _Decoding:
        token, log_prob = _draw(logits, _fold(row_keys, state.step), temperature, filters)
        column = (0, state.step)
        write = jax.lax.dynamic_update_slice
        return state._replace(
            step=state.step + 1,
            tokens=write(state.tokens, jnp.where(state.running, token, 0)[:, None], column),
            log_probs=write(state.log_probs, jnp.where(state.running, log_prob, 0.0)[:, None], column),
            drawn=write(state.drawn, state.running[:, None], column),
            running=state.running & ~jnp.isin(token, stops),
        )

    def extend(state: _Decoding) -> _Decoding:
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1, keepdims=False)
        logits, cache = model.decode(params, last, state.cache)
        return record(state._replace(cache=cache), logits)

    empty = jnp.zeros((rows, max_new_tokens), jnp.int32)
    state = _Decoding(jnp.int32(0), empty, empty.astype(jnp.float32), empty.astype(bool), jnp.ones(rows, bool), cache)
    state = record(state, logits)
    state = jax.lax.while_loop(lambda s: (s.step < max_new_tokens) & s.running.any(), extend, state)
    return _rollout(prompts, prompt_mask, state, samples_per_prompt)


def _draw(logits: Array, keys: Array, temperature: float, filters: Sequence[Filter]) -> tuple[Array, Array]:
    """Draws one token a row and its log-prob."""
    if temperature == 0.0:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32)
    logits = logits / temperature
    for apply_filter in filters:
        logits = apply_filter(logits)
    token = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return token, jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]


def _fold(keys: Array, data: Array) -> Array:
    """Folds integers into keys, broadcasting both."""
    shape = jnp.broadcast_shapes(keys.shape, data.shape)
    folded = jax.vmap(jax.random.fold_in)(
        jnp.broadcast_to(keys, shape).reshape(-1), jnp.broadcast_to(data, shape).reshape(-1)
    )
    return folded.reshape(shape)


def _rollout(prompts: Array, prompt_mask: Array, state: _Decoding, samples_per_prompt: int) -> Rollout:
    prompts = jnp.repeat(prompts, samples_per_prompt, axis=0)
    prompt_mask = jnp.repeat(prompt_mask, samples_per_prompt, axis=0)
    nothing = jnp.zeros_like(prompt_mask)
    return Rollout(
        tokens=jnp.concatenate([prompts, state.tokens], axis=1),
        token_mask=jnp.concatenate([prompt_mask, state.drawn], axis=1),
        action_mask=jnp.concatenate([nothing, state.drawn], axis=1),
        log_probs=jnp.concatenate([nothing.astype(jnp.float32), state.log_probs], axis=1),
        stop_reason=jnp.where(state.running, StopReason.BUDGET, StopReason.STOP_TOKEN).astype(jnp.int32),
    )


def _check(prompts, prompt_mask, model, max_new_tokens, stop_tokens, samples_per_prompt, temperature, prompt_ids):
    if prompts.ndim != 2 or prompts.shape != prompt_mask.shape:
        raise ValueError(f"prompts {prompts.shape} and prompt_mask {prompt_mask.shape}: both must be [prompts, length]")
    if prompt_mask.dtype != jnp.bool_:
        raise ValueError(f"prompt_mask has dtype {prompt_mask.dtype}: pass booleans, True at real tokens")
    if 0 in prompts.shape:
        raise ValueError(f"prompts has shape {prompts.shape}: pass at least one prompt of at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt={samples_per_prompt}: must be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be 0 (greedy) or positive")
    if prompt_ids is not None and prompt_ids.shape != prompts.shape[:1]:
        raise ValueError(f"prompt_ids has shape {prompt_ids.shape}: pass one id a prompt, {prompts.shape[:1]}")
    needed = prompts.shape[1] + max_new_tokens
    if needed > model.config.max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after prompts of length {prompts.shape[1]} needs {needed} positions, "
            f"the model has max_length={model.config.max_length}: shorten the prompts or the budget"
        )
    outside = [token for token in stop_tokens if not 0 <= token < model.config.vocab_size]
    if outside:
        raise ValueError(f"stop_tokens={outside}: not in a vocabulary of {model.config.vocab_size}")
