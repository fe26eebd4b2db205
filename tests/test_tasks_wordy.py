"""Answers that trail off: dots change no reward, and demonstrations have 0 to 8 of them, each as often."""

import numpy as np

from jaxpg import ladder
from jaxpg.tasks import arithmetic, wordy


def test_dots_behind_the_answer_are_all_that_differs_and_change_no_reward():
    for i in range(50):
        plain, drawn = arithmetic.problem(3, i, level=2), wordy.problem(3, i, level=2)
        assert (drawn.prompt, drawn.answer.rstrip(".")) == (plain.prompt, plain.answer)
        assert wordy.score(drawn, drawn.answer) == wordy.score(drawn, plain.answer) == 1.0
        assert wordy.score(drawn, plain.answer + "........") == 1.0
        assert wordy.score(drawn, "." + plain.answer) == wordy.score(drawn, plain.answer + "0.") == 0.0
        assert len(drawn.answer) <= len(wordy.longest_answer(2)) and set(drawn.answer) <= set(wordy.ALPHABET)


def test_every_number_of_dots_is_as_likely():
    dots = [wordy.problem(0, i).answer.count(".") for i in range(4500)]
    counts = np.bincount(dots, minlength=wordy.MOST + 1)
    assert len(counts) == wordy.MOST + 1 and abs(counts - 500).max() < 4 * np.sqrt(500)


def test_the_ladder_has_room_for_the_dots(tmp_path):
    runs = [
        ladder.prepare(ladder.Config(task=task, run_dir=tmp_path / task), name=task) for task in ("arithmetic", "wordy")
    ]
    assert runs[1].max_new_tokens == runs[0].max_new_tokens + wordy.MOST
    assert {problem.answer.count(".") for problem in runs[1].task.problems(0, 0, 100)} == set(range(wordy.MOST + 1))
    assert not any("." in problem.answer for problem in runs[1].held_out)
