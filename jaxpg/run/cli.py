"""The command line of an experiment: options from a dataclass, and mistakes told in one line."""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tyro

from jaxpg.parallel import distributed

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

    An option that cannot be parsed, or a ValueError in `prepare`, is the user's mistake: it is printed as one line and
    the process exits with 2, before anything is compiled or written. So do all processes of the run together, and also
    where their options differ. Any other error is ours and shows its traceback; on it, and on Ctrl-C, a process ends at
    once, and the others with an error that says so.

    Args:
      config: dataclass of options.
      prepare: checks everything and builds what `run` needs.
      run: does the work.
      description: shown by --help.
      args: default the command line.
    """
    try:
        try:
            options = _parse(config, description, args)
            _join_others(options)
            with distributed.raise_together():
                prepared = prepare(options)
        except ValueError as error:
            _refuse(str(error))
        run(prepared)
    except (Exception, KeyboardInterrupt) as error:
        if distributed.single_process():
            raise
        traceback.print_exc()
        sys.stdout.flush()
        # An orderly exit waits for the other processes, and they wait for what this one owes them.
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _parse(config: type[Config], description: str, args: list[str] | None) -> Config:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(config, description=description, args=args)
    except SystemExit as stop:  # --help ends here too, with code 0 and nothing on stderr
        if stop.code:
            _refuse(_one_line(said.getvalue()))
        raise


def _join_others(options) -> None:
    """Becomes one of several processes, if there are options that say so; before anything else of JAX."""
    if isinstance(options, distributed.Options):
        distributed.initialize(
            detect=options.distributed,
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
        )
        distributed.check_same({"program": Path(sys.argv[0]).name} | vars(options))


def _refuse(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _one_line(box: str) -> str:
    """Takes the words out of tyro's framed message, without its help texts."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    sections = re.split("─{3,}", " ".join(line for line in lines if line))
    kept = [part.strip(" .") for part in sections if not part.strip().startswith(("For full", "Argument helptext"))]
    return "; ".join([*kept, "--help lists all options"])
