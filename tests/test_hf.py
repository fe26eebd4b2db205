"""Checkpoints in and out: round trips, shards, casts, meshes, and one clear error for each kind of damage."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpg.data.tokenizers import characters
from jaxpg.models import Config, Model, RopeScaling, hf
from jaxpg.models.hf import names
from jaxpg.models.hf.config import from_dict, to_hf
from jaxpg.models.hf.declared import system_prompt
from jaxpg.models.hf.load import open_source
from jaxpg.parallel import sharding
from jaxpg.sampling import Sampling

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())
SMALL = Config(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=24, max_length=64
)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def load_all(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a small checkpoint, to be damaged."""
    return Path(shutil.copytree(FIXTURES / "llama2", tmp_path / "model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_loads_as_the_same(family, tmp_path):
    config, params, _ = hf.load(FIXTURES / family)
    hf.save(tmp_path / "copy", config, params)
    again = hf.load(tmp_path / "copy")
    assert again.config == config
    same(again.params, params)
    ours, theirs = load_all(tmp_path / "copy"), load_all(FIXTURES / family)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)


def test_shards_are_named_by_the_index_and_read_back(tmp_path):
    model = Model(SMALL)
    params = model.init(jax.random.key(0))
    hf.save(tmp_path / "model", SMALL, params, max_shard_bytes=8000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    same(hf.load(tmp_path / "model").params, params)
    (tmp_path / "model" / "model-00002-of-{:05d}.safetensors".format(len(set(index["weight_map"].values())))).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-.*fetch the missing shards"):
        hf.load(tmp_path / "model")


def test_the_tokenizer_and_the_stop_tokens_travel_along(tmp_path):
    tokenizer = characters("0123456789+=")
    config = Config(**(vars(SMALL) | {"vocab_size": len(tokenizer), "stop_tokens": (1, 3)}))
    hf.save(tmp_path / "model", config, Model(config).init(jax.random.key(0)), tokenizer, generation={"top_k": 5})
    loaded = hf.load(tmp_path / "model")
    assert loaded.tokenizer("12+7=")["input_ids"] == tokenizer("12+7=")["input_ids"]
    assert loaded.tokenizer.pad_token_id == tokenizer.pad_token_id
    assert loaded.config.stop_tokens == (1, 3)
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [1, 3], "pad_token_id": 0, "top_k": 5}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_cast_on_the_way(dtype, tmp_path):
    params = Model(SMALL).init(jax.random.key(0))
    hf.save(tmp_path / "model", SMALL, params, dtype=dtype)
    half = jax.tree.map(lambda x: x.astype(dtype), params)
    same(hf.load(tmp_path / "model").params, jax.tree.map(lambda x: x.astype(jnp.float32), half))
    loaded = hf.load(tmp_path / "model", dtype=dtype)
    same(loaded.params, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "qwen3_moe"])
def test_each_device_gets_its_part(family):
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    whole, parts = hf.load(FIXTURES / family).params, hf.load(FIXTURES / family, mesh=mesh).params
    same(parts, whole)
    jax.tree.map(lambda leaf, place: np.testing.assert_(leaf.sharding == place), parts, sharding.shardings(mesh, whole))
    kernel = parts["layers"]["attention"]["query"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_parts_of_a_tensor_are_cut_where_they_belong():
    """Every way to cut a projection, also through the axes that a checkpoint merges."""
    stored = np.arange(24 * 10).reshape(24, 10)  # 3 heads of 8, from 10 features
    for cell, inputs, matrix in (((10, 3, 8), 1, stored), ((3, 8, 10), 2, stored.T)):
        tensor = names.Tensor("x.weight", (0,), cell, inputs)
        whole = tensor.ours(lambda index, matrix=matrix: matrix[index], (slice(None),) * 3)
        np.testing.assert_array_equal(tensor.theirs(whole), matrix)
        for index in np.ndindex(2, 2, 2):
            cut = tuple(
                slice(0, size // 2) if i else slice(size // 2, size) for i, size in zip(index, cell, strict=True)
            )
            part = tensor.ours(lambda index, matrix=matrix: matrix[index], cut)
            np.testing.assert_array_equal(part, whole[cut])


def test_tied_models_may_store_their_head_twice(checkpoint):
    weights = load_file(FIXTURES / "smollm2" / "model.safetensors")
    folder = shutil.copytree(FIXTURES / "smollm2", checkpoint.parent / "tied")
    twice = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3),
    }
    save_file(weights | {k: v.astype(np.float32) for k, v in twice.items()}, folder / "model.safetensors")
    same(hf.load(folder).params, hf.load(FIXTURES / "smollm2").params)


