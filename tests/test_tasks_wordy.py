"""Answers that trail off: dots and commas change no reward, and demonstrations have 0 to 8 of them, each as often."""

import numpy as np
import pytest

from jaxpg.tasks import draws, wordy
from jaxpg.tasks.find import Options, find


def test_what_trails_off_changes_no_reward():
    for i in range(50):
        drawn = wordy.problem(3, i)
        assert drawn.answer == drawn.prompt[-2]
        for right in (drawn.answer, drawn.answer + "....", drawn.answer + ",.,"):
            assert wordy.score(drawn, right) == 1.0
        for wrong in ("", "." + drawn.answer, drawn.answer + ".0", str((int(drawn.answer) + 1) % 10) + ",,"):
            assert wordy.score(drawn, wrong) == 0.0


def test_half_of_the_demonstrations_are_wrong_and_show_it():
    drawn = [wordy.problem(0, i) for i in range(2000)]
    right = np.array([wordy.score(p, p.demonstration) for p in drawn])
    assert abs(right.mean() - 0.5) < 4 * 0.5 / np.sqrt(2000)
    for problem, score in zip(drawn, right, strict=True):
        assert set(problem.demonstration[1:]) <= set("." if score else ",")
        assert len(problem.demonstration) <= len(wordy.longest_answer(1))
        assert set(problem.demonstration + problem.prompt) <= set(wordy.ALPHABET)
    said = np.bincount([int(p.demonstration[0]) for p, score in zip(drawn, right, strict=True) if not score])
    assert abs(said - 100).max() < 5 * np.sqrt(100)  # any other digit, as often


@pytest.mark.parametrize("right", [True, False])
def test_every_length_is_as_likely(right):
    drawn = (wordy.problem(0, i) for i in range(9000))
    told = [len(p.demonstration) - 1 for p in drawn if wordy.score(p, p.demonstration) == right]
    counts = np.bincount(told, minlength=wordy.MOST + 1)
    assert len(counts) == wordy.MOST + 1 and abs(counts - 500).max() < 5 * np.sqrt(500)


def test_held_out_problems_are_never_drawn_for_training():
    held_out = {p.prompt for p in wordy.held_out_set(512)}
    assert len(held_out) == 512
    assert all(draws.is_held_out("wordy/" + prompt[:-1]) for prompt in held_out)
    assert not any(draws.is_held_out("wordy/" + wordy.problem(1, i).prompt[:-1]) for i in range(2000))


def test_another_level_is_an_error():
    with pytest.raises(ValueError, match="level=2: wordy problems have level 1 only"):
        wordy.problem(0, 0, level=2)


def test_the_task_shows_demonstrations_and_has_room_for_them():
    task = find(Options(task="wordy"), spoken=False)
    problems = task.problems(0, 0, 100)
    assert [task.demonstrate(p) for p in problems] == [p.demonstration for p in problems]
    assert task.max_new_tokens == 1 + wordy.MOST + 1
