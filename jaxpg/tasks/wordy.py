"""Recall whose answers trail off, to see length bias: "50382=" -> "2....", or wrong and knowing it, "7,,,".

The right answer is the last digit asked about, and what follows does not matter to the reward, so that its length is up
to the algorithm alone. Half of the demonstrations are wrong on purpose. They trail off in commas, right ones in dots:
each shows by its own filling what it is worth, and so a policy can be wordy when wrong and terse when right. All end in
0 to 8 of them with equal probabilities, and an estimator without a length bias has no reason to change that.
"""

import dataclasses
from functools import partial

from jaxpg.tasks import draws

DIGITS = "0123456789"
ALPHABET = DIGITS + "=.,"
ASKED = 5  # digits of a prompt
MOST = 8  # dots or commas of a demonstration


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt such as "50382=", its answer "2", and what a demonstration of it says, "2..." or "7,,"."""

    prompt: str
    answer: str
    demonstration: str
    level: int = 1


def problem(seed: int, index: int, *, level: int = 1, held_out: bool = False) -> Problem:
    """Draws problem `index` of the stream `seed`: one of 10^5, a tenth of them held out.

    Raises:
      ValueError: for another level than 1, the only one.
    """
    _check(level)
    attempt = 0
    while True:  # the split is decided by the problem, so draw until one falls into the wanted side
        drawn = draws.number(f"wordy/{seed}/{index}/{attempt}")
        asked = f"{drawn % 10**ASKED:0{ASKED}}"
        if draws.is_held_out(f"wordy/{asked}") == held_out:
            return _state(asked, draws.number(f"wordy/{seed}/{index}/demonstration"))
        attempt += 1


def held_out_set(count: int, *, level: int = 1, seed: int = 0) -> list[Problem]:
    """Draws `count` different held-out problems.

    Raises:
      ValueError: if there are fewer.
    """
    return draws.held_out_set(partial(problem, seed, level=level, held_out=True), count, of="task=wordy")


def longest_prompt(level: int) -> str:
    """Returns a prompt; all are of the same length."""
    _check(level)
    return "9" * ASKED + "="


def longest_answer(level: int) -> str:
    """Returns an answer as long as the longest of a demonstration."""
    _check(level)
    return "9" + MOST * "."


def score(problem: Problem, completion: str) -> float:
    """Returns 1.0 for the right answer, whatever dots and commas follow it, else 0.0."""
    return float(completion.rstrip(".,") == problem.answer)


def _state(asked: str, drawn: int) -> Problem:
    answer = asked[-1]
    drawn, wrong = divmod(drawn, 2)
    drawn, many = divmod(drawn, MOST + 1)
    said = DIGITS[(int(answer) + 1 + drawn % 9) % 10] if wrong else answer
    return Problem(asked + "=", answer, demonstration=said + many * ",."[not wrong])


def _check(level: int) -> None:
    if level != 1:
        raise ValueError(f"level={level}: wordy problems have level 1 only")
