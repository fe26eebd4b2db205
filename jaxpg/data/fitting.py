"""Prompts that do not fit: they are dropped and replaced, so that batches stay full, or they end the run at its start.

    fitted = fit(task, render, tokenizer, length=64, held_out=128, policy="drop")
    fitted.problems(seed, start, count)         # always `count` problems whose prompts fit
    fitted.held_out, fitted.dropped

A finite training set is checked entirely before the first step. Of an endless one the first 512 problems are checked
then, and the others as they are drawn.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

POLICIES = ("drop", "stop")
CHECKED = 512  # problems of an endless training set that are checked up front
ATTEMPTS = 1000  # replacements that are tried for a problem that does not fit
OTHER_STREAM = 2**20  # between the seed of a stream and that of its first replacements
AT_A_TIME = 1024  # prompts that are tokenized together

Render = Callable[[Sequence[Any]], list[str]]


class Source(Protocol):
    """The part of a `tasks.Task` that is read here."""

    problems: Callable[[int, int, int], Sequence[Any]]
    held_out: Callable[[int], Sequence[Any]]
    size: int | None
    prompt_length: int | None


def token_counts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Returns the tokens of each prompt, as `encode_prompts` counts them."""
    counts: list[int] = []
    for start in range(0, len(texts), AT_A_TIME):
        part = list(texts[start : start + AT_A_TIME])
        counts += [len(ids) for ids in tokenizer(part, add_special_tokens=False)["input_ids"]]
    return counts


