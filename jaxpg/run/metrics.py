"""From device sums to numbers, and numbers to a JSONL file that can be rewound."""

import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxpg.run.faults import split_skipped
from jaxpg.types import Weighted


def add(total: dict[str, Weighted], more: dict[str, Weighted]) -> dict[str, Weighted]:
    """Adds the metrics of two parts, name by name."""
    return {name: total[name] + value for name, value in more.items()}


def to_floats(metrics: dict[str, Weighted]) -> dict[str, float]:
    """Divides each total by its weight, on the host, after a single transfer."""
    fetched = jax.device_get(metrics)
    return {name: float(value.total) / float(value.weight) if value.weight else 0.0 for name, value in fetched.items()}


def sum_up(parts: Sequence[dict[str, Weighted]]) -> dict[str, float]:
    """The means over the updates of a step that were made, and how many were skipped (`faults.split_skipped`).

    They are added up on the host: operations of many devices between the updates cost time, and have locked up eight
    virtual CPU devices in a collective of the update.
    """
    made, skipped = split_skipped(jax.device_get(list(parts)))
    return to_floats(functools.reduce(add, made)) | skipped


def numbers(row: Mapping[str, object]) -> dict[str, object]:
    """Turns a row's `Weighted` and arrays into numbers, and counts an update that its "nonfinite" says was skipped."""
    weighted = {name: value for name, value in row.items() if isinstance(value, Weighted)}
    plain = jax.device_get({name: value for name, value in row.items() if name not in weighted})
    plain = {name: _number(name, value) for name, value in plain.items()}
    return (sum_up([weighted]) if weighted else {}) | plain


def _number(name: str, value):
    """A number of Python for an array of one, and anything else as it is."""
    if not isinstance(value, np.ndarray | np.generic):
        return value
    if value.size != 1:
        raise ValueError(f"row[{name!r}] has shape {value.shape}: must be a number, e.g. the mean")
    return value.item()


class JsonlWriter:
    """Appends one JSON object a line. NaN and infinities, which JSON lacks, are written as null."""

    def __init__(self, path: str | Path | None, *, offset: int | None = 0):
        """Opens the file and cuts it after `offset` bytes, so that a resumed run repeats no line.

        Args:
          path: of the file; made if it is not there. None: nowhere, for processes that leave it to another one.
          offset: bytes to keep, as `offset` said when the checkpoint was made; None keeps all.
        """
        self._file = tempfile.TemporaryFile() if path is None else open(path, "a+b")  # noqa: SIM115 - until closed
        if offset is not None:
            self.rewind(offset)
        self._file.seek(0, 2)

    def rewind(self, offset: int) -> None:
        """Cuts the file after `offset` bytes, if it has more."""
        self._file.seek(0, 2)
        self._file.truncate(min(offset, self._file.tell()))
        self._file.seek(0, 2)

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, row: dict) -> None:
        """Appends a row and hands it to the operating system."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | Path) -> list[dict]:
    """Reads all rows of a JSONL file; what was not finite is NaN."""
    rows = (json.loads(line) for line in Path(path).read_text().splitlines())
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
