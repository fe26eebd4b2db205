"""Sampling driven from the host, a few dozen tokens at a time: `generate`, which pays for running rows only.

It calls compiled pieces. In between the cache grows, and once enough rows have ended the others move together into a
smaller compiled shape. The tokens are those of `sample`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.models import Model, unstack
from jaxpg.parallel import sharding
from jaxpg.sampling import checks, decoding
from jaxpg.sampling.filters import Filter
from jaxpg.sampling.sampler import lay_out, on_cpu, results
from jaxpg.sampling.stop_strings import Automaton
from jaxpg.types import Array, Rollout, pytree

Progress = Callable[[int, int], None]  # (rows that have ended, new tokens so far)


def generate(
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
    stop_strings: Automaton | None = None,
    min_new_tokens: int | Array = 0,
    row_limits: Array | None = None,
    greedy: bool = False,
    continued: Rollout | None = None,
    unroll: bool | None = None,
    block: int = 32,
    progress: Progress | None = None,
) -> Rollout | tuple[Rollout, Rollout]:
    """Draws what `sample` draws, at a cost that follows the tokens drawn. Called from the host, not to be jitted.

    After each `block` tokens the host looks which rows still run, once for all of them. The cache grows by blocks, in
    steps of at most a half of its size, so that attention reads few empty slots. When the prompts that still run, times
    the most rows that one of them still runs, fit half of the present shape, the batch moves there: a long straggler
    is not paid for by all. Each of these few shapes is compiled once for a process.

    Args:
      params: the model's, or what `prepare` made of them.
      block: tokens between two looks.
      progress: called at each look with the number of rows that have ended and of tokens drawn (`rich` bars).
      prompts: as in `sample`, and so is every other argument.
    """
    checks.at_least("block", block, 1)
    request = checks.Request(
        model=model,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        filters=filters,
        prompt_ids=prompt_ids,
        stop_strings=stop_strings,
        min_new_tokens=min_new_tokens,
        row_limits=row_limits,
        greedy=greedy,
        continued=continued,
        unroll=unroll,
    )
    request = checks.check(request, prompts, prompt_mask)
    prompts, prompt_mask = jnp.asarray(prompts), jnp.asarray(prompt_mask)
    arrays, stops = lay_out(request, prompts, prompt_mask, key)
    most = max(max_new_tokens - 1, 1)  # the last token drawn is never fed back
    params, apart = layouts(params, request)
    state = start(params, *arrays, stops, settings=request.settings, slots=min(block, most))
    state = run_out(
        apart,
        state,
        stops,
        settings=request.settings,
        block=block,
        most=most,
        progress=progress,
        compact=True,
    )
    return results(request, prompts, prompt_mask, state.record)


@pytree
class Prepared:
    """A model's parameters in two layouts, accepted by `generate` and `converse` in place of parameters."""

    params: dict  # layers stacked, for prompts
    apart: dict | None  # a layer beside the other, for decode steps, where these are unrolled by default


def prepare(params) -> Prepared:
    """Lays out parameters for several calls with the same ones; otherwise each call copies the layers.

    Where decode steps scan over the stacked layers by default, on TPUs, nothing is copied.
    """
    return Prepared(params, _apart(params) if checks.unrolls_by_default() else None)


def _apart(params) -> dict:
    return unstack(params, transpose=on_cpu())


def layouts(params, request: checks.Request):
    """The parameters as prompts and as decode steps want them."""
    params, apart = (params.params, params.apart) if isinstance(params, Prepared) else (params, None)
    if not request.unroll:
        return params, params
    return params, _apart(params) if apart is None else apart


def run_out(
    params,
    state: decoding.State,
    stops: decoding.Stops,
    *,
    settings: decoding.Settings,
    block: int,
    most: int | None = None,
    progress: Progress | None = None,
    compact: bool = False,
) -> decoding.State:
    """Advances until no row runs.

    Args:
      params: the model's.
      state: from `decoding.start`.
      stops: what ends a row.
      settings: compiled in.
      block: tokens between two looks.
      most: slots that are ever needed.
      progress: as of `generate`.
      compact: may rows that have ended be left behind? Their record stays.
    """
    used = int(state.cache.length)
    while True:
        running, drawn = jax.device_get(_look(state))
        if progress is not None:
            progress(state.record.tokens.shape[0] - int(running.sum()), int(drawn))
        if not running.any():
            return state
        if compact:
            state = compacted(state, running)
        used = used + block if most is None else min(used + block, most)
        state = _advance(params, grown(state, used, block, most), used, stops, settings=settings)


def grown(state: decoding.State, slots: int, block: int, most: int | None = None) -> decoding.State:
    """The state with room for so many slots."""
    if slots <= state.cache.capacity:
        return state
    size = capacity(slots, block)
    return _grow(state, size if most is None else min(size, most))


def capacity(slots: int, block: int) -> int:
    """The smallest cache of block · {1, 2, 3, 4, 6, 8, 12, 16, …} slots that holds so many."""
    blocks = -(-slots // block)
    power = 2 ** math.floor(math.log2(blocks))
    return block * next(size for size in (power, power * 3 // 2, power * 2) if size >= blocks)


start = jax.jit(decoding.start, static_argnames=("settings", "slots"))
_advance = jax.jit(decoding.advance, static_argnames="settings", donate_argnames="state")
_take = jax.jit(decoding.take)


@partial(jax.jit, static_argnames="slots")
def _grow(state: decoding.State, slots: int) -> decoding.State:
    return dataclasses.replace(state, cache=state.cache.grow(slots))


@jax.jit
def _look(state: decoding.State):
    """Which rows run, and how many tokens are drawn, whole on every process."""
    looked = (state.running, state.record.drawn.sum())
    mesh = jax.sharding.get_abstract_mesh()
    return looked if mesh.empty else jax.lax.with_sharding_constraint(looked, jax.sharding.PartitionSpec())


def compacted(state: decoding.State, running: np.ndarray) -> decoding.State:
    """Moves the running rows into a smaller shape, if they fit half of the present one."""
    num_prompts = state.cache.prompt_mask.shape[0]
    grid = running.reshape(num_prompts, -1)
    mesh = jax.sharding.get_abstract_mesh()
    shards = 1 if mesh.empty else sharding.row_shards(mesh)
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
