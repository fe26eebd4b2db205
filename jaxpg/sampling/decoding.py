"""The steps of sampling as pure functions of a state: start, draw, advance, respond.

All rows are fed at the same time, and a row that has ended is masked. A row's randomness is folded from the key, its
prompt and its sample number, and its count of tokens: it does not depend on which rows are beside it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpg.models import Cache, Model
from jaxpg.sampling import filters as filters_lib
from jaxpg.sampling import stop_strings
from jaxpg.sampling.draw import categorical, log_prob_of
from jaxpg.types import Array, Rollout, StopReason, pytree


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is compiled in."""

    model: Model
    temperature: float
    filters: tuple[filters_lib.Filter, ...]
    unroll: bool  # layer after layer in place of a scan over stacked layers
    some_greedy: bool = False  # are there rows that take the most likely token?
    has_minimum: bool = False  # must some row have more than one token?


@pytree
class Stops:
    """What ends a row."""

    tokens: Array  # [n] int32
    table: Array | None  # [states, V], of the stop strings' automaton


@pytree
class Rows:
    """What stays the same for each of R rows while it is sampled."""

    id: Array  # [R] int32, where the row is recorded; B for a row that only fills a shape
    key: Array  # [R] typed key
    limit: Array  # [R] int32, most new tokens
    least: Array  # [R] int32, fewest new tokens
    greedy: Array  # [R] bool, takes the most likely token


@pytree
class Record:
    """What all B rows have so far, N columns."""

    tokens: Array  # [B, N] int32
    log_probs: Array  # [B, N] float32
    plain_log_probs: Array  # [B, N] float32
    real: Array  # [B, N] bool, drawn or observed
    drawn: Array  # [B, N] bool
    stop_reason: Array  # [B] int32


@pytree
class State:
    """Sampling at one moment."""

    cache: Cache
    last: Array  # [R] int32, drawn and not yet in the cache
    running: Array  # [R] bool
    count: Array  # [R] int32, new tokens so far
    matched: Array  # [R] int32, state of the stop strings' automaton
    seen: Array | None  # [R, V] bool, tokens had, if a filter asks
    rows: Rows
    record: Record


def start(
    params,
    prompts: Array,
    prompt_mask: Array,
    rows: Rows,
    record: Record,
    stops: Stops,
    *,
    settings: Settings,
    slots: int,
) -> State:
    """Runs the prompts once and draws the first token of each row.

    Args:
      params: the model's.
      prompts: [P, S] int32.
      prompt_mask: [P, S] bool.
      rows: R of them, R / P adjacent ones share a prompt.
      record: with what the rows have already, if they are continued; the prompts then end with it.
      stops: what ends a row.
      settings: compiled in.
      slots: tokens that the cache has room for.
    """
    samples = rows.id.shape[0] // prompts.shape[0]
    logits, cache = settings.model.prefill(params, prompts, prompt_mask, samples_per_prompt=samples, slots=slots)
    if settings.unroll:
        cache = cache.split()
    count = record.real.sum(1, dtype=jnp.int32)
    matched = jnp.zeros_like(count)
    if stops.table is not None:
        matched = _match_all(stops.table, record.tokens, record.real)
    seen = None
    if filters_lib.needs_history(settings.filters):
        seen = filters_lib.mark(jnp.zeros(logits.shape, bool), prompts, prompt_mask).repeat(samples, axis=0)
    running = (record.stop_reason == StopReason.BUDGET) & (count < rows.limit)
    state = State(cache, jnp.zeros_like(count), running, count, matched, seen, rows, record)
    return draw(state, logits.repeat(samples, axis=0), stops, settings)


