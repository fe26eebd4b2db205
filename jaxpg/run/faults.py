"""What can go wrong in a long run, said so that it can be mended: preemption, numbers that are not finite, memory."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpg.parallel import distributed
from jaxpg.types import Weighted

NONFINITE = "nonfinite"  # the metric, of 0 or 1, by which an update says that it changed nothing


class Preempted(SystemExit):  # so that it ends the process with the code of SIGTERM and without a traceback
    """The machine is about to be taken away; all that was done is saved."""

    def __init__(self, done: int):
        super().__init__(128 + signal.SIGTERM)
        self.done = done


class NonFiniteError(RuntimeError):
    """Too many updates in a row would not have been finite."""


class Preemption:
    """Notes SIGTERM, which schedulers send some time before they kill, for the loop to look at between two steps.

    By a handler on the main thread, which stays until the outermost of nested blocks ends. One process that notes it
    has all of them stop after the same step. JAX's own service of preemption is not used: it wants numbers that rise
    from step to step, and here each phase counts from 1 and Orbax tells it numbers too.
    """

    def __init__(self):
        self._noticed = False
        self._before = None

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            return self
        outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(outer, Preemption):
            return outer
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def noticed(self) -> bool:
        """Says whether to save and stop now; all processes ask after the same step, and hear the same."""
        return distributed.any_of(self._noticed)

    def _note(self, *_) -> None:
        self._noticed = True


def split_skipped(parts: Sequence[dict[str, Weighted]]) -> tuple[list[dict[str, Weighted]], dict[str, int]]:
    """Tells the updates that were made from those that were skipped since they were not finite.

    Args:
      parts: the metrics of each update, on the host.

    Returns:
      The metrics of those that were made, of all if none was; and counts for the row of the step: `nonfinite_updates`,
      and `nonfinite/<metric>` for each metric that was not finite in one of them.
    """
    skipped = [metrics for metrics in parts if _skipped(metrics)]
    made = [metrics for metrics in parts if not _skipped(metrics)]
    bad = [name for metrics in skipped for name, value in metrics.items() if not np.isfinite(value.total)]
    counts = {f"{NONFINITE}/{name}": bad.count(name) for name in bad}
    return made or list(parts), {"nonfinite_updates": len(skipped)} | counts


class NonFiniteGuard:
    """Ends a run after too many steps in a row with an update that was skipped."""

    def __init__(self, limit: int):
        self._limit, self._length = limit, 0

    def look(self, row: dict[str, float]) -> None:
        """Takes the row of a step.

        Raises:
          NonFiniteError: naming what was not finite.
        """
        self._length = self._length + 1 if row.get("nonfinite_updates") else 0
        if self._length > self._limit:
            names = [name.removeprefix(f"{NONFINITE}/") for name in row if name.startswith(f"{NONFINITE}/")]
            raise NonFiniteError(
                f"{self._length} steps in a row had updates that were not finite and were skipped (max_nonfinite="
                f"{self._limit}), in the last one {', '.join(names) or 'the loss or the gradient'}. The parameters are "
                "those before them. Usual causes: too high a learning rate, rewards of a wild scale, log-probs of "
                "tokens that the sampler could not draw"
            )


def _skipped(metrics: dict[str, Weighted]) -> bool:
    return any(float(value.total) > 0 for name, value in metrics.items() if name.split("/")[-1] == NONFINITE)


def is_out_of_memory(error: Exception) -> bool:
    """Says whether a device had too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


@contextlib.contextmanager
def memory_advice(doing: str, knobs: str) -> Iterator[None]:
    """Adds to an error of the device's memory what it was doing, and which options need less."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(f"Out of memory while {doing}. What needs less: {knobs}")
        raise
