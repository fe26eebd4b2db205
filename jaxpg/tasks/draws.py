"""Random draws as pure functions of a text, the same on every machine and in every version of Python."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def number(text: str) -> int:
    """Returns 64 random bits, a function of the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def is_held_out(text: str) -> bool:
    """Says whether the problem that a text stands for belongs to the held-out tenth."""
    return number(f"split/{text}") % 10 == 0


def held_out_set(draw: Callable[[int], Any], count: int, *, of: str) -> list:
    """Takes draw(0), draw(1), … until `count` problems of different prompts are found.

    Args:
      draw: index -> a held-out problem, with a `prompt`.
      count: how many.
      of: what holds them out, for the error.

    Raises:
      ValueError: if there are fewer.
    """
    found: dict[str, Any] = {}
    index = last_new = 0
    while len(found) < count:
        drawn = draw(index)
        last_new = last_new if drawn.prompt in found else index
        found.setdefault(drawn.prompt, drawn)
        index += 1
        # The last of n problems turns up after n draws on average: after 20·n in vain there is none.
        if index - last_new > 20 * len(found) + 100:
            raise ValueError(f"count={count}: {of} holds out only {len(found)} problems, ask for fewer")
    return list(found.values())


def rows(size: int, seed: int, start: int, count: int) -> list[int]:
    """Draws positions start … start + count − 1 of an endless stream over a data set, shuffled anew for each pass.

    Args:
      size: rows of the data set.
      seed: which stream.
      start: where in the stream.
      count: how many rows.

    Returns:
      Row numbers, each below `size`; a pass has each of them once.

    Raises:
      ValueError: if there are no rows.
    """
    if size < 1:
        raise ValueError(f"size={size}: there is no row to draw from")
    epochs = range(start // size, (start + count - 1) // size + 1)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in epochs}
    return [int(orders[i // size][i % size]) for i in range(start, start + count)]


def pick(items: Sequence, seed: int, start: int, count: int) -> list:
    """Takes the items at `rows(len(items), seed, start, count)`."""
    return [items[row] for row in rows(len(items), seed, start, count)]
