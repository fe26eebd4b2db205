"""Against transformers itself: fresh random models of every family, saved models, and SmolLM2. For make test-parity.

JAXPG_PARITY_SEED=7 draws other models than those of seed 1.
"""

import functools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: these run, and it is installed, by make test-parity")

import transformers  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from jaxpg.estimators import logprobs  # noqa: E402
from jaxpg.models import Model, hf  # noqa: E402
from jaxpg.sampling import sample  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_fixtures  # noqa: E402

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much on a busy machine

SEED = int(os.environ.get("JAXPG_PARITY_SEED", "1"))
SMOLLM2 = Path(os.environ.get("JAXPG_SMOLLM2", ROOT / "models" / "smollm2-135m"))

each_family = pytest.mark.parametrize("name", make_fixtures.FAMILIES)


@functools.cache
def theirs_of(name):
    """A random model of transformers."""
    return make_fixtures.make_model(make_fixtures.FAMILIES[name], SEED)


@pytest.fixture(scope="module")
def ours_of(tmp_path_factory):
    """name -> (Model, parameters) as loaded from what transformers saved."""

    @functools.cache
    def load(name):
        folder = tmp_path_factory.mktemp(name)
        make_fixtures.save(make_fixtures.FAMILIES[name], theirs_of(name), folder)
        config, params, tokenizer = hf.load(folder)
        assert tokenizer is None
        return Model(config), params

    return load


@each_family
def test_logits_and_log_probs_equal(name, ours_of):
    model, params = ours_of(name)
    logits_of = jax.jit(model.logits)
    for side, (tokens, mask) in make_fixtures.padded_batches(SEED, model.config.vocab_size).items():
        expected = np.zeros((*mask.shape, model.config.vocab_size), np.float32)
        expected[mask] = make_fixtures.logits(theirs_of(name), tokens, mask)
        logits = logits_of(params, tokens, mask)
        np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-4, rtol=0, err_msg=f"{side} padding")

        log_probs = logprobs.token_log_probs(logits, tokens)[:, 1:]
        expected = torch.log_softmax(torch.from_numpy(expected[:, :-1]), -1).numpy()
        expected = np.take_along_axis(expected, tokens[:, 1:, None], axis=-1)[..., 0]
        predicted = mask[:, 1:] & mask[:, :-1]
        np.testing.assert_allclose(log_probs[predicted], expected[predicted], atol=1e-4, rtol=0)


@each_family
def test_greedy_continuations_equal(name, ours_of):
    model, params = ours_of(name)
    expected = make_fixtures.clear_greedy(theirs_of(name), SEED, margin=2e-3, distinct=1)
    tokens, drawn = greedy(model, params, expected["prompts"], expected["prompt_mask"], new_tokens=12, stop_tokens=())
    assert drawn.all()
    np.testing.assert_array_equal(tokens, expected["continuations"])


@each_family
def test_transformers_loads_what_we_save(name, ours_of, tmp_path):
    model, params = ours_of(name)
    theirs, tokenizer = theirs_of(name), make_tokenizer(name)
    hf.save(tmp_path / "saved", model.config, params, tokenizer, max_shard_bytes=60_000)

    loaded = make_fixtures.load(tmp_path / "saved")
    state, original = loaded.state_dict(), theirs.state_dict()
    assert state.keys() == original.keys()
    for key, tensor in state.items():
        assert torch.equal(tensor, original[key]), key
    for tokens, mask in make_fixtures.padded_batches(SEED, model.config.vocab_size).values():
        expected = make_fixtures.logits(theirs, tokens, mask)
        np.testing.assert_allclose(make_fixtures.logits(loaded, tokens, mask), expected, atol=1e-5, rtol=0)

    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "saved")
    stops = generation.eos_token_id
    assert (tuple(stops) if isinstance(stops, list) else (stops,)) == model.config.stop_tokens
    assert loaded.generation_config.eos_token_id == stops
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert reloaded("b a<end>d")["input_ids"] == tokenizer("b a<end>d")["input_ids"]
    text = reloaded.decode(reloaded("b a<end>d")["input_ids"])
    assert text.replace("<end>", " <end> ").split() == ["b", "a", "<end>", "d"]
    assert hf.load(tmp_path / "saved").config == model.config


