"""GGUF files: what llama.cpp's converter changed is undone, and what is not supported is refused."""

import struct

import gguf
import numpy as np
import pytest
from gguf_files import SIZES, interleave, write
from transformers import AutoConfig

from jaxpg.models import gguf_file
from jaxpg.models.gguf import GGUFSource
from jaxpg.models.gguf_tokenizer import stop_tokens
from jaxpg.models.hf.load import read_config


def test_llama_is_read_as_it_was_before_the_conversion(tmp_path):
    made = write(tmp_path / "m.gguf", change=interleave)
    source = GGUFSource(tmp_path / "m.gguf")
    assert source.config["architectures"] == ["LlamaForCausalLM"] and source.config["tie_word_embeddings"]
    assert len(source.shapes) == len(made)
    q = source.read("model.layers.1.self_attn.q_proj.weight")
    np.testing.assert_array_equal(q, made["blk.1.attn_q.weight"])
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.k_proj.weight"), made["blk.0.attn_k.weight"])
    np.testing.assert_array_equal(source.read("model.layers.0.mlp.down_proj.weight"), made["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(source.read("model.norm.weight"), made["output_norm.weight"])
    for name, shape in source.shapes.items():
        assert source.read(name).shape == shape and source.read(name).dtype == np.float32


def test_undone_rows_give_llama_cpps_attention_scores(tmp_path):
    """Rotating neighbours of the file's rows scores as rotating halves of the rows that `read` gives."""
    write(tmp_path / "m.gguf")
    source = GGUFSource(tmp_path / "m.gguf")
    d, rng = SIZES["head_dim"], np.random.default_rng(1)
    x, angle = rng.standard_normal((2, SIZES["hidden"])), np.array([[3.0], [7.0]]) * 1e5 ** (-np.arange(0, d, 2) / d)

    def rotated(a, b, t):
        return np.stack([a * np.cos(angle[t]) - b * np.sin(angle[t]), b * np.cos(angle[t]) + a * np.sin(angle[t])])

    def scores(q, k, split):
        heads = [(w @ x[t]).reshape(-1, d)[0] for t, w in enumerate((q, k))]
        return np.sum(rotated(*split(heads[0]), 0) * rotated(*split(heads[1]), 1))

    raw = [source._file.decode(f"blk.0.attn_{name}.weight") for name in "qk"]
    undone = [source.read(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qk"]
    expected = scores(*raw, lambda h: (h[0::2], h[1::2]))
    np.testing.assert_allclose(scores(*undone, lambda h: (h[: d // 2], h[d // 2 :])), expected, rtol=1e-6)


def test_gemma_norms_lose_the_one_that_was_added(tmp_path):
    made = write(tmp_path / "m.gguf", "gemma3", change=lambda n, w: w + 1 if n.endswith("norm.weight") else w)
    source = GGUFSource(tmp_path / "m.gguf")
    for name, original in (
        ("model.norm", "output_norm"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
        ("model.layers.1.pre_feedforward_layernorm", "blk.1.ffn_norm"),
        ("model.layers.1.post_attention_layernorm", "blk.1.post_attention_norm"),
        ("model.layers.1.self_attn.q_proj", "blk.1.attn_q"),
    ):
        np.testing.assert_allclose(source.read(name + ".weight"), made[original + ".weight"], atol=3e-7)
    config = AutoConfig.for_model(**source.config)
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e5
    assert config.layer_types == ["sliding_attention"] * 2 and config.query_pre_attn_scalar == 8


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_blocks(tmp_path, kind):
    made = write(tmp_path / "m.gguf", raw_type=gguf.GGMLQuantizationType[kind])
    source = GGUFSource(tmp_path / "m.gguf")
    original, found = made["blk.0.ffn_up.weight"], source.read("model.layers.0.mlp.up_proj.weight")
    blocks = original.reshape(-1, 32)
    step = (np.abs(blocks).max(-1) / 127) if kind == "Q8_0" else (blocks.max(-1) - blocks.min(-1)) / 15
    error = np.abs(found.reshape(-1, 32) - blocks).max(-1)
    assert np.all(error <= 0.51 * step + 2e-3) and error.max() > 0  # the step itself is stored in half precision


@pytest.mark.parametrize("kind", gguf_file.TENSOR_TYPES)
def test_each_type_said_to_be_supported_is_decoded(kind):
    number = gguf.GGMLQuantizationType[kind]
    block, length = gguf.GGML_QUANT_SIZES[number]
    rows = np.zeros((2, 256 // block * length), np.uint8)
    file = gguf_file.GGUFFile(None, {}, {"w": gguf_file.Tensor((2, 256), kind, 0, rows.size)}, rows.ravel())
    assert file.decode("w").shape == (2, 256) and file.decode("w").dtype == np.float32
    assert file.decode("w", (1, 2)).shape == (1, 256)


def test_header_equals_the_packages_reader(tmp_path):
    write(tmp_path / "m.gguf", raw_type=gguf.GGMLQuantizationType.Q8_0)
    reader, file = gguf.GGUFReader(tmp_path / "m.gguf"), gguf_file.open_file(tmp_path / "m.gguf")
    assert file.metadata == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    expected = {t.name: (tuple(t.shape[::-1]), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors}
    assert {n: (t.shape, t.type, t.start, t.length) for n, t in file.tensors.items()} == expected


def test_experts_are_unstacked(tmp_path):
    experts = np.random.default_rng(2).standard_normal((3, 16, SIZES["hidden"])).astype(np.float32)

    def more(writer):
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(16)
        writer.add_tensor("blk.0.ffn_up_exps.weight", experts)

    write(tmp_path / "m.gguf", "qwen3moe", more=more)
    source = GGUFSource(tmp_path / "m.gguf")
    np.testing.assert_array_equal(source.read("model.layers.0.mlp.experts.2.up_proj.weight"), experts[2])
    assert source.config["num_experts"] == 3 and source.config["moe_intermediate_size"] == 16


def stops(path, architecture="llama", **ids) -> tuple[int, ...]:
    """The stop tokens of a file that names these ids, e.g. eot=1."""

    def more(writer):
        for role, number in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)

    write(path, architecture, more=more)
    return read_config(GGUFSource(path), name="it").stop_tokens


def test_every_token_that_ends_a_reply_is_a_stop_token(tmp_path):
    path = tmp_path / "m.gguf"  # whose eos is <|im_end|>, 2, or of Gemma <eos>, 1
    assert stops(path) == (2,), "the end of a turn is its eos"
    assert stops(path, eot=0) == (2, 0)
    assert stops(path, eot=0, eom=7) == (2, 0, 7)
    assert stops(path, "gemma3") == (1,), "no token is known as the end of a turn"
    assert stops(path, "gemma3", eot=9) == (1, 9)


def test_the_end_of_a_turn_is_known_by_its_text_where_no_id_names_it():
    metadata = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.tokens": ["a", "<eos>", "<end_of_turn>"]}
    assert stop_tokens(metadata | {"tokenizer.ggml.token_type": [1, 3, 3]}) == [1, 2]
    assert stop_tokens(metadata | {"tokenizer.ggml.token_type": [1, 3, 1]}) == [1], "text that a user may write"
    assert stop_tokens({}) == []


def llama3_factors(factor: float) -> np.ndarray:
    """The converter's loop (convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors), in plain Python."""
    found = []
    for i in range(0, SIZES["head_dim"], 2):
        wavelength = 2 * np.pi * 1e5 ** (i / SIZES["head_dim"])
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_rope_scaling(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, more=lambda w: w.add_tensor("rope_freqs.weight", llama3_factors(32.0)))
    scaling = AutoConfig.for_model(**GGUFSource(path).config).rope_parameters
    assert (scaling["rope_type"], scaling["factor"], scaling["rope_theta"]) == ("llama3", 32.0, 1e5)
    write(path, more=lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32)))
    with pytest.raises(ValueError, match="not Llama 3's"):
        GGUFSource(path)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    write(path, "qwen2", more=yarn)
    config = GGUFSource(path).config
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 1e5}


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.6, 0.9999])
def test_truncated_anywhere(tmp_path, share):
    write(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"cut\.gguf.*(truncated|no GGUF file)"):
        GGUFSource(tmp_path / "cut.gguf")


def test_damaged_lengths_are_refused_at_once(tmp_path):
    write(tmp_path / "m.gguf")
    whole = bytearray((tmp_path / "m.gguf").read_bytes())
    whole[24:32] = struct.pack("<Q", 2**62)  # the length of the first key
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(ValueError, match="truncated or damaged"):
        GGUFSource(tmp_path / "m.gguf")


def test_what_is_not_supported_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "mamba")
    with pytest.raises(ValueError, match="'mamba' model; supported are llama, qwen2"):
        GGUFSource(path)
    write(path, more=lambda w: w.add_tensor("blk.0.attn_rel_b.weight", np.zeros((2, 2), np.float32)))
    with pytest.raises(ValueError, match=r"blk\.0\.attn_rel_b\.weight"):
        GGUFSource(path)
    write(path, more=lambda w: w.add_tensor("blk.0.extra.weight", np.zeros((2, 2), np.int32)))
    with pytest.raises(ValueError, match="type I32; supported are F32, F16"):
        GGUFSource(path)
    write(path, split=3)
    with pytest.raises(ValueError, match="one of 3 parts"):
        GGUFSource(path)
    content = path.read_bytes()
    path.write_bytes(b"PK\3\4" + content[4:])
    with pytest.raises(ValueError, match="no GGUF file"):
        GGUFSource(path)
    path.write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])
    with pytest.raises(ValueError, match="version 50331648"):
        GGUFSource(path)
    with pytest.raises(ValueError, match="no file"):
        GGUFSource(tmp_path / "none.gguf")
