"""Seconds by part of a step."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Adds up the seconds of the parts of a step, and of the whole step."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Begins a step."""
        self._parts: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Counts the block's time for the part `name`."""
        started = time.perf_counter()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - started

    def row(self) -> dict[str, float]:
        """`seconds_<part>` of each part, and `seconds` of the whole step so far."""
        parts = {f"seconds_{name}": seconds for name, seconds in self._parts.items()}
        return parts | {"seconds": time.perf_counter() - self._started}
