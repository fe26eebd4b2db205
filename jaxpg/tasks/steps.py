"""Sums in steps that can be checked: "2+3+4=" is answered "5;9", each running sum a step with its own reward.

The same rewards serve three granularities: `make_rewards` places each step's reward on its last token and numbers the
steps. Train with these segments for steps, with `segments.token` for tokens, and with `segments.response` for whole
responses.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxpg.data.token_bytes import token_bytes
from jaxpg.tasks import draws

ALPHABET = "0123456789+=;"
DELIMITER = ";"
# A step ends with the delimiter; a run of delimiters ends one step, as in `segments.steps`.
_STEP = re.compile("[^;]*;+|[^;]+")
_STEP_BYTES = re.compile(rb"[^;]*;+|[^;]+")


@dataclasses.dataclass(frozen=True)
class Level:
    """A family of problems: `terms` operands of up to `digits` digits."""

    terms: int
    digits: int = 1


LEVELS = {
    1: Level(terms=3),
    2: Level(terms=4),
    3: Level(terms=6),
    4: Level(terms=3, digits=2),
    5: Level(terms=6, digits=2),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt such as "2+3+4=", its answer "5;9", and the right steps ("5", "9")."""

    prompt: str
    answer: str
    level: int
    steps: tuple[str, ...]


