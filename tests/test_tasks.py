"""Arithmetic problems, tokenizers and the way between text and arrays."""

import numpy as np
import pytest

from jaxpg.data import characters, decode_completions, encode_demonstrations, encode_prompts, encode_segments
from jaxpg.tasks import arithmetic
from jaxpg.types import Rollout

TOKENIZER = characters(arithmetic.ALPHABET)


def parse(problem):
    """An independent reading of a prompt."""
    text = problem.prompt.removesuffix("=")
    if "*" in text:
        return int(text.split("*")[0]) * int(text.split("*")[1])
    return sum(int(part) for part in text.replace("-", "+-").split("+"))


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_answers_are_right_and_levels_fit_their_bounds(level):
    for problem in arithmetic.problems(3, 0, 300, level=level):
        assert int(problem.answer) == parse(problem)
        assert len(problem.prompt) <= len(arithmetic.longest_prompt(level))
        assert len(problem.answer) <= len(arithmetic.longest_answer(level))
        assert arithmetic.score(problem, problem.answer) == 1.0
        assert arithmetic.score(problem, problem.answer + "0") == 0.0
        assert arithmetic.score(problem, "") == 0.0


def test_problems_are_a_function_of_seed_and_index():
    whole = arithmetic.problems(1, 0, 20)
    assert whole[5:15] == arithmetic.problems(1, 5, 10)
    assert whole != arithmetic.problems(2, 0, 20)
    assert [p.prompt for p in whole[:2]] == ["37+94=", "53+87="], "a changed draw breaks every run's resume"


@pytest.mark.parametrize("level", [2, 3, 4, 5])
def test_no_training_problem_is_held_out_nor_its_mirror(level):
    held_out = {p.prompt for p in arithmetic.held_out_set(300, level=level)}
    assert len(held_out) == 300
    mirrored = {
        "+".join(reversed(prompt[:-1].split("+"))) + "=" for prompt in held_out if set(prompt) <= set("0123456789+=")
    }
    trained = {p.prompt for seed in range(3) for p in arithmetic.problems(seed, 0, 4000, level=level)}
    assert not trained & (held_out | mirrored)


def test_impossible_requests_are_named():
    with pytest.raises(ValueError, match="level=9"):
        arithmetic.problem(0, 0, level=9)
    with pytest.raises(ValueError, match="count=500: level=1 holds out only"):
        arithmetic.held_out_set(500, level=1)


def test_prompts_are_left_padded_and_checked():
    tokens, mask = encode_prompts(TOKENIZER, ["1+2=", "10+22="], length=7)
    assert mask.sum(1).tolist() == [4, 6] and mask[:, -1].all()
    assert [TOKENIZER.decode(row[m].tolist()) for row, m in zip(tokens, mask, strict=True)] == ["1+2=", "10+22="]
    with pytest.raises(ValueError, match=r"prompt '10\+22=' has 6 tokens, prompt_length=5"):
        encode_prompts(TOKENIZER, ["1+2=", "10+22="], length=5)
    with pytest.raises(ValueError, match="has no tokens"):
        encode_prompts(TOKENIZER, [""], length=5)
    with pytest.raises(ValueError, match="does not know"):
        encode_prompts(TOKENIZER, ["1 + 2"], length=9)


def test_demonstrations_teach_the_stop_token_and_not_the_prompt():
    batch = encode_demonstrations(TOKENIZER, ["1+2="], ["3"], length=8)
    assert batch.token_mask.tolist() == [[True] * 6 + [False] * 2]
    assert batch.action_mask.tolist() == [[False] * 4 + [True] * 2 + [False] * 2]
    assert batch.tokens[0, 5] == TOKENIZER.eos_token_id


def test_completions_are_the_actions_without_special_tokens():
    tokens = np.array([[6, 10, 3, 4, TOKENIZER.eos_token_id, 9]])
    actions = np.array([[False, False, True, True, True, False]])
    rollout = Rollout(tokens, actions, actions, tokens * 0.0, np.zeros(1))
    assert decode_completions(TOKENIZER, rollout) == ["01"]


def test_an_alphabet_with_a_repeated_character_is_refused():
    with pytest.raises(ValueError, match=r"repeats \['a'\]"):
        characters("aab")


def test_segments_that_others_wrote_are_read_and_not_taught():
    said = [("1+", True), ("22", False), ("=3", True)]
    assert encode_segments(TOKENIZER, [said, "45"]) == [
        (TOKENIZER.encode("1+22=3"), [True, True, False, False, True, True]),
        (TOKENIZER.encode("45"), [True, True]),
    ]
    assert encode_segments(TOKENIZER, []) == []
    batch = encode_demonstrations(TOKENIZER, ["9=", "8="], [said, "45"], length=10, stop_token=0)
    np.testing.assert_array_equal(batch.action_mask[0], [0, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(batch.token_mask.sum(1), [9, 5])
    assert batch.tokens[0, 8] == batch.tokens[1, 4] == 0 and batch.action_mask[1, 4], "the stop token that was named"
    with pytest.raises(ValueError, match=r"demonstration '9=1\+22=3' has 9 tokens, length=8"):
        encode_demonstrations(TOKENIZER, ["9="], [said], length=8)


def test_a_completion_needs_a_token_that_ends_it():
    endless = characters("1")
    endless.eos_token = None
    with pytest.raises(ValueError, match="stop_token=None, and the tokenizer has no eos_token"):
        encode_demonstrations(endless, ["1"], ["1"], length=8)
