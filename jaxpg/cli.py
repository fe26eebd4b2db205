"""The command line of an experiment: options from a dataclass, and mistakes told in one line."""

import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

Config = TypeVar("Config")
Prepared = TypeVar("Prepared")


def main(
    config: type[Config],
    prepare: Callable[[Config], Prepared],
    run: Callable[[Prepared], None],
    *,
    description: str,
    args: list[str] | None = None,
) -> None:
    """Parses options, prepares and runs.

    A ValueError in `prepare` is the user's mistake: it is printed as one line and the process exits with 2, before
    anything is compiled or written. An error in `run` is ours and shows its traceback.

    Args:
      config: dataclass of options.
      prepare: checks everything and builds what `run` needs.
      run: does the work.
      description: shown by --help.
      args: default the command line.
    """
    options = tyro.cli(config, description=description, args=args)
    try:
        prepared = prepare(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run(prepared)