def draw(state: State, logits: Array, stops: Stops, settings: Settings) -> State:
    """Draws the next token of each running row from its logits [R, V] and records it."""
    rows, live = state.rows, state.running
    token, log_prob, plain = _pick(state, logits, stops, settings)
    count = state.count + live
    matched = state.matched
    if stops.table is not None:
        matched = jnp.where(live, stop_strings.advance(stops.table, matched, token), matched)
    enough = count >= rows.least
    stop_token = jnp.isin(token, stops.tokens) & enough
    ended_by_string = jnp.zeros_like(live)
    if stops.table is not None:
        ended_by_string = stop_strings.is_match(matched)
        matched = jnp.where(ended_by_string & ~enough, stop_strings.START, matched)
        ended_by_string &= enough
    reason = jnp.where(
        stop_token, StopReason.STOP_TOKEN, jnp.where(ended_by_string, StopReason.STOP_STRING, StopReason.BUDGET)
    )
    place = (jnp.where(live, rows.id, state.record.tokens.shape[0]), state.count)  # out of bounds: not written
    old = state.record
    record = Record(
        tokens=old.tokens.at[place].set(token, mode="drop"),
        log_probs=old.log_probs.at[place].set(log_prob, mode="drop"),
        plain_log_probs=old.plain_log_probs.at[place].set(plain, mode="drop"),
        real=old.real.at[place].set(True, mode="drop"),
        drawn=old.drawn.at[place].set(True, mode="drop"),
        stop_reason=old.stop_reason.at[place[0]].set(reason.astype(jnp.int32), mode="drop"),
    )
    return dataclasses.replace(
        state,
        last=jnp.where(live, token, state.last),
        running=live & (count < rows.limit) & ~(stop_token | ended_by_string),
        count=count,
        matched=matched,
        record=record,
    )


def _pick(state: State, logits: Array, stops: Stops, settings: Settings) -> tuple[Array, Array, Array]:
    """A token [R] int32 a row, its log-prob in the distribution it is drawn from, and in the plain tempered one."""
    plain = scores = logits / (settings.temperature or 1.0)
    if settings.has_minimum:  # before the fewest tokens are there, a stop token would end the row
        early = (state.count + 1 < state.rows.least)[:, None] & jnp.isin(jnp.arange(logits.shape[-1]), stops.tokens)
        scores = jnp.where(early, -jnp.inf, scores)
    scores = filters_lib.apply(settings.filters, scores, seen=state.seen)
    if not settings.temperature:
        token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return token, jnp.zeros(token.shape), log_prob_of(plain, token)
    token = categorical(fold(state.rows.key, state.count), scores)
    if settings.some_greedy:
        token = jnp.where(state.rows.greedy, jnp.argmax(scores, axis=-1).astype(jnp.int32), token)
    plain_log_prob = log_prob_of(plain, token)
    log_prob = plain_log_prob if scores is plain else log_prob_of(scores, token)
    return token, jnp.where(state.rows.greedy, 0.0, log_prob), plain_log_prob


def advance(params, state: State, until: Array, stops: Stops, *, settings: Settings) -> State:
    """Feeds and draws until no row runs or `until` slots of the cache are used (one `while_loop`).

    `params` must have been through `models.unstack` if `settings.unroll`.
    """

    def body(state: State) -> State:
        seen = state.seen
        if seen is not None:
            seen = filters_lib.mark(seen, state.last[:, None], state.running[:, None])
        logits, cache = settings.model.decode(params, state.last, state.cache, state.running)
        return draw(dataclasses.replace(state, cache=cache, seen=seen), logits, stops, settings)

    return jax.lax.while_loop(lambda s: (s.cache.length < until) & s.running.any(), body, state)