def fits(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> list[bool]:
    """Says of each prompt whether it has at most `length` tokens."""
    return [count <= length for count in token_counts(tokenizer, texts)]


class Fitted:
    """Training and held-out problems whose prompts fit; see `fit`.

    Attributes:
      length: tokens that a prompt may have.
      held_out: the held-out problems.
      size: of a finite training set, the problems that fit; None for an endless one.
    """

    def __init__(self, source: Source, render: Render, tokenizer, length: int, policy: str):
        self.length = length
        self.held_out: Sequence[Any] = ()
        self.size: int | None = None
        self._source, self._render, self._tokenizer, self._policy = source, render, tokenizer, policy
        self._kept: Sequence[Any] = ()  # of a finite training set
        self._too_long: set[int] = set()  # hashes of the prompts met so far

    @property
    def dropped(self) -> int:
        """How many different prompts did not fit, among those looked at so far."""
        return len(self._too_long)

    def problems(self, seed: int, start: int, count: int) -> list[Any]:
        """Draws training problems start … start + count − 1 of the stream `seed`, all of which fit.

        Each is a function of seed and index alone. Where a problem of an endless task does not fit, one from another
        stream takes its place. A pass over a finite set has each problem that fits once.

        Raises:
          ValueError: if one does not fit and the policy is "stop", or if no replacement is found.
        """
        if self.size is not None and self.size < self._source.size:
            return self._from_kept(seed, start, count)
        drawn = list(self._source.problems(seed, start, count))
        if self.size is not None:
            return drawn  # all of the set were checked, and fit
        for place in np.flatnonzero(~self._check(drawn)):
            drawn[place] = self._replacement(seed, start + int(place))
        return drawn

    def _check(self, problems: Sequence[Any]) -> np.ndarray:
        """Says [N] bool of each problem whether its prompt fits, and notes those that do not.

        Raises:
          ValueError: if one does not fit and the policy is "stop".
        """
        texts = self._render(problems)
        counts = np.array(token_counts(self._tokenizer, texts), int)
        fit = counts <= self.length
        if self._policy == "stop" and not fit.all():
            raise ValueError(
                f"--long-prompts=stop: {np.sum(~fit)} of {len(fit)} prompts do not fit --prompt-length={self.length}, "
                f"the longest has {counts.max()} tokens: pass --prompt-length {counts.max()}, or --long-prompts drop"
            )
        self._too_long |= {hash(text) for text, fine in zip(texts, fit, strict=True) if not fine}
        return fit

    def _take_training(self, problems: Sequence[Any]) -> None:
        """Checks the training problems that are known up front.

        Raises:
          ValueError: if none of them fits, or as `_check`.
        """
        fit = self._check(problems)
        if not fit.any():
            raise ValueError(
                f"--prompt-length={self.length}: none of the first {len(fit)} training prompts fits, the shortest has "
                f"{min(token_counts(self._tokenizer, self._render(problems)))} tokens: raise it"
            )
        if self._source.size is not None:
            self._kept = [problem for problem, fine in zip(problems, fit, strict=True) if fine]
            self.size = len(self._kept)

    def _take_held_out(self, problems: Sequence[Any]) -> None:
        """Checks the held-out problems, and replaces those that do not fit by further ones.

        Raises:
          ValueError: if there are too few that fit, or as `_check`.
        """
        count = len(problems)
        while True:
            kept = [problem for problem, fine in zip(problems, self._check(problems), strict=True) if fine]
            if len(kept) >= count:
                self.held_out = kept[:count]
                return
            more = self._more_held_out(len(problems), count - len(kept)) if kept else None
            if more is None:
                raise ValueError(
                    f"--held-out={count}: only {len(kept)} of {len(problems)} held-out prompts fit "
                    f"--prompt-length={self.length}: ask for fewer, or raise the length"
                )
            problems = more

    def _more_held_out(self, had: int, missing: int) -> Sequence[Any] | None:
        """Asks for as many more held-out problems as are missing, or for fewer; None if there is no further one."""
        while missing:
            try:
                return self._source.held_out(had + missing)
            except ValueError:
                missing //= 2
        return None

    def _from_kept(self, seed: int, start: int, count: int) -> list[Any]:
        """Draws from what is left of a finite set, shuffled anew for each pass, as `tasks.draws.rows` does."""
        passes = range(start // self.size, (start + count - 1) // self.size + 1)
        orders = {k: np.random.default_rng([seed, k]).permutation(self.size) for k in passes}
        return [self._kept[orders[i // self.size][i % self.size]] for i in range(start, start + count)]

    def _replacement(self, seed: int, index: int) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            drawn = self._source.problems(seed + OTHER_STREAM * attempt, index, 1)
            if self._check(drawn).all():
                return drawn[0]
        raise ValueError(
            f"--prompt-length={self.length}: {ATTEMPTS} prompts in a row do not fit: raise it, or choose a task with "
            "shorter prompts"
        )


def fit(
    source: Source,
    render: Render,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int | None,
    held_out: int,
    policy: str,
) -> Fitted:
    """Checks the prompts of a task against their budget.

    Args:
      source: a `tasks.Task`. If its `size` is not None, `problems(0, 0, size)` must name each problem once.
      render: problems -> prompts as text.
      tokenizer: of the model.
      length: tokens that a prompt may have; default what the task needs, or else the longest prompt of those that are
        checked up front.
      held_out: problems of the evaluation.
      policy: "drop" leaves out what does not fit; "stop" raises.

    Raises:
      ValueError: for another policy or a length below 1; if a prompt does not fit and the policy is "stop"; if no
        training prompt fits, or too few held-out prompts.
    """
    if policy not in POLICIES:
        raise ValueError(f"--long-prompts={policy}: choose among {', '.join(POLICIES)}")
    if length is not None and length < 1:
        raise ValueError(f"--prompt-length={length}: must be at least 1")
    train = source.problems(0, 0, CHECKED if source.size is None else source.size)
    evaluated = source.held_out(held_out)
    length = length or source.prompt_length
    if length is None:
        length = max(token_counts(tokenizer, render([*train, *evaluated])))
    fitted = Fitted(source, render, tokenizer, length, policy)
    fitted._take_training(train)
    fitted._take_held_out(evaluated)
    return fitted
