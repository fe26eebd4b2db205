"""Any data set with a prompt column: JSON lines, Parquet, or a name on the Hugging Face hub."""

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

Prompt = str | list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem of a data set.

    Attributes:
      prompt: a text, or the messages of a conversation, each with "role" and "content".
      answer: what the answer column holds, None without one.
      fields: all columns, for a scorer that wants more.
      where: the file and the line, or the row counted from 0.
    """

    prompt: Prompt
    answer: Any
    fields: dict[str, Any]
    where: str


def load(
    source: str | os.PathLike,
    *,
    prompt: str = "prompt",
    answer: str | None = "answer",
    split: str = "train",
    config: str | None = None,
) -> list[Row]:
    """Reads all rows of a data set.

    Args:
      source: a file that ends in .jsonl, .json (one object a line in both) or .parquet; anything else goes to
        `datasets.load_dataset`, e.g. a name on the hub.
      prompt: the column of the prompts, texts or conversations.
      answer: the column of what the scorer compares with; None without one.
      split: for `datasets`.
      config: for `datasets`, the data set's configuration.

    Returns:
      The rows in their order; blank lines are left out.

    Raises:
      FileNotFoundError: if the file does not exist.
      ValueError: naming file and line (or row) of a row that is malformed, or the source if it has no rows.
    """
    kind = os.path.splitext(source)[1].lower()
    if kind in (".jsonl", ".json"):
        found = _json_lines(source)
    elif kind == ".parquet":
        found = _parquet(source)
    else:
        found = _hub(os.fspath(source), config, split)
    rows = [_row(fields, where, prompt, answer) for where, fields in found]
    if not rows:
        raise ValueError(f"{source} has no rows")
    return rows


def _row(fields: Any, where: str, prompt: str, answer: str | None) -> Row:
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {_short(fields)} is no object with columns")
    for column in filter(None, (prompt, answer)):
        if fields.get(column) is None:
            state = "is null" if column in fields else f"is missing; the row has {', '.join(map(repr, fields))}"
            raise ValueError(f"{where}: column {column!r} {state}")
    if not _is_prompt(fields[prompt]):
        raise ValueError(
            f"{where}: column {prompt!r} holds {_short(fields[prompt])}: must be a text that is not empty, "
            "or a list of messages with the texts 'role' and 'content'"
        )
    return Row(fields[prompt], fields[answer] if answer else None, fields, where)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    return isinstance(value, str) and bool(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _json_lines(path: str | os.PathLike) -> Iterator[tuple[str, Any]]:
    # In binary: a line ends at \n alone, and text that is no UTF-8 is told with its line.
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error or 'nested too deeply'}; the line is {_short(line)}") from error


def _parquet(path: str | os.PathLike) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    with open(path, "rb") as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
                for fields in batch.to_pylist():
                    yield f"{path}: row {row}", fields
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: row {row}: {error}") from error


def _hub(name: str, config: str | None, split: str) -> Iterator[tuple[str, Any]]:
    import datasets

    for row, fields in enumerate(datasets.load_dataset(name, config, split=split)):
        yield f"{name}[{split}]: row {row}", fields


def _short(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"
