"""Numbers in free text, GSM8K's problems and their scorer."""

import os
import time
from fractions import Fraction

import pytest

from jaxpg.tasks import gsm8k, numbers

HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("72", 72), ("1,234", 1234), ("1,234,567.50", Fraction("1234567.5")), ("$5.00", 5), (".5", HALF), ("5.", 5)],
        *[("-3", -3), ("\u22123", -3), ("-$3", -3), ("$-3", -3), ("\u20ac7", 7), ("7 apples", 7), ("12kg", 12)],
        *[("1/2", HALF), ("-1/2", -HALF), ("1 1/2", 1 + HALF), ("3/0", None), ("\\frac{3}{0}", None)],
        *[("\\frac{1}{2}", HALF), ("\\dfrac12", HALF), ("-\\frac{1}{2}", -HALF), ("1\\frac{1}{2}", 1 + HALF)],
        *[("\\frac{-1}{2}", -HALF), ("\\$1{,}234", 1234), ("1,\\!234", 1234), ("x = 5\\text{ cm}", 5)],
        *[("90^\\circ", 90), ("25 cm^2", 25), ("**5**", 5), ("5 dollars per hour.", 5), ("\\(5\\)", 5), ("50\\%", 50)],
        *[("", None), ("none", None), ("5 and 6", None), ("(1,2)", None), ("1,23", None), ("2+3", None)],
        *[("\\sqrt{5}", None), ("2\\pi", None), ("10^6", None), ("2**10", None), ("1e9", None), ("1e999999999", None)],
        *[("\u0665", None), ("\uff15", None), ("\u00bd", None), ("x2", None), ("1.2.3", None), ("9" * 51, None)],
        *[("nan", None), ("inf", None), ("7" + " " * 600, None), ("0x10", None), ("1_000", None)],
    ],
)
def test_a_text_that_states_one_number(text, value):
    found = numbers.read(text)
    assert found == (None if value is None else (value, "%" in text))


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("3 + 4 = 7\n#### 7", 7),
        ("#### 6\nno, wait\n#### 7 apples.", 7),
        ("#### Step 1: add 3 and 4\nThe answer is \\boxed{7}.", 7),
        ("#### 7\nso \\boxed{8}, 9", 7),
        ("\\boxed{5} then \\boxed{\\frac{14}{2}} of 9", 7),
        ("\\boxed{\\text{{7} apples}} 9", 7),
        ("\\boxed{ 7", 7),
        ("\\boxed{x} or 7", 7),
        ("She has $3.50 + $3.50 = $7.00.", 7),
        ("It is 10-7", 7),
        ("it fell by -7.", -7),
        ("area: 7 m^2", 7),
        ("of 10, exactly 1,007!", 1007),
        ("", None),
        ("#### ", None),
        ("no digits", None),
        ("\u0667", None),
    ],
)
def test_the_answer_of_a_completion(completion, value):
    found = numbers.answer(completion)
    assert (found and found.value) == value


def test_strict_takes_marked_answers_alone():
    assert numbers.answer("it is 7", strict=True) is None
    assert numbers.answer("#### 7", strict=True).value == 7
    assert numbers.answer("\\boxed{7}", strict=True).value == 7


@pytest.mark.parametrize(
    ("gold", "completion", "score"),
    [
        *[("1,234", "1234", 1), ("1234", "#### $1,234.00", 1), ("5", "$5.00", 1), ("0.5", "\\boxed{\\frac{1}{2}}", 1)],
        *[("50", "50%", 1), ("50%", "50", 1), ("0.5", "50%", 1), ("50", "0.5", 0), ("-3", "3", 0), ("3", "-3", 0)],
        *[("0.1", "0.10", 1), ("3", "3.0001", 0), ("10", "1", 0), ("0", "", 0), ("12", "1 2", 0)],
    ],
)
def test_scores_compare_numbers_exactly(gold, completion, score):
    assert gsm8k.score(gsm8k.Problem("", gold, "", ""), completion) == score


@pytest.mark.parametrize(
    "piece", ["9", ",999", "1,", "#### ", "\\boxed{", "{", "-", "$", "1/", " 1", "\\frac{1}", "1."]
)
def test_long_text_takes_linear_time(piece):
    text = piece * (100_000 // len(piece))
    started = time.perf_counter()
    numbers.answer(text)
    numbers.read(text)
    assert time.perf_counter() - started < 1.0


def test_problems_come_from_a_file_and_a_bad_answer_names_its_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "3+4?", "answer": "easy\\n#### 7"}\n{"question": "q", "answer": "#### many"}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl:2: column 'answer' ends with '#### many'"):
        gsm8k.load(path)
    path.write_text('{"question": "3+4?", "answer": "easy\\n#### 7"}\n')
    assert gsm8k.load(path) == [gsm8k.Problem("3+4?", "7", "easy", f"{path}:1")]


@pytest.mark.skipif("JAXPG_GSM8K" not in os.environ, reason="JAXPG_GSM8K names no folder with train.jsonl, test.jsonl")
def test_every_gold_answer_of_the_real_data_scores_one():
    folder = os.environ["JAXPG_GSM8K"]
    problems = gsm8k.load(f"{folder}/train.jsonl") + gsm8k.load(f"{folder}/test.jsonl")
    assert len(problems) == 7473 + 1319
    for problem in problems:
        assert gsm8k.score(problem, f"{problem.solution}\n#### {problem.answer}", strict=True) == 1.0, problem.where
        assert gsm8k.score(problem, f"{problem.solution}\nThe answer is {problem.answer}.") == 1.0, problem.where
        assert gsm8k.score(problem, f"\\boxed{{{problem.answer}}}", strict=True) == 1.0, problem.where
        wrong = int(problem.answer.replace(",", "")) + 1
        assert gsm8k.score(problem, f"{problem.solution}\n#### {wrong}") == 0.0, problem.where
