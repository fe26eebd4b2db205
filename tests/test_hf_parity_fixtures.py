"""Every model family equals transformers on the golden fixtures, which tools/make_fixtures.py made: no torch needed."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.estimators import logprobs
from jaxpg.models import Model, hf
from jaxpg.models.hf.config import ARCHITECTURES
from jaxpg.sampling import sample

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/golden.npz"))

each_family = pytest.mark.parametrize("name", NAMES)
each_padding = pytest.mark.parametrize("side", ["none", "left", "right"])


@functools.cache
def fixture(name):
    """The model, its parameters, the golden values, and a compiled function to logits and log-probs."""
    config, params, tokenizer = hf.load(FIXTURES / name)
    assert tokenizer is None, "the fixtures have none"
    model = Model(config)
    with np.load(FIXTURES / name / "golden.npz", allow_pickle=False) as file:
        golden = dict(file)

    def outputs(params, tokens, mask):
        logits = model.logits(params, tokens, mask)
        return logits, logprobs.token_log_probs(logits, tokens)

    return model, params, golden, jax.jit(outputs)


def test_every_architecture_has_a_fixture():
    configs = (json.loads((FIXTURES / name / "config.json").read_text()) for name in NAMES)
    assert {config["model_type"] for config in configs} == set(ARCHITECTURES)


@each_padding
@each_family
def test_logits_equal_transformers(name, side):
    _, params, golden, outputs = fixture(name)
    tokens, mask = golden[f"{side}_tokens"], golden[f"{side}_mask"]
    logits = np.asarray(outputs(params, tokens, mask)[0])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits[mask], golden[f"{side}_logits"], atol=1e-4, rtol=0)


@each_padding
@each_family
def test_log_probs_equal_transformers(name, side):
    _, params, golden, outputs = fixture(name)
    tokens, mask = golden[f"{side}_tokens"], golden[f"{side}_mask"]
    log_probs = np.asarray(outputs(params, tokens, mask)[1])

    logits = np.zeros((*mask.shape, golden[f"{side}_logits"].shape[-1]))
    logits[mask] = golden[f"{side}_logits"]
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = np.take_along_axis(expected[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    predicted = mask[:, 1:] & mask[:, :-1]  # not the first real token behind left padding
    np.testing.assert_allclose(log_probs[:, 1:][predicted], expected[predicted], atol=1e-4, rtol=0)


@each_family
def test_greedy_continuations_equal_transformers(name):
    model, params, golden, _ = fixture(name)
    prompts, continuations = golden["prompts"], golden["continuations"]
    new_tokens = continuations.shape[1]
    greedy = functools.partial(sample, model=model, max_new_tokens=new_tokens, stop_tokens=(), temperature=0.0)
    args = params, jnp.asarray(prompts), jnp.asarray(golden["prompt_mask"]), jax.random.key(0)
    rollout = jax.jit(greedy)(*args)
    np.testing.assert_array_equal(rollout.tokens[:, prompts.shape[1] :], continuations)
