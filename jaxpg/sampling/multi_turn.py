"""Conversations with environments: tokens in, tokens out, the cache kept from turn to turn.

An environment runs on the host. It is told the tokens of a turn and answers with tokens, which the policy then reads;
nothing is ever turned into text and tokenized again on the way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.models import Model
from jaxpg.parallel import distributed
from jaxpg.sampling import checks, decoding
from jaxpg.sampling.driver import compacted, grown, layouts, run_out, start
from jaxpg.sampling.filters import Filter
from jaxpg.sampling.sampler import lay_out, results
from jaxpg.sampling.stop_strings import Automaton
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
    unroll: bool | None = None,
    block: int = 32,
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
      stop_tokens: as of `sample`, and so is every other argument. A conversation starts anew and from sampled rows
        only: it knows neither `greedy` nor `continued`.

    Raises:
      ValueError: as `sample`; or if there is not one state a row, or the environment answers nothing though it is not
        done, or something that is no token.
    """
    checks.at_least("max_turns", max_turns, 1)
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
        unroll=unroll,
    )
    request = checks.check(request, prompts, prompt_mask)
    prompts, prompt_mask, states = jnp.asarray(prompts), jnp.asarray(prompt_mask), list(states)
    num_rows = prompts.shape[0] * request.samples_per_prompt
    if len(states) != num_rows:
        raise ValueError(f"states has {len(states)} entries: pass one a row, {num_rows}")
    arrays, stops = lay_out(request, prompts, prompt_mask, key)
    table = _Table(environment, states, max_turns, np.asarray(arrays[2].limit), request)
    record = _talk(params, arrays, stops, table, request, block)
    front = jnp.zeros((num_rows, prompts.shape[1]), jnp.float32)
    token_rewards = jnp.concatenate([front, jnp.asarray(table.rewards)], axis=1)
    return Conversation(results(request, prompts, prompt_mask, record), token_rewards, table.turns, table.states)


def _talk(
    params, arrays: tuple, stops: decoding.Stops, table: "_Table", request: checks.Request, block: int
) -> decoding.Record:
    """Takes turns until every row has ended. `arrays` and `stops` are of `sampler.lay_out`."""
    settings = request.settings
    params, apart = layouts(params, request)
    state = start(params, *arrays, stops, settings=settings, slots=block)
    while True:
        state = run_out(apart, state, stops, settings=settings, block=block)
        # Whole on every process: each of them asks all environments, and all hear the same.
        tokens, count, ids = distributed.fetch((state.record.tokens, state.count, state.rows.id))
        answers = table.ask(tokens, count, ids)
        if not answers:
            return state.record
        state = compacted(state, np.isin(ids, list(answers)))
        observed, mask = _pad([answers.get(row, ()) for row in distributed.fetch(state.rows.id).tolist()])
        state = grown(state, int(state.cache.length) + observed.shape[1] + 1, block)
        state = respond(apart, state, observed, mask, stops, settings=settings)


class _Table:
    """The environments of all rows, and what passed between them and the policy."""

    def __init__(self, environment: Environment, states: list, max_turns: int, limits, request: checks.Request):
        rows = len(states)
        self.environment, self.states, self.max_turns, self.limits = environment, states, max_turns, limits
        self.vocabulary = request.model.config.vocab_size
        self.turns, self.read = np.zeros(rows, int), np.zeros(rows, int)  # columns that the environment knows
        self.rewards = np.zeros((rows, request.max_new_tokens), np.float32)
        self.alive = np.ones(rows, bool)

    def ask(self, tokens: np.ndarray, count: np.ndarray, ids: np.ndarray) -> dict[int, list[int]]:
        """Shows each row's turn to its environment; returns the observations of those that go on."""
        answers = {}
        for drawn, row in zip(count, ids, strict=True):
            if row == len(self.states) or not self.alive[row]:
                continue
            turn = tokens[row, self.read[row] : drawn].tolist()
            self.states[row], observation, reward, done = self.environment(self.states[row], turn)
            self.rewards[row, drawn - 1] += reward
            self.turns[row] += 1
            until = drawn + (0 if done else len(observation))
            self.alive[row] = not done and self.turns[row] < self.max_turns and until < self.limits[row]
            if self.alive[row]:
                answers[row] = _check(observation, row, self.vocabulary)
                self.read[row] = until
        return answers


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
