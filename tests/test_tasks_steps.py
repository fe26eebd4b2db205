"""Sums in steps: rewards and segments of steps, whatever the tokens are."""

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpg.data import characters
from jaxpg.estimators import segments
from jaxpg.tasks import steps

TOKENIZER = characters(steps.ALPHABET)
PROBLEM = steps.Problem("2+3+4=", "5;9", 1, ("5", "9"))


def rows(tokenizer, completions, length=10):
    """A prompt of two tokens, then each completion with its stop token."""
    tokens = np.full((len(completions), length), tokenizer.eos_token_id)
    mask = np.zeros(tokens.shape, bool)
    for row, completion in enumerate(completions):
        ids = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens[row, 2 : 2 + len(ids)] = ids
        mask[row, 2 : 2 + len(ids)] = True
    return tokens, mask


@pytest.mark.parametrize("level", steps.LEVELS)
def test_each_step_is_the_running_sum(level):
    for problem in steps.problems(3, 0, 100, level=level):
        operands = [int(x) for x in problem.prompt[:-1].split("+")]
        assert [int(x) for x in problem.steps] == np.cumsum(operands).tolist()[1:]
        assert len(operands) == steps.LEVELS[level].terms and ";".join(problem.steps) == problem.answer
        assert steps.score(problem, problem.answer) == 1.0 and steps.score(problem, problem.answer + ";") == 0.0
        assert sum(step.reward for step in steps.check(problem, problem.answer)) == pytest.approx(1.0)


@pytest.mark.parametrize("level", steps.LEVELS)
def test_no_prompt_and_no_answer_is_longer_than_the_longest(level):
    drawn = steps.problems(0, 0, 300, level=level)
    assert max(len(p.prompt) for p in drawn) <= len(steps.longest_prompt(level))
    assert max(len(p.answer) for p in drawn) <= len(steps.longest_answer(level))
    assert steps.longest_prompt(1) == "9+9+9=" and steps.longest_answer(4) == "198;297"


def test_a_held_out_set_has_no_problem_twice_and_says_when_there_are_no_more():
    drawn = steps.held_out_set(60)
    assert len({p.prompt for p in drawn}) == 60
    with pytest.raises(ValueError, match="count=900: level=1 holds out only"):
        steps.held_out_set(900)


def test_problems_are_a_function_of_seed_and_index_and_held_out_whatever_the_order():
    whole = steps.problems(1, 0, 20)
    assert whole[5:15] == steps.problems(1, 5, 10) and whole != steps.problems(2, 0, 20)
    assert [p.prompt for p in whole[:2]] == ["8+6+7=", "2+2+6="], "a changed draw breaks every run's resume"
    trained = {tuple(sorted(p.prompt[:-1].split("+"))) for seed in range(3) for p in steps.problems(seed, 0, 1000)}
    held_out = {tuple(sorted(p.prompt[:-1].split("+"))) for p in steps.problems(0, 0, 200, held_out=True)}
    assert held_out and not trained & held_out
    with pytest.raises(ValueError, match="level=9"):
        steps.problem(0, 0, level=9)


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("5;9", [(0, 2, 0.5), (2, 3, 0.5)]),
        ("5;8", [(0, 2, 0.5), (2, 3, 0.0)]),
        ("6;9", [(0, 2, 0.0), (2, 3, 0.5)]),
        ("9", [(0, 1, 0.0)]),
        ("5;;9;9;", [(0, 3, 0.5), (3, 5, 0.5), (5, 7, 0.0)]),
        (";5;9", [(0, 1, 0.0), (1, 3, 0.0), (3, 4, 0.0)]),
        (" 5;09", [(0, 3, 0.0), (3, 5, 0.0)]),
        ("é;9", [(0, 2, 0.0), (2, 3, 0.5)]),
        ("\u0665;\uff19", [(0, 2, 0.0), (2, 3, 0.0)]),
        ("", []),
    ],
)
def test_steps_are_cut_and_rewarded(completion, found):
    assert steps.check(PROBLEM, completion) == found
    assert steps.right_steps(PROBLEM, completion) == sum(reward for _, _, reward in found)


