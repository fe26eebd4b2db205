"""Drawing completions: `sample`, a pure function to jit, and `generate`, which pays for running rows only.

Both take the same arguments and draw the same tokens. `sample` is one program: a prefill and a `while_loop` over a
cache of its final size. `generate` calls compiled pieces from the host, a few dozen tokens at a time; in between the
cache grows, and once enough rows have ended the others move together into a smaller compiled shape.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import sharding
from jaxpg.sampling import checks, decoding
from jaxpg.types import Array, Rollout

Progress = Callable[[int, int], None]  # (rows that have ended, new tokens so far)


def sample(params, prompts: Array, prompt_mask: Array, key: Array, *, max_new_tokens: int, **options):
    """Draws completions from the policy. Pure: jit it, with everything but arrays bound.

    Token t of sample g of prompt p is drawn with the key fold(key, prompt_ids[p], g, t), so a row does not depend on
    which other rows are in the batch, on their order, or on the mesh.

        rollout = jax.jit(partial(sample, model=model, max_new_tokens=64, stop_tokens=(1,)))(params, *prompts, key)

    Args:
      params: the model's parameters.
      prompts: [P, S] int32.
      prompt_mask: [P, S] bool; padding may stand on any side, each row needs one real token.
      key: a typed PRNG key.
      max_new_tokens: N, the budget (static).
      model: whose distribution to sample (static).
      stop_tokens: ids that end a row; may be empty (static).
      samples_per_prompt: G (static).
      temperature: divides the logits, which are then filtered; 0 takes the most likely token (static).
      filters: of `sampling.filters`, applied to the tempered logits in order (static).
      prompt_ids: [P] int32, which prompt each row is; default 0 … P−1.
      stop_strings: an `Automaton` of `sampling.stop_strings`: ends a row whose text contains one of its strings.
      min_new_tokens: an integer or [B] int32: before a row has as many, no stop token is drawn and no string ends it.
      row_limits: [B] int32, budgets of single rows, at most N.
      greedy: also return the most likely completion of each prompt, from the same prefill (ReMax; static).
      continued: a Rollout of these prompts, whose rows that were cut by their budget go on: the tokens are those that
        one longer call would have drawn. N counts their old tokens too.

    Returns:
      A Rollout of B = P·G rows and T = S + N columns; rows of one prompt are adjacent. `log_probs` are of the tempered
      and filtered distribution, `plain_log_probs` of the tempered one, float32; the former are 0 where the most likely
      token was taken. With `greedy` two Rollouts, the second of P rows.

    Raises:
      ValueError: if an argument is out of range or the prompt and the budget exceed the model's `max_length`.
    """
    request = checks.request(prompts, prompt_mask, max_new_tokens=max_new_tokens, **options)
    arrays, stops = _lay_out(request, prompts, prompt_mask, key)
    # The last token drawn is never fed back, so the cache needs one slot less than the budget.
    slots = max(max_new_tokens - 1, 1)
    state = decoding.start(params, *arrays, stops, settings=request.settings, slots=slots)
    state = decoding.advance(params, state, slots, stops, settings=request.settings)
    return _results(request, prompts, prompt_mask, state.record)


def generate(
    params,
    prompts: Array,
    prompt_mask: Array,
    key: Array,
    *,
    max_new_tokens: int,
    block: int = 32,
    progress: Progress | None = None,
    **options,
):
    """Draws what `sample` draws, at a cost that follows the tokens drawn. Called from the host, not to be jitted.

    After each `block` tokens the host looks which rows still run, once for all of them. The cache grows by blocks, in
    steps of at most a half of its size, so that attention reads few empty slots. When the prompts that still run, times
    the most rows that one of them still runs, fit half of the present shape, the batch moves there: a long straggler
    is not paid for by all. Each of these few shapes is compiled once for a process.

    Args:
      block: tokens between two looks.
      progress: called at each look with the number of rows that have ended and of tokens drawn (`rich` bars).
      **options: and everything else as in `sample`.
    """
    checks.at_least("block", block, 1)
    request = checks.request(prompts, prompt_mask, max_new_tokens=max_new_tokens, **options)
    prompts, prompt_mask = jnp.asarray(prompts), jnp.asarray(prompt_mask)
    arrays, stops = _lay_out(request, prompts, prompt_mask, key)
    most = max(max_new_tokens - 1, 1)
    state = _start(params, *arrays, stops, settings=request.settings, slots=min(capacity(block, block), most))
    used = 0
    while True:
        used = min(used + block, most)
        if used > state.cache.capacity:
            state = _grow(state, min(capacity(used, block), most))
        state = _advance(params, state, used, stops, settings=request.settings)
        running, drawn = jax.device_get(_look(state))
        if progress is not None:
            progress(state.record.tokens.shape[0] - int(running.sum()), int(drawn))
        if not running.any():
            return _results(request, prompts, prompt_mask, state.record)
        state = _compact(state, running)


def capacity(slots: int, block: int) -> int:
    """The smallest cache of block · {1, 2, 3, 4, 6, 8, 12, 16, …} slots that holds so many."""
    blocks = -(-slots // block)
    power = 2 ** math.floor(math.log2(blocks))
    return block * next(size for size in (power, power * 3 // 2, power * 2) if size >= blocks)


def _lay_out(request: checks.Request, prompts, prompt_mask, key):
    """The arguments of `decoding.start`: contexts, rows and record; and what ends a row."""
    num_prompts, extra = prompts.shape[0], int(request.greedy)
    per_prompt = request.samples_per_prompt + extra
    ids = jnp.arange(num_prompts) if request.prompt_ids is None else jnp.asarray(request.prompt_ids)
    total = num_prompts * per_prompt
    sample_number = jnp.broadcast_to(jnp.arange(per_prompt), (num_prompts, per_prompt))

    def per_row(values, beside):  # [B] or a number -> [R], with another value for each prompt's greedy row
        values = jnp.broadcast_to(jnp.asarray(values, jnp.int32), (num_prompts * request.samples_per_prompt,))
        values = values.reshape(num_prompts, -1)
        return jnp.pad(values, ((0, 0), (0, extra)), constant_values=beside).reshape(-1)

    limits = request.max_new_tokens if request.row_limits is None else request.row_limits
    least = request.min_new_tokens
    rows = decoding.Rows(
        id=jnp.arange(total, dtype=jnp.int32),
        key=decoding.fold(decoding.fold(key, ids)[:, None], sample_number).reshape(-1),
        limit=per_row(limits, request.max_new_tokens),
        least=per_row(least, least if isinstance(least, int) else 0),
        greedy=(sample_number == request.samples_per_prompt).reshape(-1),
    )
    record = decoding.empty_record(total, request.max_new_tokens)
    table = None if request.stop_strings is None else jnp.asarray(request.stop_strings.table)
    stops = decoding.Stops(jnp.asarray(tuple(request.stop_tokens), jnp.int32), table)
    if request.continued is None:
        return (prompts, prompt_mask, rows, record), stops
    # Rows of one prompt differ behind it, so each brings its own context.
    record = _record_of(request.continued, prompts.shape[1], request.max_new_tokens)
    context = jnp.concatenate([prompts.repeat(per_prompt, axis=0), record.tokens], axis=1)
    context_mask = jnp.concatenate([prompt_mask.repeat(per_prompt, axis=0), record.real], axis=1)
    return (context, context_mask, rows, record), stops


def _record_of(rollout: Rollout, prompt_length: int, columns: int) -> decoding.Record:
    """What an earlier call recorded, with room for more."""

    def cut(x):
        x = x[:, prompt_length:]
        return jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))

    return decoding.Record(
        tokens=cut(rollout.tokens),
        log_probs=cut(rollout.log_probs),
        plain_log_probs=cut(rollout.plain_log_probs),
        real=cut(rollout.token_mask),
        drawn=cut(rollout.action_mask),
        stop_reason=rollout.stop_reason,
    )


def _results(request: checks.Request, prompts, prompt_mask, record: decoding.Record):
    if not request.greedy:
        return decoding.to_rollout(prompts, prompt_mask, record)

    def part(index):
        own = jax.tree.map(lambda x: x.reshape(prompts.shape[0], -1, *x.shape[1:])[:, index], record)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)

    parts = (part(slice(0, -1)), part(slice(-1, None)))
    return tuple(decoding.to_rollout(prompts, prompt_mask, x) for x in parts)


_start = jax.jit(decoding.start, static_argnames=("settings", "slots"))
_advance = jax.jit(decoding.advance, static_argnames="settings", donate_argnames="state")
_take = jax.jit(decoding.take, donate_argnames="state")


@partial(jax.jit, static_argnames="slots", donate_argnames="state")
def _grow(state: decoding.State, slots: int) -> decoding.State:
    return dataclasses.replace(state, cache=state.cache.grow(slots))


@jax.jit
def _look(state: decoding.State):
    """Which rows run, and how many tokens are drawn, whole on every process."""
    looked = (state.running, state.record.drawn.sum())
    mesh = jax.sharding.get_abstract_mesh()
    return looked if mesh.empty else jax.lax.with_sharding_constraint(looked, jax.sharding.PartitionSpec())


def _compact(state: decoding.State, running: np.ndarray) -> decoding.State:
    """Moves the running rows into a smaller shape, if they fit half of the present one."""
    num_prompts = state.cache.prompt_mask.shape[0]
    grid = running.reshape(num_prompts, -1)
    shards = sharding.row_shards(jax.sharding.get_abstract_mesh())
    prompts = _smaller(num_prompts, int(grid.any(1).sum()), shards)
    samples = _smaller(grid.shape[1], int(grid.sum(1).max()), 1)
    if prompts * samples * 2 > grid.size:
        return state
    # Running prompts first, and in each its running rows first; `stable` keeps the order of both.
    kept = np.argsort(~grid.any(1), stable=True)[:prompts]
    columns = np.argsort(~grid[kept], axis=1, stable=True)[:, :samples]
    rows = (kept[:, None] * grid.shape[1] + columns).reshape(-1)
    return _take(state, kept, rows, running[rows])


def _smaller(size: int, needed: int, multiple: int) -> int:
    """The size halved as often as what is needed still fits, a multiple of the devices that share it."""
    while size % (2 * multiple) == 0 and size // 2 >= max(needed, 1):
        size //= 2
    return size
