"""The tasks of the package reasoning-gym, by name, each with the package's own scorer."""

import dataclasses
import functools
from typing import Any

from jaxpg.tasks import draws

# Positions to draw from. A few tasks prepare all of theirs beforehand, in seconds for so many, or refuse more.
_SIZE = 2**31
_PREPARED = {"acre": 20_000, "gsm_symbolic": 20_000, "list_functions": 20_000, "word_ladder": 20_000}

INSTRUCTION = "Give the final answer alone in <answer> </answer> tags."


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question, one right answer if the task tells it, and what the package's scorer reads besides."""

    prompt: str
    answer: str | None
    task: str
    entry: dict[str, Any]


def problems(name: str, seed: int, start: int, count: int, *, held_out: bool = False, **options) -> list[Problem]:
    """Draws problems start … start + count − 1 of the stream `seed`; each is a pure function of seed and index.

    Args:
      name: of the task, e.g. "chain_sum".
      seed: which stream.
      start: where in the stream.
      count: how many.
      held_out: from the tenth of all questions that is held out, instead of the rest.
      **options: of the task's configuration, e.g. min_digits=2.

    Raises:
      ImportError: without the package: it comes with the extra `reasoning`.
      ValueError: for a name, or options, that the package does not know; if the task draws no question of this side.
    """
    task = _task(name, options)
    return [_draw(task, name, f"{name}/{seed}/{start + i}", held_out) for i in range(count)]


def score(problem: Problem, completion: str) -> float:
    """Returns what the package's scorer says of the text between <answer> and </answer>, or of all text without them.

    It runs code of the package on text of the model: `scoring.Isolated(gym.score)` bounds its time.
    """
    answer = _package().utils.extract_answer(completion)
    return float(_scorer(problem.task)(completion.strip() if answer is None else answer, problem.entry))


def _draw(task: Any, name: str, text: str, held_out: bool) -> Problem:
    # Item i of the package's seed s is item i − 1 of seed s + 1: neighbouring seeds would share their problems, and
    # a test set drawn with another seed would be the training set. Hence one seed, and positions far apart.
    for attempt in range(1000):
        entry = task[draws.number(f"{text}/{attempt}") % task.size]
        if draws.is_held_out(f"{name}/{entry['question']}") == held_out:
            return Problem(prompt=entry["question"], answer=entry["answer"], task=name, entry=entry)
    side = "held out" if held_out else "not held out"
    raise ValueError(f"reasoning-gym's {name!r} drew no question in 1000 that is {side}: it has too few of them")


def _task(name: str, options: dict[str, Any]) -> Any:
    """Makes the task, once for a name and options."""
    key = name, repr(sorted(options.items()))
    if key not in _made:
        _made[key] = _make(name, options)
    return _made[key]


_made: dict[tuple[str, str], Any] = {}


def _make(name: str, options: dict[str, Any]) -> Any:
    factory = _package().factory
    if name not in factory.DATASETS:
        raise ValueError(f"name={name!r}: reasoning-gym knows {', '.join(sorted(factory.DATASETS))}")
    if "size" in options:
        raise ValueError(f"size={options['size']}: problems(name, seed, start, count) has a count instead")
    try:
        return factory.create_dataset(name, **options, seed=0, size=_PREPARED.get(name, _SIZE))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {name!r} refuses the options {options}: {error}") from error


@functools.cache
def _scorer(name: str):
    return _package().get_score_answer_fn(name)


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(f"{error}: reasoning-gym comes with pip install 'jaxpg[reasoning]'") from error
    return reasoning_gym
