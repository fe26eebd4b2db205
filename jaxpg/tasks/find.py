"""The one place where tasks are found: by the options of the command line."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpg.tasks.task import Task

NAMES = (
    *("arithmetic", "wordy", "steps", "taste", "countdown", "calculator", "gsm8k"),
    *("reasoning_gym:<name>", "data:<file or hub name>"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that say what is asked."""

    # what is asked: arithmetic, wordy, steps, taste, countdown, calculator; with --model also gsm8k,
    # reasoning_gym:<name> and data:<file or hub name>
    task: str = "arithmetic"
    level: int = 2  # difficulty of arithmetic, steps and countdown, 1 to 5
    levels: tuple[int, ...] = ()  # several difficulties in turn, in place of --level
    spare: int = 0  # tokens that a completion of the small model may have beyond the longest right answer
    system: str | None = None  # system message, in place of the chat template's own
    gsm8k: Path | None = None  # folder with GSM8K's train.jsonl and test.jsonl; default the hub
    prompt_column: str = "prompt"  # column of --task data:... with texts or lists of messages
    answer_column: str | None = "answer"  # column of --task data:... that scorers compare with; None without one
    # scorers in place of the task's own, with weights, e.g. number@1.0 regex:<b>.*@0.1: exact, number, math-verify,
    # choice, regex:<pattern>, <module>:<function>, or task for the task's own; default exact for data
    scorers: tuple[str, ...] = ()
    held_out_data: str | None = None  # file or hub name (its split test) of held-out rows; default a tenth of the data
    data_split: str = "train"  # split of a data set on the hub
    data_config: str | None = None  # configuration of a data set on the hub


def find(options: Options, *, spoken: bool) -> "Task":
    """Finds the task that the options name, before any model is loaded.

    Args:
      options: see `Options`.
      spoken: questions in words, for a checkpoint; False: the terse form for the small model, where a token is
        a character and answers are exact.

    Raises:
      ValueError: naming the option that is wrong and what is allowed.
    """
    from jaxpg.tasks import columns, families  # late, since `jaxpg.tasks` itself loads neither JAX nor transformers

    name, _, rest = options.task.partition(":")
    makers = {
        **dict.fromkeys(("arithmetic", "wordy", "steps", "countdown"), families.leveled),
        **{"taste": families.tasteful, "calculator": families.conversation},
    }
    if options.task in makers:
        return families.with_scorers(makers[name](options, spoken=spoken), options, spoken=spoken)
    checkpoints_only = {"reasoning_gym": (families.puzzles, rest), "data": (columns.task, rest)}
    checkpoints_only["gsm8k"] = (families.grade_school, options.task == name)
    make, complete = checkpoints_only.get(name, (None, False))
    if not complete:
        raise ValueError(f"--task={options.task}: choose among {', '.join(NAMES)}")
    if not spoken:
        raise ValueError(
            f"--task={options.task} asks in words, and the small model knows single characters: name a checkpoint with "
            "--model"
        )
    found = make(options)
    return found if name == "data" else families.with_scorers(found, options, spoken=spoken)
