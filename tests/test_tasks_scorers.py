"""Scorers by name: what each compares, its weight, and mistakes in one line."""

import json
import sys
from types import SimpleNamespace

import pytest

from jaxpg.tasks import scorers


def score(name, answer, completion):
    [(scorer, _)] = scorers.find([name]).values()
    return scorer.score(SimpleNamespace(answer=answer), completion)


@pytest.mark.parametrize(
    ("name", "answer", "completion", "value"),
    [
        *[("exact", " a b", "a b\n", 1), ("exact", 5, "5", 1), ("exact", "a", "A", 0), ("exact", "a", "a.", 0)],
        *[("number", "1,000", "so it is 1000.", 1), ("number", "7", "7 or 8", 0), ("number", 0.5, "\\boxed{1/2}", 1)],
        *[("number", "3 + 4 = 7\n#### 7", "7", 1), ("number", "two", "2", None), ("number", "7", "none", 0)],
        *[("choice", "B", "The answer is B.", 1), ("choice", "(B)", "A or B? B", 1), ("choice", "B. Paris", "(B)", 1)],
        *[("choice", "B", "\\boxed{B}, not A", 1), ("choice", "B", "\\boxed{\\text{B}} A", 1), ("choice", "B", "b", 0)],
        *[("choice", "B", "Boston", 0), ("choice", "B", "B, I think", 1), ("choice", "B", "AB", 0)],
        *[("choice", "I", "The answer is I", 1), ("choice", "Paris", "B", None), ("choice", 3, "B", None)],
        *[("regex:^<b>.*</b>$", "", "<b>\n</b>", 1), ("regex:a:b@c", "", "a:b@c", 1), ("regex:a+", "", "b", 0)],
        ("json:loads", "", None, None),
    ],
)
def test_what_a_completion_is_worth(name, answer, completion, value):
    if name == "json:loads":
        assert scorers.find([name])[name][0].score is json.loads
    else:
        assert score(name, answer, completion) == value


def test_several_scorers_keep_their_order_and_weights():
    found = scorers.find(["number@1.0", "regex:<think>.*@0.1", "exact", "choice@-2e-1"])
    assert {name: weight for name, (_, weight) in found.items()} == {
        **{"number": 1.0, "regex:<think>.*": 0.1, "exact": 1.0, "choice": -0.2}
    }
    assert [scorer.reads is None for scorer, _ in found.values()] == [False, True, False, False]


def test_votes_are_equal_where_answers_are():
    votes = {name: scorers.find([name])[name][0].vote for name in ("exact", "number", "choice")}
    assert votes["number"]("it is 1,000.") == votes["number"]("#### 1000") and votes["number"]("none") is None
    assert votes["choice"]("(B)") == votes["choice"]("so B") == "B" and votes["choice"]("?") is None
    assert votes["exact"](" a ") == "a"


def test_a_function_of_ones_own_is_imported_from_the_folder_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "scorer_of_mine.py").write_text("def length(problem, text):\n    return len(text) / problem.answer\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert score("scorer_of_mine:length", 4, "abc") == 0.75


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["nubmer"], "--scorers=nubmer: choose among task, exact, number"),
        (["regex:"], "--scorers=regex:: choose among"),
        (["regex:("], r"--scorers=regex:\(: "),
        (["exact", "exact@2"], "'exact' stands there twice"),
        (["exact@nan"], "the weight must be finite"),
        (["no_such_module:f"], "--scorers=no_such_module:f: No module named 'no_such_module'; choose among"),
        (["json:f"], "--scorers=json:f: module 'json' has no attribute 'f'"),
        (["json:__name__"], "is no function"),
    ],
)
def test_mistakes_are_named(texts, message):
    with pytest.raises(ValueError, match=message):
        scorers.find(texts, own={"task": scorers.Named(len)})


def test_math_verify_is_there_or_says_what_to_install():
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"--scorers=math-verify: .*pip install 'jaxpg\[reasoning\]'"):
            scorers.find(["math-verify"])
    else:
        [(found, _)] = scorers.find(["math-verify"]).values()
        assert found.score.many([(SimpleNamespace(answer="1/2"), "\\boxed{0.5}")]) == [1.0]
        found.score.close()