def change_config(folder, **fields):
    file = folder / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def change_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def tamper(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[0:8] = (10**12).to_bytes(8, "little")
    file.write_bytes(bytes(content))


def only_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")


DAMAGES = [
    (lambda f: change_config(f, model_type="mamba"), "model_type='mamba' is not supported, only llama"),
    (lambda f: change_config(f, attention_bias=True), "attention_bias=True asks for biases"),
    (lambda f: change_config(f, hidden_act="relu"), "activation 'relu' is not supported"),
    (lambda f: change_config(f, quantization_config={"bits": 4}), "asks for quantised weights"),
    (lambda f: change_config(f, auto_map={"AutoModel": "code.Model"}), "asks for code of its own"),
    (lambda f: change_config(f, hidden_size="wide"), "transformers does not take this config.json"),
    (lambda f: change_config(f, intermediate_size=999), "of another shape .*mlp.*999"),
    (lambda f: change_config(f, num_hidden_layers=9), "missing .*model.layers"),
    (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "a JSON object is expected"),
    (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors file"),
    (only_pickle, "only pickle weights .*pytorch_model.bin"),
    (truncate, "not a whole safetensors file"),
    (tamper, "not a whole safetensors file"),
    (lambda f: change_weights(f, lambda w: w.pop("model.norm.weight")), "1 missing .model.norm.weight"),
    (lambda f: change_weights(f, lambda w: w.update(extra=np.ones(3))), "1 unexpected .extra"),
    (
        lambda f: change_weights(f, lambda w: w.update({"model.norm.weight": np.ones(32, np.int8)})),
        "model.norm.weight has dtype I8",
    ),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[message[:25] for _, message in DAMAGES])
def test_damage_is_one_clear_error_before_memory_is_spent(checkpoint, damage, message):
    damage(checkpoint)
    arrays = len(jax.live_arrays())
    with pytest.raises(ValueError, match=message):
        hf.load(checkpoint)
    assert len(jax.live_arrays()) == arrays


def test_a_name_that_is_no_path_goes_to_the_hub_and_says_so(monkeypatch, tmp_path):
    import huggingface_hub

    def fetch(repo, *, revision, allow_patterns):
        assert (repo, revision) == ("someone/model", "main") and not any("bin" in p for p in allow_patterns)
        return str(FIXTURES / "qwen3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    same(hf.load("someone/model", revision="main").params, hf.load(FIXTURES / "qwen3").params)

    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"someone/model.*no such path here.*no network"):
        hf.load("someone/model")


def test_only_how_to_compute_can_be_changed():
    config = hf.load(FIXTURES / "llama2", compute_dtype="bfloat16", remat=True, max_length=17).config
    assert (config.compute_dtype, config.remat, config.max_length) == ("bfloat16", True, 17)
    with pytest.raises(ValueError, match="num_layers=1 cannot be changed"):
        hf.load(FIXTURES / "llama2", num_layers=1)


def test_saving_refuses_what_it_cannot_write(tmp_path):
    params = Model(SMALL).init(jax.random.key(0))
    with pytest.raises(ValueError, match="params are not those of config, they differ in: head"):
        hf.save(tmp_path / "a", SMALL, params | {"head": params["embedding"]})
    with pytest.raises(ValueError, match=r"embedding has shape \(9, 16\)"):
        hf.save(tmp_path / "a", SMALL, params | {"embedding": params["embedding"][:9]})
    with pytest.raises(ValueError, match="merge them first"):
        hf.save(tmp_path / "a", SMALL, params | {"lora": {}})
    odd = Config(**(vars(SMALL) | {"attention_softcap": 3.0}))
    with pytest.raises(ValueError, match=r"llama is nearest, but: attention_softcap=3.0"):
        hf.save(tmp_path / "a", odd, params)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    hf.save(tmp_path / "a", SMALL, params)
    with pytest.raises(ValueError, match="exists: choose another, or pass overwrite=True"):
        hf.save(tmp_path / "a", SMALL, params)
    hf.save(tmp_path / "a", SMALL, jax.tree.map(lambda x: 2 * x, params), overwrite=True)
    same(hf.load(tmp_path / "a").params, jax.tree.map(lambda x: 2 * x, params))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=3.0),
        RopeScaling(kind="llama3", factor=8.0, original_length=16, low=1.0, high=4.0),
        RopeScaling(
            kind="yarn", factor=4.0, original_length=16, low=1.0, high=32.0, attention_factor=1.2, truncate=False
        ),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_rope_scaling_survives_the_config_file(scaling):
    config = Config(**(vars(SMALL) | {"rope_scaling": scaling, "max_length": 64}))
    assert from_dict(to_hf(config, dtype="float32").to_dict(), name="x").rope_scaling == scaling


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_unknown_rope_scaling_is_refused(kind):
    fields = json.loads((FIXTURES / "llama2" / "config.json").read_text())
    fields["rope_parameters"] = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 8,
    }
    with pytest.raises(ValueError, match=f"rope_type='{kind}' is not supported|rope"):
        from_dict(fields, name="x")


