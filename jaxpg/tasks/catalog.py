"""Tasks by name, as questions for a model that speaks: what the command line of an experiment chooses from."""

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxpg.tasks import arithmetic, countdown, draws, gsm8k, gym, numbers

NAMES = ("arithmetic", "countdown", "gsm8k", "reasoning_gym:<name>")


class Questions(NamedTuple):
    """Problems in words, and what a reply to one is worth."""

    problems: Callable[[int, int, int], Sequence[Any]]  # (seed, start, count) -> problems to train on
    held_out: Callable[[int], Sequence[Any]]  # count -> problems that are never trained on
    ask: Callable[[Any], str]
    score: Callable[[Any, str], float]
    vote: Callable[[str], Hashable | None] = str.strip  # a reply -> its answer; equal ones are one in majority@k


def by_name(name: str, *, level: int = 1, source: str | os.PathLike | None = None) -> Questions:
    """Finds a task.

    Args:
      name: arithmetic, countdown, gsm8k, or reasoning_gym: and one of that package's names.
      level: of arithmetic and countdown.
      source: of gsm8k: a folder with train.jsonl and test.jsonl; default the data set on the hub.

    Raises:
      ValueError: for a name that does not exist.
    """
    if name == "arithmetic":
        return Questions(
            problems=partial(_stream, partial(arithmetic.problem, level=level)),
            held_out=partial(arithmetic.held_out_set, level=level),
            ask=lambda problem: f"What is {problem.prompt[:-1]}? Answer with just the number.",
            score=_last_number,
            vote=lambda reply: _value(numbers.last(reply)),
        )
    if name == "countdown":
        return Questions(
            problems=partial(countdown.problems, level=level),
            held_out=lambda count: countdown.problems(0, 0, count, level=level, held_out=True),
            ask=countdown.question,
            score=countdown.score,
        )
    if name == "gsm8k":
        return _gsm8k(source)
    family, _, task = name.partition(":")
    if family == "reasoning_gym" and task:
        return Questions(
            problems=partial(gym.problems, task),
            held_out=lambda count: gym.problems(task, 0, 0, count, held_out=True),
            ask=lambda problem: f"{problem.prompt}\n{gym.INSTRUCTION}",
            score=gym.score,
        )
    raise ValueError(f"task={name!r}: choose among {', '.join(NAMES)}")


def _stream(problem: Callable, seed: int, start: int, count: int) -> list:
    return [problem(seed, start + i) for i in range(count)]


def _last_number(problem: arithmetic.Problem, reply: str) -> float:
    return float(numbers.equal(numbers.last(reply), numbers.read(problem.answer)))


def _gsm8k(source: str | os.PathLike | None) -> Questions:
    folder = None if source is None else Path(source)
    train = gsm8k.load(folder / "train.jsonl") if folder else gsm8k.load()
    test = gsm8k.load(folder / "test.jsonl") if folder else gsm8k.load(split="test")

    def held_out(count: int):
        if count > len(test):
            raise ValueError(f"count={count}: the test set has {len(test)} problems")
        return test[:count]

    return Questions(
        problems=partial(draws.pick, train),
        held_out=held_out,
        ask=lambda problem: f"{problem.prompt}\n{gsm8k.INSTRUCTION}",
        score=gsm8k.score,
        vote=lambda reply: _value(numbers.answer(reply)),
    )


def _value(quantity: numbers.Quantity | None):
    return None if quantity is None else quantity.value
