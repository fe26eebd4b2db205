"""Scorers, several of them with weights, and what happens when one fails.

A scorer is a function (problem, completion) -> a number, or None: it does not apply. A scorer that raises, is killed,
or returns something else, NaN included, has failed. A failure is never a reward of 0: after bounded retries it is
raised, or, by option, counted, and the scorer does not apply to that sample.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpg.tasks.workers import WorkerError, Workers, WorkerTimeoutError
from jaxpg.types import Scores

Scorer = Callable[[Any, str], float | None]
Scored = Scores


class ScorerError(RuntimeError):
    """A scorer failed, and failures are to be raised."""


def combine(
    scorers: dict[str, tuple[Scorer, float]], *, retries: int = 1, raise_failures: bool = True
) -> Callable[[Sequence[Any], Sequence[str]], Scores]:
    """Makes one scorer of several.

    Args:
      scorers: name -> (scorer, weight). A scorer with a method `many`, such as `Isolated`, gets all samples at once.
      retries: further attempts after a failure; a call that ran out of time is not tried again.
      raise_failures: what fails for good raises ScorerError; False: it is counted, and does not apply.

    Returns:
      (problems [P], completions [P·G], those of one prompt adjacent) -> Scores. It raises ValueError if their
      numbers do not fit, and ScorerError as said above.

    Raises:
      ValueError: without scorers, for a weight that is not finite, or retries below 0.
    """
    if not scorers:
        raise ValueError("scorers={}: name at least one")
    for name, (_, weight) in scorers.items():
        if not math.isfinite(weight):
            raise ValueError(f"scorers[{name!r}]: weight={weight} must be finite")
    if retries < 0:
        raise ValueError(f"retries={retries}: must be 0 or more")
    weights = np.array([weight for _, weight in scorers.values()], np.float32)

    def score(problems: Sequence[Any], completions: Sequence[str]) -> Scores:
        pairs = _pairs(problems, completions)
        columns = {name: _attempt(scorer, pairs, retries) for name, (scorer, _) in scorers.items()}
        if raise_failures:
            _raise_first(columns, pairs, len(problems))
        applies = np.array([[isinstance(x, float) for x in column] for column in columns.values()], bool).T
        found = np.array([[x if isinstance(x, float) else 0.0 for x in column] for column in columns.values()]).T
        shape = (len(problems), len(pairs) // len(problems))
        found = found.astype(np.float32)
        return Scores(
            rewards=(found @ weights).reshape(shape),
            valid=applies.any(-1).reshape(shape),
            scores=found.reshape(*shape, -1),
            scores_valid=applies.reshape(*shape, -1),
            failures=np.array([sum(isinstance(x, Exception) for x in column) for column in columns.values()]),
            names=tuple(scorers),
        )

    return score


class Isolated:
    """A scorer that runs in processes of its own, with a time limit that holds; see `workers.Workers`."""

    def __init__(
        self,
        function: Callable[..., float | None],
        *,
        arguments: Callable[[Any, str], tuple] = lambda problem, completion: (problem, completion),
        count: int = 2,
        timeout: float = 5.0,
        **options,
    ):
        """Notes what to call; the processes start with the first calls.

        Args:
          function: a scorer of a module that can be imported.
          arguments: (problem, completion) -> what `function` is called with, if not those two.
          count: of processes.
          timeout: seconds for one call.
          **options: of `workers.Workers`.

        Raises:
          ValueError: as `workers.Workers`.
        """
        self._workers = Workers(function, count=count, timeout=timeout, **options)
        self._arguments = arguments

    def __call__(self, problem: Any, completion: str) -> float | None:
        """Scores one sample; raises a WorkerError if the call is late, raises, or ends its process."""
        result = self.many([(problem, completion)])[0]
        if isinstance(result, WorkerError):
            raise result
        return result

    def many(self, pairs: Sequence[tuple[Any, str]]) -> list[Any]:
        """Scores samples in parallel; a WorkerError stands in the place of a result that is not to be had."""
        return self._workers.map([self._arguments(problem, completion) for problem, completion in pairs])

    def close(self) -> None:
        """Ends the processes; a later call starts new ones."""
        self._workers.close()


def math_verify(*, count: int = 2, timeout: float = 5.0, **options) -> Isolated:
    """Makes a scorer of the package math-verify: formulas are compared by sympy, in processes of their own.

    It reads `problem.answer`, does not apply where that cannot be parsed, and else gives 1.0 or 0.0. A model will
    sometimes write what sympy never finishes, such as 10^{10^{10}}: combine it with raise_failures=False in training,
    and watch `Scores.failures`.

    Args:
      count: of processes.
      timeout: seconds for one sample; the package's own limits, which need the main thread, are off.
      **options: of `workers.Workers`.

    Raises:
      ImportError: without the package: it comes with the extra `reasoning`.
    """
    try:
        from jaxpg.tasks import formulas
    except ImportError as error:
        raise ImportError(f"{error}: math-verify comes with pip install 'jaxpg[reasoning]'") from error
    return Isolated(formulas.score, arguments=_answer_and_text, count=count, timeout=timeout, **options)


def _answer_and_text(problem: Any, completion: str) -> tuple[str, str]:
    return str(problem.answer), completion


def _pairs(problems: Sequence[Any], completions: Sequence[str]) -> list[tuple[Any, str]]:
    if not problems or not completions or len(completions) % len(problems):
        raise ValueError(
            f"{len(completions)} completions of {len(problems)} problems: must be a multiple, G samples of each"
        )
    samples = len(completions) // len(problems)
    return [(problems[row // samples], completion) for row, completion in enumerate(completions)]


def _attempt(scorer: Scorer, pairs: list[tuple[Any, str]], retries: int) -> list[float | Exception | None]:
    """Scores every sample, and again those that failed."""
    results = _call(scorer, pairs)
    for _ in range(retries):
        failed = [
            i for i, x in enumerate(results) if isinstance(x, Exception) and not isinstance(x, WorkerTimeoutError)
        ]
        again = _call(scorer, [pairs[i] for i in failed])
        for i, result in zip(failed, again, strict=True):
            results[i] = result
    return results


def _call(scorer: Scorer, pairs: list[tuple[Any, str]]) -> list[float | Exception | None]:
    if hasattr(scorer, "many"):
        return [_checked(result) for result in scorer.many(pairs)]
    return [_call_one(scorer, problem, completion) for problem, completion in pairs]


def _call_one(scorer: Scorer, problem: Any, completion: str) -> float | Exception | None:
    try:
        return _checked(scorer(problem, completion))
    except Exception as error:
        return error


def _checked(result: Any) -> float | Exception | None:
    """A finite number as a float, None and an exception as they are, and an exception for anything else."""
    if result is None or isinstance(result, Exception):
        return result
    if isinstance(result, numbers.Real | np.bool_) and math.isfinite(result):
        return float(result)
    return ValueError(f"the scorer returned {str(result)[:80]} ({type(result).__name__}): must be finite, or None")


def _raise_first(columns: dict[str, list], pairs: list[tuple[Any, str]], prompts: int) -> None:
    for name, column in columns.items():
        failed = [row for row, result in enumerate(column) if isinstance(result, Exception)]
        if failed:
            prompt, sample = divmod(failed[0], len(pairs) // prompts)
            error = column[failed[0]]
            raise ScorerError(
                f"scorer {name!r} failed on sample {sample} of prompt {prompt}, one of {len(failed)}: "
                f"{type(error).__name__}: {error}; the completion is {pairs[failed[0]][1][:200]!r}"
            ) from error