def test_transformers_loads_what_we_save_in_bfloat16(ours_of, tmp_path):
    name = "smollm2"  # whose weights bfloat16 can hold
    model, params = ours_of(name)
    hf.save(tmp_path / "saved", model.config, params, dtype="bfloat16")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    loaded = make_fixtures.load(tmp_path / "saved").state_dict()
    for key, tensor in theirs_of(name).state_dict().items():
        assert torch.equal(loaded[key], tensor), key


@pytest.mark.skipif(
    not (SMOLLM2 / "config.json").exists(),
    reason=f"no SmolLM2 in {SMOLLM2}: run `python tools/get_model.py smollm2-135m`, or set JAXPG_SMOLLM2 to its folder",
)
def test_smollm2_answers_as_in_transformers():
    config, params, tokenizer = hf.load(SMOLLM2)
    chats = [
        tokenizer.apply_chat_template(_chat(question), tokenize=False, add_generation_prompt=True)
        for question in QUESTIONS
    ]
    prompts, mask = left_padded([tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats])
    tokens, drawn = greedy(Model(config), params, prompts, mask, new_tokens=64, stop_tokens=config.stop_tokens)
    expected = make_fixtures.greedy(make_fixtures.load(SMOLLM2), prompts, mask, new_tokens=64)
    for question, ours, real, theirs in zip(QUESTIONS, tokens, drawn, expected, strict=True):
        ours = ours[real]
        message = f"{question}\nours:   {tokenizer.decode(ours)!r}\ntheirs: {tokenizer.decode(theirs)!r}"
        assert ours.tolist() == theirs[: len(ours)].tolist(), message
        assert len(ours) == 64 or ours[-1] in config.stop_tokens


def greedy(model, params, prompts, mask, *, new_tokens, stop_tokens):
    """Our greedy continuations and which of their tokens were drawn, [rows, new_tokens] each."""
    run = functools.partial(sample, model=model, max_new_tokens=new_tokens, stop_tokens=stop_tokens, temperature=0.0)
    rollout = jax.jit(run)(params, jnp.asarray(prompts), jnp.asarray(mask), jax.random.key(0))
    return np.asarray(rollout.tokens)[:, -new_tokens:], np.asarray(rollout.action_mask)[:, -new_tokens:]


def left_padded(rows):
    lengths = [len(row) for row in rows]
    mask = make_fixtures.mask_of(lengths, max(lengths), "left")
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


def make_tokenizer(name):
    """Of single letters; for Qwen of its own class, which transformers takes for any tokenizer beside such a model."""
    specials = {"pad_token": "<pad>", "bos_token": "<begin>", "eos_token": "<end>"}
    vocabulary = {word: i for i, word in enumerate([*specials.values(), "Ġ", *"abcdefgh"])}
    if name.startswith("qwen"):
        return transformers.Qwen2Tokenizer(vocabulary, [], unk_token=None, **specials)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **specials)


def _chat(question):
    return [{"role": "user", "content": question}]


QUESTIONS = [
    "What is 3+4? Answer with just the number.",
    "What is 27+15? Answer with just the number.",
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Name three colours of the rainbow.",
    "Explain gravity to a child in one sentence.",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
    "List the first five prime numbers.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "What do bees make?",
    "Give me a recipe for pancakes.",
    "Is a whale a fish?",
    "Complete the sequence: 2, 4, 8, 16,",
    "Summarise: The cat sat on the mat because it was warm. 🐱",
    "Was ist die Hauptstadt von Österreich?",
    "你会说中文吗",
    "Sort these words: pear, apple, fig.",
    "Tell me a short joke about computers.",
]
