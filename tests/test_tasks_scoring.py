"""Weighted scorers, their failures, and processes that hang or die."""

import dataclasses
import functools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import scorers_for_workers as scorers

from jaxpg.rollout.dynamic_sampling import TOLD
from jaxpg.tasks import scoring
from jaxpg.tasks.workers import WorkerDiedError, WorkerRaisedError, Workers, WorkerTimeoutError
from jaxpg.types import Experience, Scores


def alive(pid):
    return os.path.exists(f"/proc/{int(pid)}")


@pytest.fixture(scope="module")
def pool():
    with Workers(scorers.slow_if_told, count=2, timeout=1.0) as pool:
        yield pool


def test_rewards_are_weighted_sums_of_the_scorers_that_apply():
    score = scoring.combine(
        {
            "length": (lambda problem, text: len(text), 0.5),
            "right": (lambda problem, text: None if problem is None else problem == text, 2.0),
        }
    )
    scored = score(["ab", None], ["ab", "abc", "a", ""])
    np.testing.assert_array_equal(scored.rewards, [[3.0, 1.5], [0.5, 0.0]])
    np.testing.assert_array_equal(scored.scores, [[[2, 1], [3, 0]], [[1, 0], [0, 0]]])
    np.testing.assert_array_equal(scored.scores_valid, [[[1, 1], [1, 1]], [[1, 0], [1, 0]]])
    assert scored.valid.all() and scored.rewards.dtype == scored.scores.dtype == np.float32
    assert scored.metrics() == {
        **{"score/length": 1.5, "score_applies/length": 1.0, "score_failures/length": 0},
        **{"score/right": 0.5, "score_applies/right": 0.5, "score_failures/right": 0},
    }


def test_a_sample_without_any_scorer_is_not_valid_and_a_zero_is():
    scored = scoring.combine({"a": (lambda p, c: 0.0 if c else None, 1.0)})([0], ["", "x"])
    np.testing.assert_array_equal(scored.valid, [[False, True]])
    assert scoring.combine({"a": (lambda p, c: None, 1.0)})([0], [""]).metrics()["score/a"] == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", [1.0], np.ones(2), 1j, np.float32("nan"), lambda: 1])
def test_what_is_no_finite_number_is_a_failure_and_not_a_reward(bad):
    scorers_ = {"good": (lambda p, c: 1.0, 1.0), "bad": (lambda p, c: bad if c == "x" else 1.0, 1.0)}
    with pytest.raises(scoring.ScorerError, match=r"'bad' failed on sample 1 of prompt 1, one of 1: ValueError"):
        scoring.combine(scorers_)([0, 1], ["", "", "", "x"])
    scored = scoring.combine(scorers_, raise_failures=False)([0, 1], ["", "", "", "x"])
    np.testing.assert_array_equal(scored.rewards, [[2, 2], [2, 1]])
    np.testing.assert_array_equal(scored.scores_valid[1, 1], [True, False])
    np.testing.assert_array_equal(scored.failures, [0, 1])


def test_numbers_of_numpy_and_truth_values_are_numbers():
    values = iter([True, np.True_, np.float32(0.5), np.int64(3)])
    assert scoring.combine({"a": (lambda p, c: next(values), 1.0)})([0], [""] * 4).rewards.tolist() == [[1, 1, 0.5, 3]]


@pytest.mark.parametrize(("retries", "fails"), [(0, True), (1, True), (2, False)])
def test_retries_are_bounded(retries, fails):
    calls = []

    def shaky(problem, completion):
        calls.append(completion)
        if calls.count(completion) < 3 and completion == "x":
            raise OSError("busy")
        return 1.0

    scored = scoring.combine({"shaky": (shaky, 1.0)}, retries=retries, raise_failures=False)([0], ["a", "x"])
    np.testing.assert_array_equal(scored.valid, [[True, not fails]])
    assert calls.count("x") == retries + 1 and calls.count("a") == 1


def test_requests_that_make_no_sense_are_refused():
    one = {"a": (lambda p, c: 1.0, 1.0)}
    for problems, completions in [([], []), ([0], []), ([0, 1], ["a", "b", "c"]), ([], ["a"])]:
        with pytest.raises(ValueError, match="must be a multiple"):
            scoring.combine(one)(problems, completions)
    with pytest.raises(ValueError, match="name at least one"):
        scoring.combine({})
    with pytest.raises(ValueError, match=r"scorers\['a'\]: weight=nan"):
        scoring.combine({"a": (lambda p, c: 1.0, float("nan"))})
    with pytest.raises(ValueError, match="retries=-1"):
        scoring.combine(one, retries=-1)


def test_workers_answer_in_order_and_live_on(pool):
    assert pool.map([]) == []
    assert pool.map([(i, "x" * i) for i in range(20)]) == [2.0 * i for i in range(20)]
    assert pool.map([(0, "print")]) == [5.0]
    with Workers(scorers.process, count=1) as single:
        assert len(set(single.map([(0, "")] * 5) + single.map([(0, "")]))) == 1


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("hang", WorkerTimeoutError, "call took longer than 1.0 seconds"),
        ("sleep", WorkerTimeoutError, "call took longer"),
        ("hang in C", WorkerTimeoutError, "call took longer"),
        ("exit", WorkerDiedError, "code 3 during its call"),
        ("raise", WorkerRaisedError, "KeyError: 'no'"),
        ("hoard", WorkerRaisedError, "MemoryError"),
    ],
)
def test_a_call_that_hangs_dies_or_raises_costs_its_own_result_alone(pool, text, error, message):
    started = time.perf_counter()
    results = pool.map([(1, "a"), (1, text), (1, "abc")])
    assert results[0] == 2.0 and results[2] == 4.0
    assert type(results[1]) is error and message in str(results[1])
    assert time.perf_counter() - started < 30, "the call that hangs would never end"
    assert pool.map([(1, "a")] * 3) == [2.0] * 3


