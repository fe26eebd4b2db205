"""Sums whose answers may trail off: "3+8=" -> "11...", and how many dots there are does not matter to the reward.

What is drawn into length is then up to the algorithm alone. The demonstrations end in 0 to 8 dots with equal
probabilities; an estimator without a length bias has no reason to change that, for right answers or for wrong ones.
"""

import dataclasses

from jaxpg.tasks import arithmetic, draws
from jaxpg.tasks.arithmetic import Problem, longest_prompt

__all__ = ["ALPHABET", "held_out_set", "longest_answer", "longest_prompt", "problem", "score"]

ALPHABET = arithmetic.ALPHABET + "."
MOST = 8  # dots of a demonstration


def problem(seed: int, index: int, *, level: int = 2, held_out: bool = False) -> Problem:
    """Draws problem `index` of the stream `seed`, as `arithmetic.problem`; its answer has dots."""
    drawn = arithmetic.problem(seed, index, level=level, held_out=held_out)
    return dataclasses.replace(drawn, answer=drawn.answer + draws.number(f"wordy/{seed}/{index}") % (MOST + 1) * ".")


def held_out_set(count: int, *, level: int = 2, seed: int = 0) -> list[Problem]:
    """Draws `count` different held-out problems, their answers without dots."""
    return arithmetic.held_out_set(count, level=level, seed=seed)


def longest_answer(level: int) -> str:
    """Returns an answer of the greatest length that a level can have."""
    return arithmetic.longest_answer(level) + MOST * "."


def score(problem: Problem, completion: str) -> float:
    """Returns 1.0 for the right answer, whatever dots follow it, else 0.0."""
    return float(completion.rstrip(".") == problem.answer.rstrip("."))
