"""Countdown: reach a target from given numbers by + - * / and parentheses, each number exactly once.

The rule is that of TinyZero (Pan et al. 2025). Problem i of seed s is a pure function of (s, i), every problem has a
solution, and a tenth of all problems, whatever the order of their numbers, is held out.
"""

import dataclasses
import re
from collections import Counter
from functools import partial

from jaxpg.tasks import draws
from jaxpg.tasks.expressions import Expression, ExpressionError, evaluate

ALPHABET = "0123456789+-*/()=,"
MAX_TARGET = 99


@dataclasses.dataclass(frozen=True)
class Level:
    """A family of problems: `count` numbers from 1 to `highest`, joined by `operators`."""

    count: int
    highest: int
    operators: str = "+-*/"


LEVELS = {
    1: Level(count=2, highest=49, operators="+-"),
    2: Level(count=3, highest=49, operators="+-"),
    3: Level(count=3, highest=99),
    4: Level(count=4, highest=99),
    5: Level(count=6, highest=99),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Numbers, a target, a short prompt such as "3,5,7=22" and one solution of it, "3*5+7"."""

    prompt: str
    answer: str
    level: int
    numbers: tuple[int, ...]
    target: int


def problem(seed: int, index: int, *, level: int = 3, held_out: bool = False) -> Problem:
    """Draws problem `index` of the stream `seed`.

    Args:
      seed: which stream.
      index: where in the stream.
      level: 1 to 5, see LEVELS.
      held_out: from the held-out tenth instead of the rest.

    Raises:
      ValueError: for a level that does not exist.
    """
    shape, attempt = _level(level), 0
    while True:  # until a drawn expression is worth a target, and the problem is on the wanted side of the split
        numbers, answer, target = _draw(shape, f"countdown/{level}/{seed}/{index}/{attempt}")
        if 1 <= target <= MAX_TARGET and is_held_out(numbers, target) == held_out:
            prompt = ",".join(map(str, numbers)) + f"={target}"
            return Problem(prompt=prompt, answer=answer, level=level, numbers=numbers, target=target)
        attempt += 1


def problems(seed: int, start: int, count: int, *, level: int = 3, held_out: bool = False) -> list[Problem]:
    """Draws problems start … start + count − 1. Those held out may repeat, as may the others."""
    return [problem(seed, start + i, level=level, held_out=held_out) for i in range(count)]


def held_out_set(count: int, *, level: int = 3, seed: int = 0) -> list[Problem]:
    """Draws `count` different held-out problems.

    Raises:
      ValueError: if the level has fewer.
    """
    return draws.held_out_set(partial(problem, seed, level=level, held_out=True), count, of=f"level={level}")


def longest_prompt(level: int) -> str:
    """Returns a prompt of the greatest length that a level can ask."""
    numbers = ",".join([str(_level(level).highest)] * _level(level).count)
    return f"{numbers}={MAX_TARGET}"


def longest_answer(level: int) -> str:
    """Returns a text of the greatest length that a solution can have: all but the last operation in parentheses."""
    operand = str(_level(level).highest)
    answer = f"{operand}+{operand}"
    for _ in range(_level(level).count - 2):
        answer = f"({answer})+{operand}"
    return answer


def is_held_out(numbers: tuple[int, ...], target: int) -> bool:
    """Says whether a problem belongs to the held-out tenth, whatever the order of its numbers."""
    return draws.is_held_out(f"countdown/{sorted(numbers)}/{target}")


def question(problem: Problem) -> str:
    """Asks in words, for a model that speaks; `Problem.prompt` is for one that knows nothing else."""
    return (
        f"Using the numbers {list(problem.numbers)}, make an expression that equals {problem.target}. You may use "
        "+, -, *, / and parentheses, and must use each number exactly once. "
        "Give the expression alone in <answer> </answer> tags, for example <answer>(1+2)/3</answer>."
    )


def score(problem: Problem, completion: str, *, use_all: bool = True) -> float:
    """Returns 1.0 for an expression that is worth the target and uses the numbers as the rule says, else 0.0.

    Args:
      problem: what was asked.
      completion: the expression, or any text with the expression between <answer> and </answer>.
      use_all: each number exactly once (TinyZero); False: at most once (the television game).
    """
    expression = _read(completion)
    return float(expression is not None and expression.value == problem.target and _fits(problem, expression, use_all))


def score_format(problem: Problem, completion: str, *, use_all: bool = True) -> float:
    """Returns 1.0 for an expression that uses the numbers as the rule says, whatever it is worth, else 0.0."""
    expression = _read(completion)
    return float(expression is not None and _fits(problem, expression, use_all))


def _level(level: int) -> Level:
    if level not in LEVELS:
        raise ValueError(f"level={level}: choose among {', '.join(map(str, LEVELS))}")
    return LEVELS[level]


def _read(completion: str) -> Expression | None:
    tagged = re.findall(r"<answer>([^<]*)</answer>", completion)
    try:
        return evaluate((tagged[-1] if tagged else completion).strip())
    except ExpressionError:
        return None


def _fits(problem: Problem, expression: Expression, use_all: bool) -> bool:
    given, used = Counter(problem.numbers), Counter(expression.numbers)
    return used == given if use_all else used <= given


def _draw(level: Level, text: str) -> tuple[tuple[int, ...], str, int]:
    """Draws numbers and joins two of the expressions at hand, until one is left; target 0 for a draw in vain."""
    numbers = tuple(1 + draws.number(f"{text}/{i}") % level.highest for i in range(level.count))
    hand = [(str(n), n) for n in numbers]
    while len(hand) > 1:
        bits = draws.number(f"{text}/join/{len(hand)}")
        bits, first = divmod(bits, len(hand))
        left, left_value = hand.pop(first)
        bits, second = divmod(bits, len(hand))
        right, right_value = hand.pop(second)
        operator = level.operators[bits % len(level.operators)]
        value = _join(left_value, operator, right_value)
        if value is None:
            return numbers, "", 0
        hand.append((f"({left}{operator}{right})", value))
    answer, target = hand[0]
    return numbers, answer[1:-1], target


def _join(left: int, operator: str, right: int) -> int | None:
    """What two integers make, None for a quotient that is no integer."""
    if operator == "/":
        return None if right == 0 or left % right else left // right
    return {"+": left + right, "-": left - right, "*": left * right}[operator]
