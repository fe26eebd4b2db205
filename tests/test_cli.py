"""The command line: the user's mistakes are one line, everything else passes through."""

import dataclasses
import sys

import pytest

from jaxpg.run import cli


@dataclasses.dataclass(frozen=True)
class Options:
    """Options."""

    size: int = 1

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"--size={self.size}: must not be negative")


def nothing(_):
    pass


def launch(args, prepare=nothing, run=nothing):
    cli.main(Options, prepare, run, description="", args=args)


def refuse_zero(options):
    if options.size == 0:
        raise ValueError("--size=0: must be at least 1")
    return options.size


def test_what_is_prepared_is_run():
    seen = []
    launch(["--size", "3"], refuse_zero, seen.append)
    assert seen == [3]


@pytest.mark.parametrize(
    ("args", "words"), [(["--size", "0"], "--size=0"), (["--size", "x"], "x"), (["--sise", "1"], "--sise")]
)
def test_mistakes_are_one_line(args, words, capsys):
    with pytest.raises(SystemExit) as stop:
        launch(args, refuse_zero)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and words in error and len(error.splitlines()) == 1


def test_an_exit_of_prepare_is_its_own(capsys):
    """With its own code and message, not as if an option had not parsed."""

    def leave(options):
        print("no device found", file=sys.stderr)
        sys.exit(7)

    with pytest.raises(SystemExit) as stop:
        launch([], leave)
    assert stop.value.code == 7
    assert capsys.readouterr().err == "no device found\n"


def test_an_error_of_run_shows_its_traceback():
    def fail(_):
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        launch([], nothing, fail)


def test_help_ends_with_0():
    with pytest.raises(SystemExit) as stop:
        launch(["--help"])
    assert not stop.value.code
