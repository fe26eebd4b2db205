"""Products with a calculator at hand: a policy may write a call, "[37*48]", and reads the result.

A turn of the policy ends with "]", which calls the calculator, or with a stop token, which ends the conversation. The
small model is asked "37*48=" and reads "1776|". A model that speaks is asked in words and reads "=1776". Nobody rewards
a call: the score is that of the final answer.

What the calculator says is read, but is no action: neither phase puts a gradient on its tokens.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence

from jaxpg.tasks import arithmetic, draws, numbers

LEVEL = 5  # of `arithmetic`: products of two-digit numbers
ALPHABET = arithmetic.ALPHABET + "[]|"
END_OF_CALL, END_OF_RESULT = "]", "|"
CALL = re.compile(r"\[([0-9]{1,3})([*+-])([0-9]{1,3})\]")
OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}
LONGEST = "[99*99]9801|9801"  # the longest demonstration

Segments = list[tuple[str, bool]]  # what was said, and whether the policy said it
Environment = Callable[["Problem", Sequence[int]], tuple["Problem", list[int], float, bool]]


@dataclasses.dataclass(frozen=True)
class Problem(arithmetic.Problem):
    """A product, and whether its demonstration calls the calculator."""

    calls: bool = False


def problems(seed: int, start: int, count: int) -> list[Problem]:
    """Draws training problems start … start + count − 1 of the stream `seed`; half of them demonstrate a call."""
    drawn = arithmetic.problems(seed, start, count, level=LEVEL)
    return [_problem(p, f"calculator/{seed}/{start + i}") for i, p in enumerate(drawn)]


def held_out_set(count: int) -> list[Problem]:
    """Draws `count` different held-out problems.

    Raises:
      ValueError: if there are fewer.
    """
    return [_problem(p, f"calculator/{p.prompt}") for p in arithmetic.held_out_set(count, level=LEVEL)]


def question(problem: Problem) -> str:
    """Asks in words, for a model that speaks."""
    return (
        f"What is {problem.prompt[:-1]}? You have a calculator: write a product, sum or difference of two whole "
        "numbers in brackets, such as [12*34], and its result follows. End with the answer."
    )


def calculate(call: str) -> str:
    """Answers a call such as "[37*48]"; anything else than two numbers of up to three digits gets an empty answer."""
    found = CALL.fullmatch(call)
    return str(OPERATIONS[found[2]](int(found[1]), int(found[3]))) if found else ""


def score(problem: Problem, completion: str) -> float:
    """Returns 1.0 if what follows the last call is the answer to the letter, else 0.0."""
    return float(final(completion) == problem.answer)


def score_number(problem: Problem, completion: str) -> float:
    """Returns 1.0 if the last number that follows the last call is the answer, else 0.0."""
    return float(numbers.equal(numbers.last(final(completion)), numbers.read(problem.answer)))


def final(completion: str) -> str:
    """Returns the text of the last turn: what the policy wrote after its last call."""
    return completion.rpartition(END_OF_CALL)[2]


def calls(problem: Problem, completion: str) -> float:
    """Returns 1.0 if the completion has a call that the calculator answers, else 0.0."""
    return float(CALL.search(completion) is not None)


def demonstrate(problem: Problem) -> Segments:
    """Writes the conversation that the small model learns from."""
    return _demonstration(problem, END_OF_RESULT)


def demonstrate_in_words(problem: Problem) -> Segments:
    """Writes the conversation that a model that speaks learns from."""
    return _demonstration(problem, "\n", before="=")


def environment(tokenizer, stop_tokens: Sequence[int] = ()) -> Environment:
    """Builds the environment of the small model, which reads "1776|"; see `sampling.converse`.

    Args:
      tokenizer: any of `transformers`.
      stop_tokens: ids that end the last turn and are no text; the tokenizer's special tokens never are.
    """
    return _environment(tokenizer, stop_tokens, score, "{}" + END_OF_RESULT)


def environment_in_words(tokenizer, stop_tokens: Sequence[int] = ()) -> Environment:
    """Builds the environment of a model that speaks, which reads "=1776", or "=error" after a call of another form."""
    return _environment(tokenizer, stop_tokens, score_number, "={}\n", error="error")


def _environment(tokenizer, stop_tokens, judge: Callable, observation: str, error: str = "") -> Environment:
    def step(problem: Problem, tokens: Sequence[int]):
        kept = [token for token in tokens if token not in stop_tokens]
        text = tokenizer.decode(kept, skip_special_tokens=True)
        # The turn ends at its first "]", so a call is all that a turn with one can be. One token may hold more text.
        start, end = text.rfind("["), text.rfind(END_OF_CALL)
        if end < 0:
            return problem, [], judge(problem, text), True
        result = calculate(text[max(start, 0) : end + 1]) or error
        said = tokenizer(observation.format(result), add_special_tokens=False)["input_ids"]
        return problem, said, 0.0, False

    return step


def _demonstration(problem: Problem, after: str, *, before: str = "") -> Segments:
    if not problem.calls:
        return [(problem.answer, True)]
    call = f"[{problem.prompt[:-1]}]"
    return [(call, True), (before + calculate(call) + after, False), (problem.answer, True)]


def _problem(product: arithmetic.Problem, text: str) -> Problem:
    return Problem(product.prompt, product.answer, product.level, calls=draws.number(f"{text}/calls") % 2 == 1)
