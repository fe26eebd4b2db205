"""Sums with exactly verifiable answers, at five levels of difficulty.

Problem i of seed s is a pure function of (s, i), so that a run needs no iterator state. A tenth of all problems,
picked by a hash of the problem itself, is held out: no seed and no index of the training split ever draws one, nor
the same sum with its operands swapped.
"""

import dataclasses
from functools import partial

from jaxpg.tasks import draws

ALPHABET = "0123456789+-*="


@dataclasses.dataclass(frozen=True)
class Level:
    """A family of problems: `terms` operands of `digits` digits, joined by one of `operators`."""

    digits: int
    terms: int = 2
    operators: str = "+"


LEVELS = {
    1: Level(digits=1),
    2: Level(digits=2),
    3: Level(digits=2, operators="+-"),
    4: Level(digits=2, terms=3),
    5: Level(digits=2, operators="*"),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt such as "37+58=" and its answer "95"."""

    prompt: str
    answer: str
    level: int


def problem(seed: int, index: int, *, level: int = 2, held_out: bool = False) -> Problem:
    """Draws problem `index` of the stream `seed`.

    Args:
      seed: which stream.
      index: where in the stream.
      level: 1 to 5, see LEVELS.
      held_out: from the held-out tenth instead of the rest.

    Raises:
      ValueError: for a level that does not exist.
    """
    shape, attempt = _shape(level), 0
    while True:  # the split is decided by the problem, so draw until one falls into the wanted side
        operator, operands = _draw(shape, f"{seed}/{index}/{attempt}")
        if is_held_out(operator, operands) == held_out:
            return _state(operator, operands, level)
        attempt += 1


def problems(seed: int, start: int, count: int, *, level: int = 2) -> list[Problem]:
    """Draws training problems start … start + count − 1."""
    return [problem(seed, start + i, level=level) for i in range(count)]


def held_out_set(count: int, *, level: int = 2, seed: int = 0) -> list[Problem]:
    """Draws `count` different held-out problems.

    Raises:
      ValueError: if the level has fewer.
    """
    return draws.held_out_set(partial(problem, seed, level=level, held_out=True), count, of=f"level={level}")


def is_held_out(operator: str, operands: tuple[int, ...]) -> bool:
    """Says whether a problem belongs to the held-out tenth, whatever the order of commuting operands."""
    canonical = operands if operator == "-" else tuple(sorted(operands))
    return draws.is_held_out(f"{operator}/{canonical}")


def longest_prompt(level: int) -> str:
    """Returns a prompt of the greatest length that a level can ask."""
    shape = _shape(level)
    return _state(shape.operators[0], (10**shape.digits - 1,) * shape.terms, level).prompt


def longest_answer(level: int) -> str:
    """Returns an answer of the greatest length that a level can have."""
    shape = _shape(level)
    low, high = _operand_range(shape)
    corners = [
        (operator, (first, *[high] * (shape.terms - 1))) for operator in shape.operators for first in (low, high)
    ]
    return max((_state(operator, operands, level).answer for operator, operands in corners), key=len)


def score(problem: Problem, completion: str) -> float:
    """Returns 1.0 if the completion is the answer to the letter, else 0.0."""
    return float(completion == problem.answer)


def _shape(level: int) -> Level:
    if level not in LEVELS:
        raise ValueError(f"level={level}: choose among {', '.join(map(str, LEVELS))}")
    return LEVELS[level]


def _draw(level: Level, text: str) -> tuple[str, tuple[int, ...]]:
    operator = level.operators[draws.number(f"{text}/operator") % len(level.operators)]
    low, high = _operand_range(level)
    return operator, tuple(low + draws.number(f"{text}/{i}") % (high - low + 1) for i in range(level.terms))


def _operand_range(level: Level) -> tuple[int, int]:
    """The least and the greatest operand: 0 to 9, 10 to 99, and so on."""
    return 0 if level.digits == 1 else 10 ** (level.digits - 1), 10**level.digits - 1


def _state(operator: str, operands: tuple[int, ...], level: int) -> Problem:
    if operator == "*":
        answer = operands[0] * operands[1]
    else:
        answer = operands[0] + sum(operands[1:]) * (-1 if operator == "-" else 1)
    return Problem(prompt=operator.join(map(str, operands)) + "=", answer=str(answer), level=level)