Rewards = Callable[[Sequence[Problem], np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Step(NamedTuple):
    """A step of a completion: its place in the text, and its reward."""

    start: int  # the first character
    end: int  # after the last character, which is the delimiter if the step has one
    reward: float


def problem(seed: int, index: int, *, level: int = 1, held_out: bool = False) -> Problem:
    """Draws problem `index` of the stream `seed`.

    Args:
      seed: which stream.
      index: where in the stream.
      level: 1 to 5, see LEVELS.
      held_out: from the held-out tenth instead of the rest; which it is depends on the operands, not on their order.

    Raises:
      ValueError: for a level that does not exist.
    """
    shape, attempt = _shape(level), 0
    while True:  # the split is decided by the problem, so draw until one falls into the wanted side
        text = f"steps/{level}/{seed}/{index}/{attempt}"
        operands = [draws.number(f"{text}/{i}") % 10**shape.digits for i in range(shape.terms)]
        if draws.is_held_out(f"steps/{sorted(operands)}") == held_out:
            return _state(operands, level)
        attempt += 1


def problems(seed: int, start: int, count: int, *, level: int = 1, held_out: bool = False) -> list[Problem]:
    """Draws problems start … start + count − 1."""
    return [problem(seed, start + i, level=level, held_out=held_out) for i in range(count)]


def held_out_set(count: int, *, level: int = 1, seed: int = 0) -> list[Problem]:
    """Draws `count` different held-out problems.

    Raises:
      ValueError: if the level has fewer.
    """
    return draws.held_out_set(partial(problem, seed, level=level, held_out=True), count, of=f"level={level}")


def longest_prompt(level: int) -> str:
    """Returns a prompt of the greatest length that a level can ask."""
    return _longest(level).prompt


def longest_answer(level: int) -> str:
    """Returns an answer of the greatest length that a level can have."""
    return _longest(level).answer


def score(problem: Problem, completion: str) -> float:
    """Returns 1.0 if the last step is the whole sum and every step before it is right, else 0.0."""
    return float(completion == problem.answer)


def right_steps(problem: Problem, completion: str) -> float:
    """Returns the share of the problem's steps that are right, each by itself: what `check` rewards in all."""
    return sum(step.reward for step in check(problem, completion))


def check(problem: Problem, completion: str) -> list[Step]:
    """Cuts a completion into its steps and rewards each.

    A right step earns 1/n of the n that the problem has, so that a perfect answer earns 1. Step i is right if it is
    the running sum i, whatever stood before it. Steps beyond the n-th earn 0, so text in surplus gains nothing.
    """
    found = list(_STEP.finditer(completion))
    earned = _rewards(problem, [step[0] for step in found])
    return [Step(step.start(), step.end(), reward) for step, reward in zip(found, earned, strict=True)]


def make_rewards(tokenizer) -> Rewards:
    """Makes the function that rewards each step of each completion on the step's last token.

    A step ends with the token that holds its last character; the stop token belongs to the last step, or, after a
    delimiter, is a step of its own without a reward. Where one token ends several steps, they are one action, and it
    earns what they earn together.

    Args:
      tokenizer: of `transformers`, with a backend of the `tokenizers` library.

    Returns:
      (problems, tokens, action_mask) -> (token_rewards, segments), on the host: of P problems and the tokens [B, T] of
      a rollout with its action_mask [B, T], the P·G = B rows of a problem adjacent. token_rewards [B, T] float32 are 0
      elsewhere, segments [B, T] int32 are −1 outside the mask. It raises ValueError if shapes do not fit.

    Raises:
      ValueError: if the tokenizer's tokens have no bytes of their own, see `token_bytes`.
    """
    pieces = token_bytes(tokenizer)

    def rewards(problems: Sequence[Problem], tokens, action_mask) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = np.asarray(tokens), np.asarray(action_mask)
        _check_rows(problems, tokens, mask)
        samples = len(tokens) // len(problems)
        token_rewards, segments = np.zeros(tokens.shape, np.float32), np.full(tokens.shape, -1, np.int32)
        for row, (ids, drawn) in enumerate(zip(tokens, mask, strict=True)):
            # A model may have more logits than its tokenizer has ids: those beyond have no text.
            texts = [pieces[i] if i < len(pieces) else b"" for i in ids[drawn].tolist()]
            token_rewards[row, drawn], segments[row, drawn] = _place(problems[row // samples], texts)
        return token_rewards, segments

    return rewards


def _check_rows(problems: Sequence[Problem], tokens: np.ndarray, mask: np.ndarray) -> None:
    if tokens.ndim != 2 or mask.shape != tokens.shape or mask.dtype != bool:
        raise ValueError(f"tokens {tokens.shape}, action_mask {mask.dtype}{mask.shape}: must be [B, T] and bool [B, T]")
    if not problems or len(tokens) % len(problems):
        raise ValueError(f"{len(tokens)} rows of {len(problems)} problems: must be a multiple, G rows of each")


def _place(problem: Problem, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and step numbers of the tokens with these bytes."""
    ends = np.cumsum([len(text) for text in texts], dtype=int)  # where in the row's bytes each token ends
    found = list(_STEP_BYTES.finditer(b"".join(texts)))
    placed, closes = np.zeros(len(texts)), np.zeros(len(texts), bool)
    for step, reward in zip(found, _rewards(problem, [s[0].decode(errors="replace") for s in found]), strict=True):
        # A step without a delimiter is the last one, and has what follows without text: the stop token.
        at = int(np.searchsorted(ends, step.end())) if step[0].endswith(b";") else len(texts) - 1
        placed[at] += reward
        closes[at] = True
    return placed, np.cumsum(closes) - closes


def _rewards(problem: Problem, texts: list[str]) -> list[float]:
    right = [text.rstrip(DELIMITER) == step for text, step in zip(texts, problem.steps, strict=False)]
    return [1.0 / len(problem.steps) if i < len(right) and right[i] else 0.0 for i in range(len(texts))]


def _shape(level: int) -> Level:
    if level not in LEVELS:
        raise ValueError(f"level={level}: choose among {', '.join(map(str, LEVELS))}")
    return LEVELS[level]


def _longest(level: int) -> Problem:
    shape = _shape(level)
    return _state([10**shape.digits - 1] * shape.terms, level)


def _state(operands: list[int], level: int) -> Problem:
    sums = tuple(str(sum(operands[: i + 1])) for i in range(1, len(operands)))
    return Problem(prompt="+".join(map(str, operands)) + "=", answer=DELIMITER.join(sums), level=level, steps=sums)