def test_rewards_stand_on_the_last_token_of_each_step():
    tokens, mask = rows(TOKENIZER, ["5;9", "5;8", "9", "5;", "", "5;;9;9;"])
    rewards, numbers = steps.make_rewards(TOKENIZER)([PROBLEM], tokens, mask)
    assert rewards.dtype == np.float32 and numbers.dtype == np.int32
    assert [row[m].tolist() for row, m in zip(rewards, mask, strict=True)] == [
        *[[0, 0.5, 0, 0.5], [0, 0.5, 0, 0], [0, 0], [0, 0.5, 0], [0], [0, 0, 0.5, 0, 0.5, 0, 0, 0]],
    ]
    assert [row[m].tolist() for row, m in zip(numbers, mask, strict=True)] == [
        *[[0, 0, 1, 1], [0, 0, 1, 1], [0, 0], [0, 0, 1], [0], [0, 0, 0, 1, 1, 2, 2, 3]],
    ]
    assert (numbers[~mask] == -1).all() and (rewards[~mask] == 0).all()


def test_they_are_the_segments_and_rewards_of_the_library_where_each_character_is_a_token():
    rng = np.random.default_rng(0)
    completions = ["".join(rng.choice(list("59;"), size=rng.integers(0, 9))) for _ in range(50)]
    tokens, mask = rows(TOKENIZER, completions, length=12)
    rewards, numbers = steps.make_rewards(TOKENIZER)([PROBLEM], tokens, mask)
    delimiter = TOKENIZER(";", add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(numbers, segments.steps(tokens, mask, delimiter=delimiter))
    of_steps = np.zeros((len(completions), 12))
    for row, completion in enumerate(completions):
        found = steps.check(PROBLEM, completion)
        of_steps[row, : len(found)] = [step.reward for step in found]
    np.testing.assert_array_equal(rewards, segments.place_steps(of_steps, numbers, mask))


def test_tokens_of_several_characters_and_of_parts_of_one():
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", "5", "9", ";", ";9", "5;9", "Ã", "©", "1"])}
    model = tokenizers.models.BPE(vocabulary, [])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokens = np.array([[1, 4, 0, 0], [5, 0, 0, 0], [6, 7, 4, 0], [6, 3, 2, 99]])  # 5 ;9, 5;9, é ;9, half an é ; 9
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    rewards, numbers = steps.make_rewards(tokenizer)([PROBLEM], tokens, mask)
    np.testing.assert_array_equal(rewards, [[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 0.5], [0, 0, 0, 0.5]])
    np.testing.assert_array_equal(numbers, [[0, 0, 1, -1], [0, 1, -1, -1], [0, 0, 0, 1], [0, 0, 1, 1]])
    one = mask[1:2, :1]  # without a stop token one token ends both steps: one action, which earns both
    rewards, numbers = steps.make_rewards(tokenizer)([PROBLEM], tokens[1:2, :1], one)
    assert rewards.tolist() == [[1.0]] and numbers.tolist() == [[0]]


def test_rows_belong_to_their_problems_and_shapes_are_checked():
    other = steps.Problem("2+3+5=", "5;10", 1, ("5", "10"))
    tokens, mask = rows(TOKENIZER, ["5;9", "5;10", "5;9", "5;10"])
    score = steps.make_rewards(TOKENIZER)
    assert score([PROBLEM, other], tokens, mask)[0].sum(1).tolist() == [1.0, 0.5, 0.5, 1.0]
    with pytest.raises(ValueError, match="4 rows of 3 problems"):
        score([PROBLEM] * 3, tokens, mask)
    with pytest.raises(ValueError, match="must be"):
        score([PROBLEM], tokens, mask.astype(int))
    with pytest.raises(ValueError, match="4 rows of 0 problems"):
        score([], tokens, mask)
