"""The calculator's task: it computes nothing but small sums, and what it says is no action."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxpg.data import characters, encode_demonstrations
from jaxpg.tasks import calculator

PROBLEM = calculator.Problem("37*48=", "1776", 5, calls=True)
BY_HEART = calculator.Problem("37*48=", "1776", 5, calls=False)
TOKENIZER = characters(calculator.ALPHABET)


@pytest.fixture(scope="module")
def byte_level():
    """A BPE with merges that join what the small model keeps apart, "]=" among them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    backend.train_from_iterator(["[37*48]=1776\n The answer is 1776."] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize(
    ("call", "result"),
    [
        *[("[37*48]", "1776"), ("[7+8]", "15"), ("[7-8]", "-1"), ("[999*999]", "998001"), ("[1000*2]", "")],
        *[("[" + "9" * 5000 + "*2]", ""), ("[9**9]", ""), ("[9*9*9]", ""), ("[1/0]", ""), ("[٣*٣]", "")],
        *[("[__import__('os')]", ""), ("[1*1]\n", ""), ("x[1*1]", ""), ("]", "")],
    ],
)
def test_only_small_sums_are_computed(call, result):
    assert calculator.calculate(call) == result


@pytest.mark.parametrize(
    ("turn", "observation", "reward", "done"),
    [
        ("[37*48]", "1776|", 0.0, False),
        ("12[37*48]", "1776|", 0.0, False),
        ("37*48]", "|", 0.0, False),
        ("[1/0]", "|", 0.0, False),
        ("1776", "", 1.0, True),
        ("1775", "", 0.0, True),
        ("01776", "", 0.0, True),
    ],
)
@pytest.mark.parametrize("stop", [[], [TOKENIZER.eos_token_id]])
def test_a_turn_of_the_small_model_is_a_call_or_the_answer(turn, observation, reward, done, stop):
    step = calculator.environment(TOKENIZER)
    tokens = TOKENIZER.encode(turn) + ([] if "]" in turn else stop)
    assert step(PROBLEM, tokens) == (PROBLEM, TOKENIZER.encode(observation), reward, done)


@pytest.mark.parametrize(
    ("turn", "observation", "reward", "done"),
    [
        ("Let me see: [37*48]", "=1776\n", 0.0, False),
        ("[37*48]=", "=1776\n", 0.0, False),  # the last token holds more than the end of the call
        ("[37 apples]", "=error\n", 0.0, False),
        ("The answer is 1,776.", "", 1.0, True),
        ("37*48 is 1775", "", 0.0, True),
        ("I give up.", "", 0.0, True),
    ],
)
def test_a_turn_in_words_is_read_in_any_tokens(turn, observation, reward, done, byte_level):
    step = calculator.environment_in_words(byte_level, stop_tokens=(7,))
    problem, said, earned, over = step(PROBLEM, [*byte_level.encode(turn), 7])
    assert (problem, earned, over) == (PROBLEM, reward, done)
    assert byte_level.decode(said) == observation


def test_the_score_is_that_of_the_last_turn_alone():
    assert calculator.score(PROBLEM, "[37*48]1776") == calculator.score(PROBLEM, "1776") == 1.0
    assert calculator.score(PROBLEM, "1776[37*48]") == calculator.score(PROBLEM, "[37*48]is 1776") == 0.0
    assert calculator.score_number(PROBLEM, "[37*48]That is 1776.") == 1.0
    assert calculator.score_number(PROBLEM, "1776 [1*1]") == 0.0, "it ended with a call"
    assert calculator.calls(PROBLEM, "[37*48]1776") == 1.0 and calculator.calls(PROBLEM, "[37]1776") == 0.0


def test_demonstrations_teach_no_results(byte_level):
    forms = [(TOKENIZER, calculator.demonstrate, "1776|"), (byte_level, calculator.demonstrate_in_words, "=1776\n")]
    for tokenizer, demonstrate, observation in forms:
        texts = [demonstrate(BY_HEART), demonstrate(PROBLEM)]
        batch = encode_demonstrations(tokenizer, ["37*48="] * 2, texts, length=40)
        by_heart, called = (
            [tokenizer.decode(row[mask]) for row, mask in zip(batch.tokens, masks, strict=True)]
            for masks in (batch.action_mask, batch.token_mask)
        )
        assert by_heart == ["1776" + tokenizer.eos_token, "[37*48]1776" + tokenizer.eos_token]
        assert called == [
            "37*48=1776" + tokenizer.eos_token,
            f"37*48=[37*48]{observation}1776{tokenizer.eos_token}",
        ]
        assert calculator.score(PROBLEM, by_heart[1].removesuffix(tokenizer.eos_token)) == 1.0


def test_half_of_the_problems_demonstrate_a_call_and_each_is_a_function_of_seed_and_index():
    whole = calculator.problems(1, 0, 1000)
    assert whole[100:105] == calculator.problems(1, 100, 5)
    assert abs(np.mean([problem.calls for problem in whole]) - 0.5) < 0.06
    held_out = calculator.held_out_set(200)
    assert not {p.prompt for p in held_out} & {p.prompt for p in whole} and len(set(held_out)) == 200
