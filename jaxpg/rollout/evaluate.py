"""How good a policy is: accuracy of completions with its interval, pass@k, majority@k, by difficulty."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

Z_95 = 1.959963984540054  # the standard normal lies within ± this with probability 0.95
Problem = object  # a task's own type; only its scorer looks inside


def complete(
    generate: Callable[[Sequence[Problem]], list[str]], problems: Sequence[Problem], *, batch: int
) -> list[str]:
    """Completes problems batch by batch, the last batch filled up so that no new shape is compiled.

    Args:
      generate: maps exactly `batch` problems to as many texts.
      problems: any number.
      batch: problems at a time.

    Raises:
      ValueError: if there are no problems.
    """
    if not problems:
        raise ValueError("problems is empty: pass at least one")
    texts: list[str] = []
    for start in range(0, len(problems), batch):
        part = list(problems[start : start + batch])
        filled = (part * (batch // len(part) + 1))[:batch]
        texts += generate(filled)[: len(part)]
    return texts


def accuracy(score: Callable[[Problem, str], float], problems: Sequence[Problem], texts: Sequence[str]) -> float:
    """Averages the scores of one completion a problem."""
    return float(np.mean([score(problem, text) for problem, text in zip(problems, texts, strict=True)]))


def interval(successes_mean: float, n: int) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval of a success probability (Wilson 1927).

        (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n),    z = 1.96

    For means of scores between 0 and 1 that are not all 0 or 1 it is wider than need be.

    Args:
      successes_mean: p, the share of successes.
      n: how many problems it is the mean of.

    Returns:
      The bounds; both are NaN where there is no interval, for n = 0 and for a mean outside [0, 1].
    """
    p = float(successes_mean)
    if n < 1 or not 0.0 <= p <= 1.0:
        return math.nan, math.nan
    z2 = Z_95**2 / n
    center, half = p + z2 / 2, Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    low, high = (center - half) / (1 + z2), (center + half) / (1 + z2)
    return 0.0 if p == 0 else low, 1.0 if p == 1 else high  # without what rounding leaves


def pass_at_k(num_samples: np.ndarray, num_correct: np.ndarray, *, k: int) -> np.ndarray:
    """Estimates, without bias, the chance that one of k samples is right, from n ≥ k samples.

        pass@k = 1 − C(n − c, k) / C(n, k)    (Chen 2021, eq. 1)

    Args:
      num_samples: n, integers, any shape.
      num_correct: c, same shape.
      k: samples that may be tried.

    Raises:
      ValueError: if some n is below k.
    """
    n, c = np.broadcast_arrays(np.asarray(num_samples), np.asarray(num_correct))
    if k < 1 or (n < k).any():
        raise ValueError(f"k={k} with num_samples as low as {n.min()}: draw at least k samples a problem")
    i = np.arange(k)
    fail = (n[..., None] - c[..., None] - i) / (n[..., None] - i)
    return 1.0 - np.prod(np.clip(fail, 0.0, 1.0), axis=-1)


def majority_at_k(answers: Sequence[Sequence[object]], correct: Sequence[Sequence[bool]]) -> np.ndarray:
    """Says of each problem how often its most frequent answer is right (self-consistency; Wang 2023).

    Answers tied for the most votes count in equal parts; None, no answer, has no vote.

    Args:
      answers: [P][k], anything hashable.
      correct: [P][k], whether each is right; equal answers are equally right.

    Returns:
      [P] float64; 0 for a problem without any answer.
    """
    shares = []
    for votes, right in zip(answers, correct, strict=True):
        counts = Counter(vote for vote in votes if vote is not None)
        is_right = dict(zip(votes, right, strict=True))
        winners = [vote for vote, count in counts.items() if count == max(counts.values())]
        shares.append(np.mean([bool(is_right[vote]) for vote in winners]) if winners else 0.0)
    return np.asarray(shares, np.float64)


def by_group(values: Sequence[float], groups: Sequence[object]) -> dict[object, float]:
    """Averages values by group, e.g. accuracy by the problems' level, in the groups' order."""
    values, names = np.asarray(values, np.float64), list(groups)
    return {group: float(values[[name == group for name in names]].mean()) for group in sorted(set(names), key=str)}
