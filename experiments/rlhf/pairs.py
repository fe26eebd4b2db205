"""Preference pairs: drawn from a policy, labelled by the true preference with its noise, written as JSON lines."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxpg import recipe
from jaxpg.data import decode_completions, encode_demonstrations
from jaxpg.parallel import distributed, sharding
from jaxpg.recipe.sampler import encode, make_sampler
from jaxpg.run import folder
from jaxpg.tasks import draws, taste
from jaxpg.types import Batch

AT_A_TIME = 256  # prompts


class Pair(NamedTuple):
    """Two completions of a prompt, and how much better the chosen one truly is; no training reads that."""

    prompt: str
    chosen: str
    rejected: str
    true_margin: float  # U(chosen) − U(rejected): negative where the label is wrong


def collect(r: recipe.Recipe, params: dict, count: int, *, held_out: bool = False) -> list[Pair]:
    """Draws pairs of different completions from a policy and has each labelled once.

    Two equal completions would teach nothing, and are left out.

    Args:
      r: its seed decides prompts, completions and labels.
      params: the policy's.
      count: pairs.
      held_out: draw from other streams of prompts, completions and labels.
    """
    seed = 2 * r.config.seed + held_out
    draw = make_sampler(r.setup, r.sampling, samples_per_prompt=2)
    key = jax.random.fold_in(jax.random.key(seed), 2)
    pairs: list[Pair] = []
    call = 0
    while len(pairs) < count:
        problems = taste.problems(seed, call * AT_A_TIME, AT_A_TIME)
        rollout = draw(params, encode(r.setup, problems), jax.random.fold_in(key, call))
        texts = decode_completions(r.tokenizer, distributed.fetch(rollout))
        for i, problem in enumerate(problems):
            first, second = texts[2 * i : 2 * i + 2]
            if first != second:
                pairs.append(label(problem, first, second, seed=seed, index=call * AT_A_TIME + i))
        call += 1
    return pairs[:count]


def label(problem, first: str, second: str, *, seed: int, index: int) -> Pair:
    """Asks for the preference between two completions once, and puts the preferred one in front."""
    better, worse = first, second
    if not taste.prefers_first(problem, first, second, seed=seed, index=index):
        better, worse = second, first
    return Pair(problem.prompt, better, worse, taste.utility(problem, better) - taste.utility(problem, worse))


def best_accuracy(pairs: Sequence[Pair]) -> float:
    """Returns how often the true preference itself is expected to agree with such labels: mean max(p, 1 − p)."""
    return float(np.mean([1.0 / (1.0 + np.exp(-abs(pair.true_margin))) for pair in pairs]))


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """Writes one JSON object a line, in one piece, the first process for all."""
    if distributed.is_primary():
        folder.write_text(path, "".join(json.dumps(pair._asdict()) + "\n" for pair in pairs))


def read_pairs(path: Path) -> list[Pair]:
    """Reads what `write_pairs` wrote."""
    return [Pair(**json.loads(line)) for line in path.read_text().splitlines()]


def encode_pairs(setup: recipe.Setup, pairs: Sequence[Pair]) -> Batch:
    """Tokenizes pairs into a Batch of [N, 2, T]: the chosen one, then the rejected one.

    A row of the batch is a pair, so that a batch may be cut anywhere. A completion that the budget had cut is taken as
    if it had ended there.
    """
    prompts = [pair.prompt for pair in pairs for _ in range(2)]
    completions = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    # A tokenizer may cut the same text into more tokens than the policy wrote it with.
    longest = max(len(ids) for ids in setup.tokenizer(completions, add_special_tokens=False)["input_ids"])
    length = setup.prompt_length + 1 + max(longest, setup.max_new_tokens)
    batch = encode_demonstrations(setup.tokenizer, prompts, completions, length=length)
    return jax.tree.map(lambda x: x.reshape(len(pairs), 2, length), batch)


def pair_batches(setup: recipe.Setup, whole: Batch, size: int) -> Callable[[int], Batch]:
    """Builds k -> batch k of an endless stream over the pairs, shuffled anew for each pass, spread over the mesh."""

    def batch(k: int) -> Batch:
        rows = draws.rows(len(whole.tokens), setup.config.seed, k * size, size)
        return sharding.put_whole(setup.mesh, jax.tree.map(lambda x: x[rows], whole))

    return batch
