"""Conversations with environments: tokens in, tokens out, the cache kept from turn to turn.

An environment runs on the host. It is told the tokens of a turn and answers with tokens, which the policy then reads;
nothing is ever turned into text and tokenized again on the way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.sampling import checks, decoding
from jaxpg.sampling.driver import apart, compacted, grown, run_out, start
from jaxpg.sampling.sampler import lay_out, results
from jaxpg.types import Array, Rollout

# (state, the turn's tokens) -> (state, observation tokens, reward, done)
Environment = Callable[[object, Sequence[int]], tuple[object, Sequence[int], float, bool]]

respond = jax.jit(decoding.respond, static_argnames="settings", donate_argnames="state")


class Conversation(NamedTuple):
    """What `converse` returns."""

    rollout: Rollout  # observations are real tokens but no actions
    token_rewards: Array  # [B, T] float32, a turn's reward on its last token
    turns: np.ndarray  # [B] int, turns taken
    states: list  # B last states of the environment


def converse(
    params,
    prompts: Array,
    prompt_mask: Array,
    key: Array,
    *,
    environment: Environment,
    states: Sequence,
    max_turns: int,
    max_new_tokens: int,
    block: int = 32,
    **options,
) -> Conversation:
    """Lets the policy take turns with an environment. Called from the host.

    A turn ends with a stop token or a stop string. The environment is called for every turn of every row; a row ends
    when it says so, after `max_turns`, or when the budget has no room for its answer and one token more.

    Args:
      params, prompts, prompt_mask, key: as of `sample`.
      environment: (state, tokens) -> (state, observation, reward, done). `tokens` are those the policy drew in this
        turn, its stop token included; `observation` is what it reads next; it is not read when `done`.
      states: B first states of the environment, one a row; rows of one prompt are adjacent.
      max_turns: most turns of a row.
      max_new_tokens: N, drawn and observed tokens of a row together.
      block: as of `generate`.
      **options: as of `sample`, but neither `greedy` nor `continued`.

    Raises:
      ValueError: as `sample`; or if there is not one state a row, or the environment answers nothing though it is not
        done, or something that is no token.
    """
    checks.at_least("max_turns", max_turns, 1)
    for name in ("greedy", "continued"):
        if options.get(name):
            raise ValueError(f"{name} is set: a conversation starts anew, from sampled rows only")
    request = checks.request(prompts, prompt_mask, max_new_tokens=max_new_tokens, **options)
    prompts, prompt_mask, states = jnp.asarray(prompts), jnp.asarray(prompt_mask), list(states)
    num_rows = prompts.shape[0] * request.samples_per_prompt
    if len(states) != num_rows:
        raise ValueError(f"states has {len(states)} entries: pass one a row, {num_rows}")
    arrays, stops = lay_out(request, prompts, prompt_mask, key)
    settings, vocabulary = request.settings, request.model.config.vocab_size
    turns, rewards = np.zeros(num_rows, int), np.zeros((num_rows, max_new_tokens), np.float32)
    read = np.zeros(num_rows, int)  # columns that the environment knows
    limits = np.asarray(arrays[2].limit)
    state = start(params, *arrays, stops, settings=settings, slots=block)
    params, alive = apart(params, request), np.ones(num_rows, bool)
    while True:
        state = run_out(params, state, stops, settings=settings, block=block)
        tokens, count, ids = jax.device_get((state.record.tokens, state.count, state.rows.id))
        answers = {}
        for own, row in zip(count, ids, strict=True):
            if row == num_rows or not alive[row]:
                continue
            turn = tokens[row, read[row] : own].tolist()
            states[row], observation, reward, done = environment(states[row], turn)
            rewards[row, own - 1] += reward
            turns[row] += 1
            alive[row] = not done and turns[row] < max_turns and own + len(observation) < limits[row]
            if alive[row]:
                answers[row] = _check(observation, row, vocabulary)
                read[row] = own + len(observation)
        if not answers:
            break
        state = compacted(state, np.isin(ids, list(answers)))
        observed, mask = _pad([answers.get(row, ()) for row in np.asarray(state.rows.id).tolist()])
        state = grown(state, int(state.cache.length) + observed.shape[1] + 1, block)
        state = respond(params, state, observed, mask, stops, settings=settings)
    front = jnp.zeros((num_rows, prompts.shape[1]), jnp.float32)
    rollout = results(request, prompts, prompt_mask, state.record)
    return Conversation(rollout, jnp.concatenate([front, jnp.asarray(rewards)], axis=1), turns, states)


def _check(observation: Sequence[int], row: int, vocabulary: int) -> list[int]:
    observation = list(observation)
    if not observation:
        raise ValueError(f"environment answered row {row} with no tokens though it is not done: answer something")
    outside = [token for token in observation if not 0 <= token < vocabulary]
    if outside:
        raise ValueError(f"environment answered row {row} with {outside}: not in a vocabulary of {vocabulary}")
    return observation


def _pad(answers: list[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Left-aligned rows, as long as the longest rounded up to a power of two, so that few sizes are compiled."""
    length = 1 << (max(map(len, answers)) - 1).bit_length()
    tokens = np.zeros((len(answers), length), np.int32)
    mask = np.zeros((len(answers), length), bool)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer)] = answer
        mask[row, : len(answer)] = True
    return tokens, mask
