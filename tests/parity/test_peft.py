"""PEFT loads the adapters that we save, and we load those of PEFT: the same logits. Runs in make test-parity."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

REASON = "PyTorch or PEFT is missing: these run, and both are installed, by make test-parity"
torch = pytest.importorskip("torch", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)

import transformers  # noqa: E402

from jaxpg.models import Model, hf, lora  # noqa: E402

# PEFT reads a property that transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
FIXTURES = Path(__file__).parents[1] / "fixtures"


@functools.cache
def ours(name):
    config, params, _ = hf.load(FIXTURES / name, lora_alpha=12.0)
    return config, params, jax.jit(Model(config).logits)


def batch(config):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 7))
    return tokens, np.ones_like(tokens, bool)


def their_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens)).logits.numpy()


def their_base(name):
    return transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32).eval()


@pytest.mark.parametrize("name, targets", [("llama3", None), ("gemma3", None), ("qwen3_moe", lora.ATTENTION)])
def test_peft_loads_ours(name, targets, tmp_path):
    config, params, logits = ours(name)
    adapters = lora.init(jax.random.key(0), config, rank=4, targets=targets)
    adapters = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    params = lora.attach(params, adapters)
    lora.save(tmp_path / "adapter", config, params, base_model=str(FIXTURES / name))

    model = peft.PeftModel.from_pretrained(their_base(name), tmp_path / "adapter").eval()
    tokens, mask = batch(config)
    found = np.asarray(logits(params, tokens, mask))
    assert np.abs(found - logits(lora.base(params), tokens, mask)).max() > 1e-2
    np.testing.assert_allclose(found, their_logits(model, tokens), atol=1e-4, rtol=0)


def test_we_load_those_of_peft(tmp_path):
    config, params, logits = ours("llama3")
    torch.manual_seed(0)
    description = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "o_proj", "up_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(their_base("llama3"), description).eval()
    model.save_pretrained(tmp_path / "adapter")
    params = lora.attach(params, lora.load(tmp_path / "adapter", config))
    tokens, mask = batch(config)
    np.testing.assert_allclose(logits(params, tokens, mask), their_logits(model, tokens), atol=1e-4, rtol=0)
