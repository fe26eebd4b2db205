"""What sampler and trainer share: the stop tokens, the filters and the temperature of a model."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.data import characters
from jaxpg.models import Config, Model
from jaxpg.sampling import Sampling, filters, sample
from jaxpg.types import StopReason

SIZES = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_size": 8}
CONFIG = Config(vocab_size=9, max_length=16, **SIZES)  # as many as `TOKENIZER` has
TOKENIZER = characters("0123+=")  # three special tokens in front, <eos> is 1


@pytest.mark.parametrize(
    ("declared", "stop_tokens"),
    [((), (1,)), ((1,), (1,)), ((5, 7), (5, 7, 1)), ((7, 1, 7), (7, 1))],
)
def test_stop_tokens_are_those_of_the_checkpoint_and_the_tokenizers_own(declared, stop_tokens):
    config = dataclasses.replace(CONFIG, stop_tokens=declared)
    assert Sampling.for_model(config, TOKENIZER) == Sampling(stop_tokens=stop_tokens)


def test_a_model_without_any_stop_token_is_refused_and_one_place_is_enough():
    silent = characters("0123+=")
    silent.eos_token = None
    with pytest.raises(ValueError, match=r"stop_tokens: neither .* set tokenizer.eos_token, or config = dataclasses"):
        Sampling.for_model(CONFIG, silent)
    assert Sampling.for_model(dataclasses.replace(CONFIG, stop_tokens=(4,)), silent).stop_tokens == (4,)


def test_ids_beyond_the_tokenizer_are_ruled_out_before_every_other_filter():
    padded = dataclasses.replace(CONFIG, vocab_size=16)
    sampling = Sampling.for_model(padded, TOKENIZER, temperature=0.5, filters=[filters.TopK(3)])
    assert sampling.filters == (filters.Vocabulary(9), filters.TopK(3)) and sampling.temperature == 0.5
    assert Sampling.for_model(CONFIG, TOKENIZER).filters == ()
    narrow = dataclasses.replace(CONFIG, vocab_size=8)  # a tokenizer may have ids that the model lacks
    assert Sampling.for_model(narrow, TOKENIZER).filters == ()


def test_the_options_end_rows_at_each_stop_token_and_text_and_draw_no_padded_id(key):
    config = dataclasses.replace(CONFIG, vocab_size=16, stop_tokens=(4,))
    sampling = Sampling.for_model(config, TOKENIZER, texts=("=", "+2"))
    model = Model(config)
    draw = jax.jit(partial(sample, model=model, max_new_tokens=8, samples_per_prompt=64, **sampling.options))
    rollout = draw(model.init(key), jnp.full((1, 2), 5), jnp.ones((1, 2), bool), key)
    rows = zip(*map(np.asarray, (rollout.tokens, rollout.action_mask, rollout.stop_reason)), strict=True)
    completions = [(tokens[drawn].tolist(), reason) for tokens, drawn, reason in rows]
    assert {ids[-1] for ids, reason in completions if reason == StopReason.STOP_TOKEN} == {1, 4}
    said = [TOKENIZER.decode(ids) for ids, reason in completions if reason == StopReason.STOP_STRING]
    assert any(text.endswith("+2") for text in said) and any(text.endswith("=") for text in said)
    assert all(text.endswith(("=", "+2")) for text in said)
    assert max(max(ids) for ids, _ in completions) < 9


def test_greedy_settings_differ_in_the_temperature_alone():
    sampling = Sampling(0.7, (filters.TopK(3),), (1, 2))
    assert sampling.greedy() == Sampling(0.0, (filters.TopK(3),), (1, 2))


def test_settings_are_hashed_by_what_they_say():
    sampling = Sampling(0.7, [filters.TopK(3)], [1])
    assert hash(sampling) == hash(Sampling(0.7, (filters.TopK(3),), (1,)))
    assert sampling != Sampling(0.7, (filters.TopK(4),), (1,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: must be 0 .greedy. or positive, and finite"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"filters": (3,)}, "filters has 3: must be functions"),
        ({"stop_tokens": (1, -2)}, r"stop_tokens=\[-2\]"),
    ],
)
def test_settings_out_of_range_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)