CHAT = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}\n{% endfor %}"
TEMPLATES = {
    "silent": (CHAT, None),
    "with a default": ("{% if messages[0]['role'] != 'system' %}<s>Be kind.\n{% endif %}" + CHAT, "Be kind."),
    "with an empty system": ("{% if messages[0]['role'] != 'system' %}<s>\n{% endif %}" + CHAT, None),
    "without a system": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}x" + CHAT,
        None,
    ),
    "deaf to a system": ("Be kind.{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", None),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_system_prompt_that_a_template_writes_by_itself_is_found(kind):
    tokenizer = characters("abc")
    tokenizer.chat_template, expected = TEMPLATES[kind]
    assert system_prompt(tokenizer) == expected


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A small checkpoint that declares all that one can."""
    tokenizer = characters("0123456789+=")
    tokenizer.chat_template = TEMPLATES["with a default"][0]
    config = Config(**(vars(SMALL) | {"vocab_size": len(tokenizer), "stop_tokens": (5, 3)}))
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "bos_token_id": 2}
    folder = tmp_path_factory.mktemp("model") / "spoken"
    hf.save(folder, config, Model(config).init(jax.random.key(0)), tokenizer, generation=generation)
    return folder


def test_all_that_a_checkpoint_declares_is_listed_with_what_a_run_makes_of_it(spoken):
    config, _, tokenizer = hf.load(spoken)
    found = hf.declared(spoken, config, tokenizer)
    assert {name: one.value for name, one in found.items()} == {
        "stop tokens": (5, 3, 1),
        "pad token": 0,
        "bos token": 2,
        "context length": 64,
        "chat template": tokenizer.chat_template,
        "system prompt": "Be kind.",
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    assert found == hf.declared(open_source(spoken), config, tokenizer)
    assert all(one.use.startswith(("used", "not used: ")) for one in found.values())
    assert found["stop tokens"].value == Sampling.for_model(config, tokenizer).stop_tokens
    assert Sampling.for_model(config, tokenizer).temperature == 1.0, "the declared one is not used"


def test_what_a_checkpoint_is_silent_about_is_none():
    config, _, tokenizer = hf.load(FIXTURES / "llama2")
    found = hf.declared(FIXTURES / "llama2", config, tokenizer)
    assert tokenizer is None
    silent = {"chat template", "system prompt", "temperature", "top_p", "top_k", "repetition_penalty"}
    assert silent <= {name for name, one in found.items() if one.value is None}
    assert found["context length"].value == config.max_length