def test_the_time_limit_holds_off_the_main_thread(pool):
    results = []
    threads = [threading.Thread(target=lambda: results.extend(pool.map([(0, "sleep"), (0, "ab")]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [str(x) for x in results] == ["call took longer than 1.0 seconds", "2.0"] * 2


def test_a_killed_process_is_gone_and_replaced():
    with Workers(scorers.process, count=1) as pool:
        first = pool.map([(0, "")])[0]
        os.kill(int(first), 9)
        died, second = pool.map([(0, ""), (0, "")])
        assert isinstance(died, WorkerDiedError) and second != first and alive(second)
    assert not alive(first) and not alive(second)


@pytest.mark.parametrize("text", ["", "hang in C"])
def test_processes_end_with_their_caller_even_if_it_is_killed(text):
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import os, threading, scorers_for_workers as s; from jaxpg.tasks.workers import Workers\n"
        "pool = Workers(s.process, count=1, timeout=1.0); print(int(pool.map([(0, '')])[0]), flush=True)\n"
        f"threading.Timer(0.2, os.kill, (os.getpid(), 9)).start(); pool.map([(0, {text!r})]); threading.Event().wait()"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120)
    assert alive(run.stdout) or not text, "it still hangs, so that the next lines say something"
    deadline = time.monotonic() + 10
    while alive(run.stdout) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(run.stdout)


def test_a_process_that_does_not_start_is_late():
    with Workers(functools.partial(scorers.process, scorers.CannotStart()), count=1, start_timeout=0.5) as pool:
        assert "start took longer than 0.5 seconds" in str(pool.map([("x" * 5_000_000,)])[0])


def test_functions_that_no_other_process_can_find_are_refused():
    with pytest.raises(ValueError, match="must be a function of a module's top level"):
        Workers(lambda: 1)
    with pytest.raises(ValueError, match="count=0"):
        Workers(scorers.process, count=0)
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom jaxpg.tasks.workers import Workers\ndef f(): pass\nWorkers(f)"
    run = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=120)
    assert "is of the main script" in run.stderr


def test_an_isolated_scorer_is_retried_and_counted(tmp_path):
    isolated = scoring.Isolated(scorers.fails_once, count=2)
    with pytest.raises(WorkerDiedError):
        isolated(str(tmp_path), "first")
    with pytest.raises(scoring.ScorerError, match=r"'shaky' failed on sample 1 of prompt 0.*WorkerDiedError"):
        scoring.combine({"shaky": (isolated, 1.0)}, retries=0)(
            [str(tmp_path)], ["first", "second"]
        )  # each name fails once
    scored = scoring.combine({"shaky": (isolated, 1.0)}, retries=1)([str(tmp_path)], ["second", "third"])
    np.testing.assert_array_equal(scored.rewards, [[1.0, 1.0]])
    isolated.close()


def test_late_calls_are_not_tried_again_and_never_a_zero():
    isolated = scoring.Isolated(scorers.slow_if_told, count=1, timeout=2.0)
    score = scoring.combine({"slow": (isolated, 1.0)}, retries=3, raise_failures=False)
    score([1], ["a"])
    started = time.perf_counter()
    scored = score([1], ["hang"])
    assert time.perf_counter() - started < 4.0, "a second attempt would take that long"
    assert not scored.valid[0, 0] and scored.failures.tolist() == [1]
    isolated.close()


def test_math_verify_compares_formulas_or_says_what_to_install():
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'jaxpg\[reasoning\]'"):
            scoring.math_verify()
        pytest.skip("math-verify is not installed (extra reasoning)")
    scorer = scoring.math_verify(count=1, timeout=5.0)
    score = scoring.combine({"math": (scorer, 1.0)}, raise_failures=False)
    results = []
    problems = [SimpleNamespace(answer=r"\frac{1}{2}"), SimpleNamespace(answer="x^2+1"), SimpleNamespace(answer="")]
    completions = [r"\boxed{0.5}", r"\boxed{\frac{2}{3}}", r"$1+x^2$", "", "5", r"$10^{10^{10^{10}}}$"]
    thread = threading.Thread(target=lambda: results.append(score(problems, completions)))
    thread.start()
    thread.join(60)
    assert results[0].rewards[:2].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert results[0].valid.tolist() == [[True, True], [True, True], [False, False]]
    scorer.close()


def test_every_score_is_a_field_of_the_experience_that_algorithms_read():
    scores = {field.name for field in dataclasses.fields(Scores)} - {"names", "failures"}
    assert scores <= {field.name for field in dataclasses.fields(Experience)}
    assert scores == set(TOLD)


def test_scores_without_names_have_no_metrics_and_failures_are_added_up():
    scores = Scores(np.zeros((1, 2)), np.ones((1, 2), bool))
    assert scores.metrics() == {} and scores.num_failures == 0
    assert dataclasses.replace(scores, failures=np.array([2, 3])).num_failures == 5
    told = dataclasses.replace(scores, scores=np.array([[[1.0], [2.0]]]), names=("a",))
    assert told.metrics() == {"score/a": 1.5, "score_applies/a": 1.0, "score_failures/a": 0}