def respond(params, state: State, observed: Array, observed_mask: Array, stops: Stops, *, settings: Settings) -> State:
    """Feeds each row's pending token and what its environment answered, and draws the first token of its next turn.

    Args:
      params: the model's.
      state: whose rows have all ended their turn.
      observed: [R, M] int32, left-aligned; rows without any stay as they are.
      observed_mask: [R, M] bool.
      stops: what ends a turn.
      settings: compiled in.
    """
    answered = observed_mask.any(1)
    tokens = jnp.concatenate([state.last[:, None], observed], axis=1)
    mask = jnp.concatenate([answered[:, None], observed_mask], axis=1)
    hidden, cache = settings.model.extend(params, tokens, mask, state.cache)
    newest = observed_mask.sum(1)  # index of the last real one behind the pending token
    logits = settings.model.unembed(params, jnp.take_along_axis(hidden, newest[:, None, None], axis=1)[:, 0])
    columns = state.count[:, None] + jnp.arange(observed.shape[1])
    place = (jnp.where(observed_mask, state.rows.id[:, None], state.record.tokens.shape[0]), columns)
    record = dataclasses.replace(
        state.record,
        tokens=state.record.tokens.at[place].set(observed, mode="drop"),
        real=state.record.real.at[place].set(True, mode="drop"),
    )
    count = state.count + newest.astype(jnp.int32)
    state = dataclasses.replace(
        state,
        cache=cache,
        running=answered & (count < state.rows.limit),
        count=count,
        matched=jnp.where(answered, 0, state.matched),  # a stop string is the policy's own, within one turn
        seen=None if state.seen is None else filters_lib.mark(state.seen, tokens, mask),
        record=record,
    )
    return draw(state, logits, stops, settings)


def take(state: State, prompts: Array, rows: Array, used: Array) -> State:
    """Keeps these prompts and rows; a row that is not `used` only fills the shape."""
    picked = jax.tree.map(lambda x: x[rows], state.rows)
    return dataclasses.replace(
        state,
        cache=state.cache.take(prompts, rows),
        last=state.last[rows],
        running=state.running[rows] & used,
        count=state.count[rows],
        matched=state.matched[rows],
        seen=None if state.seen is None else state.seen[rows],
        rows=dataclasses.replace(picked, id=jnp.where(used, picked.id, state.record.tokens.shape[0])),
    )


def to_rollout(prompts: Array, prompt_mask: Array, record: Record) -> Rollout:
    """Puts what was recorded behind the prompts, repeated for each row."""
    samples = record.tokens.shape[0] // prompts.shape[0]
    prompts, prompt_mask = prompts.repeat(samples, axis=0), prompt_mask.repeat(samples, axis=0)
    nothing = jnp.zeros(prompts.shape, jnp.float32)

    def behind(front, back):
        return jnp.concatenate([front, back], axis=1)

    return Rollout(
        tokens=behind(prompts, record.tokens),
        token_mask=behind(prompt_mask, record.real),
        action_mask=behind(nothing.astype(bool), record.drawn),
        log_probs=behind(nothing, record.log_probs),
        stop_reason=record.stop_reason,
        plain_log_probs=behind(nothing, record.plain_log_probs),
    )


def _match_all(table: Array, tokens: Array, real: Array) -> Array:
    """Runs the automaton over tokens [B, N] that are there already."""

    def step(matched, column):
        token, is_real = column
        return jnp.where(is_real, stop_strings.advance(table, matched, token), matched), None

    return jax.lax.scan(step, jnp.zeros(tokens.shape[0], jnp.int32), (tokens.T, real.T))[0]


def empty_record(rows: int, columns: int) -> Record:
    """Nothing so far."""
    zeros = jnp.zeros((rows, columns), jnp.float32)
    masks = zeros.astype(bool)
    reason = jnp.full(rows, StopReason.BUDGET, jnp.int32)
    return Record(zeros.astype(jnp.int32), zeros, zeros, masks, masks, reason)


def fold(keys: Array, data: Array) -> Array:
    """Folds integers into keys, broadcasting both."""
    shape = jnp.broadcast_shapes(keys.shape, data.shape)
    flat = (jnp.broadcast_to(x, shape).reshape(-1) for x in (keys, data))
    return jax.vmap(jax.random.fold_in)(*flat).reshape(shape)
