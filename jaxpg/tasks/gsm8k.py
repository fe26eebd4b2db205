"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answer is a number."""

import dataclasses
import os

from jaxpg.tasks import dataset, numbers

INSTRUCTION = "Think step by step, then give the final number alone on a last line after ####."


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question, its answer "72", the solution in words, and the row it comes from."""

    prompt: str
    answer: str
    solution: str
    where: str


def load(source: str | os.PathLike = "openai/gsm8k", *, split: str = "train") -> list[Problem]:
    """Reads the problems.

    Args:
      source: JSON lines or Parquet with the columns "question" and "answer", or a name on the hub.
      split: of the hub's data set.

    Raises:
      FileNotFoundError: if the file does not exist.
      ValueError: naming the file and the line of an answer without "#### " and a number.
    """
    rows = dataset.load(source, prompt="question", answer="answer", split=split, config="main")
    return [_problem(row) for row in rows]


def score(problem: Problem | dataset.Row, completion: str, *, strict: bool = False) -> float:
    r"""Returns 1.0 if the completion's answer is the number wanted, else 0.0.

    Args:
      problem: anything with an `answer` that states a number.
      completion: its answer is what stands after "####", else in \boxed{}, else its last number.
      strict: without the last number, so that an answer must be marked as one.
    """
    return float(numbers.equal(numbers.answer(completion, strict=strict), numbers.read(str(problem.answer))))


def _problem(row: dataset.Row) -> Problem:
    text = row.answer if isinstance(row.answer, str) else ""
    solution, marker, answer = text.rpartition("####")
    if not marker or numbers.read(answer) is None:
        raise ValueError(f"{row.where}: column 'answer' ends with {text[-40:]!r}: must end with '#### ' and a number")
    return Problem(prompt=row.prompt, answer=answer.strip(), solution=solution.strip(), where=row.where)
