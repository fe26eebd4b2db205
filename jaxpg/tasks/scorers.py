r"""Scorers by name, for data sets: what the command line chooses from.

    exact                 the completion is the answer to the letter, but for blanks around it
    number                its answer is the number wanted: after "####", in \boxed{}, or its last number
    math-verify           formulas compared by the package of that name, in processes of their own
    choice                its letter, in \boxed{} or else the last that stands alone, is the one wanted
    regex:PATTERN         the pattern is found in the completion; needs no answer
    module:function       a function (problem, completion) -> number or None of the user's own

Several have weights: `number@1.0 regex:<think>.*</think>@0.1`. The weight is 1 where none is given.
"""

import dataclasses
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxpg.tasks import numbers, scoring

NAMES = ("exact", "number", "math-verify", "choice", "regex:<pattern>", "<module>:<function>")
_LETTER = re.compile(r"(?<![A-Za-z0-9'’])([A-Z])(?![A-Za-z0-9'’])(?!(?<=I) [a-z])")  # not the "I" of "I think"


@dataclasses.dataclass(frozen=True)
class Named:
    """A scorer with what is known of it.

    Attributes:
      score: (problem, completion) -> number or None.
      reads: answer -> whether the scorer can compare with it; None for a scorer that needs no answer.
      vote: completion -> what it says, for majority@k.
    """

    score: scoring.Scorer
    reads: Callable[[Any], bool] | None = None
    vote: Callable[[str], Hashable | None] = str.strip


def find(texts: Sequence[str], *, own: Mapping[str, Named] | None = None) -> dict[str, tuple[Named, float]]:
    """Finds scorers by their names.

    Args:
      texts: each a name, or a name and a weight such as "number@0.5".
      own: further scorers by name, e.g. the task's own.

    Returns:
      name -> (scorer, weight), in their order.

    Raises:
      ValueError: naming the text that is wrong and what is allowed; for a package or module that is missing.
    """
    found: dict[str, tuple[Named, float]] = {}
    for text in texts:
        name, weight = _split(text)
        if name in found:
            raise ValueError(f"--scorers={' '.join(texts)}: {name!r} stands there twice")
        found[name] = (own or {}).get(name) or _by_name(name, own or {}), weight
    return found


def read_choice(text: str) -> str | None:
    r"""Returns the letter that a completion chooses: in its last \boxed{}, else its last capital that stands alone."""
    inside = numbers.boxed(text)
    letters = _LETTER.findall(inside) if inside is not None else []
    letters = letters or _LETTER.findall(text)
    return letters[-1] if letters else None


def _split(text: str) -> tuple[str, float]:
    name, at, weight = text.rpartition("@")
    try:
        value = float(weight)
    except ValueError:
        at = ""
    if not at:
        return text, 1.0
    if not math.isfinite(value):
        raise ValueError(f"--scorers={text}: the weight must be finite")
    return name, value


def _by_name(name: str, own: Mapping[str, Named]) -> Named:
    if name == "exact":
        return Named(_exact, reads=lambda answer: True)
    if name == "number":
        return Named(_number, reads=lambda answer: _wanted(answer) is not None, vote=_vote_number)
    if name == "choice":
        return Named(_choice, reads=lambda answer: _wanted_letter(answer) is not None, vote=read_choice)
    if name == "math-verify":
        try:
            return Named(scoring.math_verify(), reads=lambda answer: True, vote=_vote_boxed)
        except ImportError as error:
            raise ValueError(f"--scorers={name}: {error}") from error
    kind, colon, rest = name.partition(":")
    if kind == "regex" and rest:
        return Named(_regex(name, rest))
    if colon and kind and rest:
        return Named(_imported(name, kind, rest))
    raise ValueError(f"--scorers={name}: choose among {', '.join((*own, *NAMES))}")


def _exact(problem: Any, completion: str) -> float:
    return float(completion.strip() == str(problem.answer).strip())


def _number(problem: Any, completion: str) -> float | None:
    wanted = _wanted(problem.answer)
    return None if wanted is None else float(numbers.equal(numbers.answer(completion), wanted))


def _wanted(answer: Any) -> numbers.Quantity | None:
    """The number of an answer column: it states one, or ends with a marked one as GSM8K's solutions do."""
    return numbers.read(str(answer)) or numbers.answer(str(answer), strict=True)


def _vote_number(completion: str) -> Hashable | None:
    found = numbers.answer(completion)
    return None if found is None else found.value


def _choice(problem: Any, completion: str) -> float | None:
    wanted = _wanted_letter(problem.answer)
    return None if wanted is None else float(read_choice(completion) == wanted)


def _wanted_letter(answer: Any) -> str | None:
    """The letter of an answer column, such as "B", "(B)" or "B. Paris"."""
    found = re.match(r"[^A-Za-z0-9]*([A-Z])(?![A-Za-z0-9'’])", str(answer))
    return found and found[1]


def _vote_boxed(completion: str) -> str:
    inside = numbers.boxed(completion)
    return completion.strip() if inside is None else inside.strip()


def _regex(name: str, pattern: str) -> scoring.Scorer:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"--scorers={name}: {error}") from error
    return lambda problem, completion: float(compiled.search(completion) is not None)


def _imported(name: str, module: str, function: str) -> scoring.Scorer:
    if os.getcwd() not in sys.path:  # a script's own folder is there, the folder that it is called from is not
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--scorers={name}: {error}; choose among {', '.join(NAMES)}") from error
    if not callable(found):
        raise ValueError(f"--scorers={name}: is no function")
    return found
