"""Drawing completions: `sample`, a pure function to jit."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpg.models import Model, unstack
from jaxpg.parallel.sharding import target_platform
from jaxpg.sampling import checks, decoding
from jaxpg.sampling.filters import Filter
from jaxpg.sampling.stop_strings import Automaton
from jaxpg.types import Array, Rollout


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
    stop_strings: Automaton | None = None,
    min_new_tokens: int | Array = 0,
    row_limits: Array | None = None,
    greedy: bool = False,
    continued: Rollout | None = None,
    unroll: bool | None = None,
) -> Rollout | tuple[Rollout, Rollout]:
    """Draws completions from the policy. Pure: jit it, with everything but arrays bound.

    Token t of sample g of prompt p is drawn with the key fold(key, prompt_ids[p], g, t), so a row does not depend on
    which other rows are in the batch, on their order, or on the mesh.

        rollout = jax.jit(partial(sample, model=model, max_new_tokens=64, stop_tokens=(1,)))(params, *prompts, key)

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
      filters: of `sampling.filters`, applied to the tempered logits in order (static).
      prompt_ids: [P] int32, which prompt each row is; default 0 … P−1.
      stop_strings: an `Automaton` of `sampling.stop_strings`: ends a row whose text contains one of its strings.
      min_new_tokens: an integer or [B] int32: before a row has as many, no stop token is drawn and no string ends it.
      row_limits: [B] int32, budgets of single rows, at most N.
      greedy: also return the most likely completion of each prompt, from the same prefill (ReMax; static).
      continued: a Rollout of these prompts, whose rows that were cut by their budget go on: the tokens are those that
        one longer call would have drawn. N counts their old tokens too.
      unroll: run decode steps layer after layer: up to 1.3 times as fast with a small model on a CPU, for a longer
        compilation and, during the call, a second copy of the parameters. False scans over stacked layers. Default:
        True except on TPUs, where unrolling is not expected to help (static).

    Returns:
      A Rollout of B = P·G rows and T = S + N columns; rows of one prompt are adjacent. `log_probs` are of the tempered
      and filtered distribution, `plain_log_probs` of the tempered one, float32; the former are 0 where the most likely
      token was taken. With `greedy` two Rollouts, the second of P rows.

    Raises:
      ValueError: if an argument is out of range or the prompt and the budget exceed the model's `max_length`.
    """
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
    arrays, stops = lay_out(request, prompts, prompt_mask, key)
    # The last token drawn is never fed back, so the cache needs one slot less than the budget.
    slots = max(max_new_tokens - 1, 1)
    state = decoding.start(params, *arrays, stops, settings=request.settings, slots=slots)
    if request.unroll:
        params = unstack(params, transpose=on_cpu())
    state = decoding.advance(params, state, slots, stops, settings=request.settings)
    return results(request, prompts, prompt_mask, state.record)


def on_cpu() -> bool:
    return target_platform() == "cpu"


def lay_out(request: checks.Request, prompts, prompt_mask, key):
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


def results(request: checks.Request, prompts, prompt_mask, record: decoding.Record):
    if not request.greedy:
        return decoding.to_rollout(prompts, prompt_mask, record)

    def part(index):
        own = jax.tree.map(lambda x: x.reshape(prompts.shape[0], -1, *x.shape[1:])[:, index], record)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)

    parts = (part(slice(0, -1)), part(slice(-1, None)))
    return tuple(decoding.to_rollout(prompts, prompt_mask, x) for x in parts)
