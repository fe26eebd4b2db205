"""Countdown problems, and the calculator that reads what a model wrote."""

import time
from fractions import Fraction

import pytest

from jaxpg.tasks import countdown
from jaxpg.tasks.expressions import ExpressionError, evaluate


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("2+3*4", 14, (2, 3, 4)),
        ("10-4-3", 3, (10, 4, 3)),
        ("100/10/5", 2, (100, 10, 5)),
        ("7/2*2", 7, (7, 2, 2)),
        (" ( 1 + 2 ) / 3\n", 1, (1, 2, 3)),
        ("3\u00d74\u22128\u00f72", 8, (3, 4, 8, 2)),
        ("1/3", Fraction(1, 3), (1, 3)),
    ],
)
def test_expressions_are_computed_exactly(text, value, numbers):
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "()", "3 5", "(3", "3)", "3+", "*3", "-3", "3**99", "3//2", "9^9", "1.5", "1e9", "0x10", "1_000"],
        *[
            "\u0663+\u0664",
            "\u00b3",
            "3+\uff15",
            "__import__('os')",
            "3,5",
            "3=3",
            "1/0",
            "5/(2-2)",
            "2(3)",
            "3\x00",
            "3\n+4",
        ],
        *["007", "(" * 99 + "1" + ")" * 99, "9" * 10, "1+" * 100 + "1"],
    ],
)
def test_what_is_no_expression_is_an_error(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_bounds_hold_whatever_the_recursion_limit_or_the_length():
    with pytest.raises(ExpressionError, match="nested deeper than 20"):
        evaluate("(" * 21 + "1" + ")" * 21)
    assert evaluate("(" * 20 + "1" + ")" * 20).value == 1
    started = time.perf_counter()
    with pytest.raises(ExpressionError, match="1000000 characters"):
        evaluate("(" * 1_000_000)
    evaluate("/".join(["999999999"] * 20))
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize("level", countdown.LEVELS)
def test_every_problem_is_solved_by_its_answer_and_held_out_or_not(level):
    problems = countdown.problems(3, 0, 100, level=level)
    for problem in problems:
        assert len(problem.numbers) == countdown.LEVELS[level].count
        assert 1 <= problem.target <= countdown.MAX_TARGET and set(problem.prompt) <= set(countdown.ALPHABET)
        assert countdown.score(problem, problem.answer) == 1.0
        assert countdown.score(problem, f"so <answer>1</answer>, no: <answer> {problem.answer} </answer>.") == 1.0
        assert not countdown.is_held_out(problem.numbers[::-1], problem.target)
    held_out = countdown.problems(3, 0, 30, level=level, held_out=True)
    assert all(countdown.is_held_out(p.numbers[::-1], p.target) for p in held_out)
    assert all(countdown.score(p, p.answer) == 1.0 for p in held_out)
    assert len({p.target for p in problems}) > 30


def test_problems_are_a_function_of_seed_and_index():
    whole = countdown.problems(1, 0, 20)
    assert whole[5:15] == countdown.problems(1, 5, 10)
    assert whole != countdown.problems(2, 0, 20)
    assert [p.prompt for p in whole[:2]] == ["30,51,55=26", "21,33,87=75"], "a changed draw breaks every run's resume"


def test_each_number_is_used_exactly_once():
    problem = countdown.Problem("3,5,7,7=22", "3*5+7", 4, (3, 5, 7, 7), 22)
    assert countdown.score(problem, "3*5+7*7/7") == 0.0
    assert countdown.score(problem, "7+7+3+5") == 1.0
    assert countdown.score(problem, "3*5+7") == 0.0
    assert countdown.score(problem, "3*5+7", use_all=False) == 1.0
    assert countdown.score(problem, "22", use_all=False) == 0.0
    assert countdown.score(problem, "35-7-7", use_all=False) == 0.0, "digits are not glued together"
    assert countdown.score_format(problem, "7*7*3*5") == 1.0
    assert countdown.score_format(problem, "7*7*3*5*1") == 0.0


@pytest.mark.parametrize("text", ["", "<answer></answer>", "<answer>", "7+7+3+5=22", "7+7+3+5 <answer>7</answer>"])
def test_other_text_scores_nothing(text):
    assert countdown.score(countdown.Problem("3,5,7,7=22", "", 4, (3, 5, 7, 7), 22), text) == 0.0


def test_the_question_names_the_numbers_and_the_target():
    problem = countdown.problem(0, 0, level=4)
    assert all(str(n) in countdown.question(problem) for n in (*problem.numbers, problem.target))
    with pytest.raises(ValueError, match="level=9"):
        countdown.problem(0, 0, level=9)
