"""The task `data:<file or hub name>`: rows of a data set with a prompt column, scored by named scorers."""

import json
from collections.abc import Callable, Sequence
from functools import partial

from jaxpg.tasks import dataset, draws, scorers
from jaxpg.tasks.dataset import Row
from jaxpg.tasks.find import Options
from jaxpg.tasks.task import Task

BUDGET = 256  # tokens of a completion


def task(options: Options) -> Task:
    """Reads a data set of the user's own.

    The held-out rows are those of --held-out-data, or else a tenth that a hash of the prompt picks. No training row has
    the prompt of a held-out row. The first scorer says what accuracy is.

    Raises:
      ValueError: for a scorer that does not exist or lacks its column, before anything is read; for data that cannot be
        read, or whose answers a scorer cannot read.
    """
    found = scorers.find(options.scorers or _default(options))
    _check_column(found, options)
    source = options.task.partition(":")[2]
    rows = _load(source, options, split=options.data_split, option="--task")
    if options.held_out_data is None:
        held_out = [row for row in rows if draws.is_held_out(text_of(row))]
    else:
        held_out = _load(options.held_out_data, options, split="test", option="--held-out-data")
    apart = {text_of(row) for row in held_out}
    train = [row for row in rows if text_of(row) not in apart]
    if not train:
        raise ValueError(f"--task={options.task}: all of its {len(rows)} rows are held out, there is none to train on")
    _check_answers(found, [*train, *held_out])
    first, _ = next(iter(found.values()))
    return Task(
        name=options.task,
        problems=partial(draws.pick, train),
        held_out=_held_out(held_out, options),
        ask=lambda row: row.prompt,
        scorers={name: (scorer.score, weight) for name, (scorer, weight) in found.items()},
        vote=first.vote,
        demonstrate=None if options.answer_column is None else (lambda row: str(row.answer)),
        size=len(train),
        max_new_tokens=BUDGET,
        chat=True,
    )


def text_of(row: Row) -> str:
    """Returns the prompt as one text, by which rows are split."""
    return row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True, ensure_ascii=False)


def _default(options: Options) -> tuple[str, ...]:
    if options.answer_column is None:
        raise ValueError(
            f"--task={options.task} has no answer column and no scorer: name scorers that need none by --scorers, e.g. "
            "regex:<pattern> or <module>:<function>"
        )
    return ("exact",)


def _check_column(found: dict, options: Options) -> None:
    for name, (scorer, _) in found.items():
        if scorer.reads is not None and options.answer_column is None:
            raise ValueError(f"--scorers={name} compares with an answer: name the column by --answer-column")


def _check_answers(found: dict, rows: Sequence[Row]) -> None:
    """Raises ValueError if a scorer can read no answer at all; where it cannot read single ones, it does not apply."""
    for name, (scorer, _) in found.items():
        if scorer.reads is not None and not any(scorer.reads(row.answer) for row in rows):
            raise ValueError(
                f"--scorers={name} can read no answer of the data, {rows[0].where} has {str(rows[0].answer)[:60]!r}: "
                "choose another scorer or --answer-column"
            )


def _load(source: str, options: Options, *, split: str, option: str) -> list[Row]:
    columns = {"prompt": options.prompt_column, "answer": options.answer_column}
    try:
        return dataset.load(source, **columns, split=split, config=options.data_config)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from error


def _held_out(rows: Sequence[Row], options: Options) -> Callable[[int], list[Row]]:
    def held_out(count: int) -> list[Row]:
        if count <= len(rows):
            return draws.pick(rows, 0, 0, count)  # in an order of its own, since files are often sorted
        source = options.held_out_data or f"a tenth of {options.task}"
        remedy = "ask for fewer" if options.held_out_data else "ask for fewer, or name a file by --held-out-data"
        raise ValueError(f"--held-out={count}: {source} has {len(rows)} held-out rows, {remedy}")

    return held_out
