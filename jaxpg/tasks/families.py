"""The built-in tasks, each in a terse form for the small model and in words for a checkpoint."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from jaxpg.estimators import checks
from jaxpg.tasks import arithmetic, calculator, countdown, draws, gsm8k, gym, numbers, scorers, steps, taste, wordy
from jaxpg.tasks.find import Options
from jaxpg.tasks.task import Task

FAMILIES = {"arithmetic": arithmetic, "wordy": wordy, "steps": steps, "countdown": countdown}
# Tokens of a reply to a question in words.
SPOKEN_BUDGET = {"arithmetic": 14, "wordy": 14, "steps": 48, "countdown": 96}


def leveled(options: Options, *, spoken: bool) -> Task:
    """Problems of several difficulties in turn: arithmetic, wordy, steps or countdown.

    Raises:
      ValueError: for a level that the family lacks, or a negative `spare`.
    """
    name, family = options.task, FAMILIES[options.task]
    levels = options.levels or ((1,) if family is wordy else (options.level,))  # wordy has one level
    longest = max((family.longest_answer(level) for level in levels), key=len)
    task = Task(
        name=name,
        problems=partial(_in_turn, family, levels),
        held_out=partial(_held_out_in_turn, family, levels),
        ask=lambda problem: problem.prompt,
        scorers={"task": (family.score, 1.0)},
        demonstrate=(lambda problem: problem.demonstration) if family is wordy else (lambda problem: problem.answer),
        prompt_length=max(len(family.longest_prompt(level)) for level in levels),
        max_new_tokens=_terse_budget(longest, options),
        alphabet=family.ALPHABET,
        measures={"right_steps": steps.right_steps} if family is steps else {},
        step_rewards=steps.make_rewards if family is steps else None,
    )
    if not spoken:
        return task
    words = {
        "arithmetic": {"ask": _ask_sum, "scorers": {"task": (_last_number, 1.0)}, "vote": _vote_last},
        "wordy": {"ask": _ask_digit, "scorers": {"task": (_last_number, 1.0)}, "vote": _vote_last},
        "steps": {"ask": _ask_steps},
        "countdown": {
            "ask": countdown.question,
            "demonstrate": lambda problem: f"<answer>{problem.answer}</answer>",
        },
    }[name]
    return _in_words(task, max_new_tokens=SPOKEN_BUDGET[name], **words)


def tasteful(options: Options, *, spoken: bool) -> Task:
    """Sums answered with a taste: plain text in both forms, scored by the true preference."""
    task = Task(
        name="taste",
        problems=taste.demonstrated,
        held_out=taste.every_demonstrated,
        ask=lambda problem: problem.prompt,
        scorers={"task": (taste.utility, 1.0)},
        is_right=taste.is_right,
        vote=lambda text: text.rstrip("!"),
        demonstrate=lambda problem: problem.demonstration,
        prompt_length=len("9+9="),
        max_new_tokens=_terse_budget("18" + taste.MOST * "!", options),
        alphabet=taste.ALPHABET,
        measures={
            "utility": taste.utility,
            "right": lambda problem, text: float(taste.is_right(problem, text)),
            "marks": lambda problem, text: float(taste.marks(text)),
        },
    )
    if not spoken:
        return task
    _no_system(options, "asks in plain text, without the chat template")
    return _in_words(task, max_new_tokens=task.max_new_tokens + 2, chat=False)


def conversation(options: Options, *, spoken: bool) -> Task:
    """Products with a calculator at hand."""
    task = Task(
        name="calculator",
        problems=calculator.problems,
        held_out=calculator.held_out_set,
        ask=lambda problem: problem.prompt,
        scorers={"task": (calculator.score, 1.0)},
        vote=calculator.final,
        demonstrate=calculator.demonstrate,
        prompt_length=len(arithmetic.longest_prompt(calculator.LEVEL)),
        max_new_tokens=_terse_budget(calculator.LONGEST, options),
        alphabet=calculator.ALPHABET,
        measures={"calls": calculator.calls},
        environment=calculator.environment,
        max_turns=2,  # a call and an answer
        turn_ends=(calculator.END_OF_CALL,),
    )
    if not spoken:
        return task
    return _in_words(
        task,
        ask=calculator.question,
        scorers={"task": (calculator.score_number, 1.0)},
        vote=lambda text: _vote_last(calculator.final(text)),
        demonstrate=calculator.demonstrate_in_words,
        max_new_tokens=96,
        environment=calculator.environment_in_words,
        max_turns=3,  # one call may go wrong
    )


def grade_school(options: Options) -> Task:
    """GSM8K, in words; its test set is held out.

    Raises:
      ValueError: if the data cannot be read.
    """
    folder = options.gsm8k
    try:
        train = gsm8k.load(folder / "train.jsonl") if folder else gsm8k.load()
        test = gsm8k.load(folder / "test.jsonl") if folder else gsm8k.load(split="test")
    except OSError as error:
        raise ValueError(f"--task=gsm8k: {error}; name a folder with train.jsonl and test.jsonl by --gsm8k") from error

    def held_out(count: int) -> Sequence[gsm8k.Problem]:
        if count > len(test):
            raise ValueError(f"count={count}: the test set has {len(test)} problems, ask for fewer")
        return test[:count]

    return Task(
        name="gsm8k",
        problems=partial(draws.pick, train),
        held_out=held_out,
        ask=lambda problem: f"{problem.prompt}\n{gsm8k.INSTRUCTION}",
        scorers={"task": (gsm8k.score, 1.0)},
        vote=lambda text: _value(numbers.answer(text)),
        demonstrate=lambda problem: f"{problem.solution}\n#### {problem.answer}",
        size=len(train),
        max_new_tokens=512,
        chat=True,
    )


def puzzles(options: Options) -> Task:
    """A task of the package reasoning-gym, in words.

    Raises:
      ValueError: for a name that the package does not know, or without the package.
    """
    name = options.task.partition(":")[2]
    try:
        [first] = gym.problems(name, 0, 0, 1)
    except ImportError as error:
        raise ValueError(f"--task={options.task}: {error}") from error

    def held_out(count: int) -> list[gym.Problem]:
        def draw(index: int) -> gym.Problem:
            return gym.problems(name, 0, index, 1, held_out=True)[0]

        return draws.held_out_set(draw, count, of=f"reasoning-gym's {name!r}")

    return Task(
        name=options.task,
        problems=partial(gym.problems, name),
        held_out=held_out,
        ask=lambda problem: f"{problem.prompt}\n{gym.INSTRUCTION}",
        scorers={"task": (gym.score, 1.0)},
        demonstrate=None if first.answer is None else (lambda problem: f"<answer>{problem.answer}</answer>"),
        max_new_tokens=256,
        chat=True,
    )


def with_scorers(task: Task, options: Options, *, spoken: bool) -> Task:
    """The task with the scorers of --scorers in place of its own, which has the name `task`; accuracy stays its own.

    Raises:
      ValueError: as `scorers.find`; for options of the form of question that this one is not.
    """
    if not spoken:
        _no_system(options, "needs a checkpoint: the small model has no chat template")
    if not options.scorers:
        return task
    [(own, _)] = task.scorers.values()
    found = scorers.find(options.scorers, own={"task": scorers.Named(own)})
    chosen = {name: (scorer.score, weight) for name, (scorer, weight) in found.items()}
    return dataclasses.replace(task, scorers=chosen)


def _in_turn(family: ModuleType, levels: Sequence[int], seed: int, start: int, count: int) -> list[Any]:
    n = len(levels)
    return [family.problem(seed, i // n, level=levels[i % n]) for i in range(start, start + count)]


def _held_out_in_turn(family: ModuleType, levels: Sequence[int], count: int) -> list[Any]:
    sets = [family.held_out_set(-(-count // len(levels)), level=level) for level in levels]
    return [problem for together in zip(*sets, strict=True) for problem in together][:count]


def _terse_budget(longest: str, options: Options) -> int:
    """Characters of the longest completion, a stop token, and what the options spare."""
    checks.at_least("--spare", options.spare, 0)
    return len(longest) + 1 + options.spare


def _in_words(task: Task, **changes) -> Task:
    """The form for a checkpoint, whose tokenizer decides how long a prompt is."""
    form = {"prompt_length": None, "alphabet": None, "chat": True}
    if "scorers" in changes:
        form["is_right"] = None  # the first of the new scorers
    return dataclasses.replace(task, **form | changes)


def _no_system(options: Options, why: str) -> None:
    if options.system is not None:
        raise ValueError(f"--system={options.system!r}: --task={options.task} {why}")


def _ask_sum(problem: arithmetic.Problem) -> str:
    return f"What is {problem.prompt[:-1]}? Answer with just the number."


def _ask_digit(problem: wordy.Problem) -> str:
    return f"What is the last digit of {problem.prompt[:-1]}? Answer with just the digit."


def _ask_steps(problem: steps.Problem) -> str:
    return (
        f"Add {problem.prompt[:-1]} from left to right. Answer with just the running sums, separated by semicolons "
        "without spaces. For 2+3+4 that is 5;9"
    )


def _last_number(problem: Any, reply: str) -> float:
    return float(numbers.equal(numbers.last(reply), numbers.read(problem.answer)))


def _vote_last(reply: str):
    return _value(numbers.last(reply))


def _value(quantity: numbers.Quantity | None):
    return None if quantity is None else quantity.value
