"""Reads a model from a GGUF file, the format of llama.cpp, under the names and in the layout of Hugging Face.

llama.cpp's converter (convert_hf_to_gguf.py) changes weights on the way; each change is undone here:

- "llama": rows of the query and key projections are interleaved for its rotary embedding;
- "gemma2", "gemma3": norms are stored as 1 + w;
- "qwen3moe": the experts of a layer are stacked into one tensor;
- Llama 3's RoPE scaling survives as a tensor of factors alone.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np

from jaxpg.models import gguf_tokenizer
from jaxpg.models.gguf_file import open_file

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a GGUF architecture is called in Hugging Face, and what the converter did to it."""

    architecture: str
    model_type: str
    names: dict
    interleaved: bool = False
    norm_shift: float = 0.0
    experts: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", _BLOCK, interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _BLOCK),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _BLOCK),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "qwen3_moe", _BLOCK | _ROUTER, experts=True),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", _BLOCK | _GEMMA, norm_shift=1.0),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", _BLOCK | _GEMMA, norm_shift=1.0),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where the weights of one Hugging Face tensor come from, and how to undo what the converter did."""

    tensor: str
    heads: int = 0
    shift: float = 0.0
    expert: int | None = None


class GGUFSource:
    """A GGUF file seen as a Hugging Face model.

    Opening reads the header alone; `read` decodes one tensor from the memory map.

    Attributes:
      config: the content of config.json, with RoPE both as transformers 5 names it and as it was named before.
      generation_config: the content of generation_config.json, with every token that ends a reply.
      shapes: shape of each tensor by its Hugging Face name; projections are [out, in].
    """

    def __init__(self, path: str | Path):
        """Opens a file.

        Args:
          path: a .gguf file of Llama 2 or 3, SmolLM2, Mistral, Qwen 2, 2.5 or 3, Qwen 3 MoE, Gemma 2 or 3.

        Raises:
          ValueError: if it is no GGUF file, truncated, or of an architecture, a block type or with tensors or settings
            that are not supported.
          ModuleNotFoundError: if the package `gguf` is missing.
        """
        self._file = open_file(path)
        self._name = f"path={str(self._file.path)!r}"
        architecture = self._file.metadata.get("general.architecture")
        if architecture not in _FAMILIES:
            raise ValueError(f"{self._name} holds a {architecture!r} model; supported are {', '.join(_FAMILIES)}")
        self._architecture, self._family = architecture, _FAMILIES[architecture]
        self._tokens = gguf_tokenizer.special_ids(self._file.metadata)
        self.config = self._read_config()
        self._entries = self._map_tensors()
        self.shapes = {name: self._shape(entry) for name, entry in self._entries.items()}
        stops = gguf_tokenizer.stop_tokens(self._file.metadata) or None
        self.generation_config = self._tokens | {"_from_model_config": True, "eos_token_id": stops}
        self._latest: tuple[str, np.ndarray | None] = ("", None)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Decodes one tensor, or a part of it, to float32 as Hugging Face stores it.

        Raises:
          ValueError: if the file holds no such tensor.
        """
        if name not in self._entries:
            raise ValueError(f"name={name!r} is not in {self._name}: see .shapes for those that are")
        if self._latest[0] != name:  # each device asks for its part of one tensor before the next
            self._latest = name, self._decode(name)
        return self._latest[1][index]

    def _decode(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        rows = None if entry.expert is None else (entry.expert, entry.expert + 1)
        weights = self._file.decode(entry.tensor, rows).reshape(self.shapes[name])
        if entry.heads:
            pairs = weights.reshape(entry.heads, -1, 2, *weights.shape[1:])
            weights = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
        return weights - np.float32(entry.shift) if entry.shift else weights

    def tokenizer(self):
        """Rebuilds the tokenizer, a `transformers.PreTrainedTokenizerFast` that pads on the left."""
        return gguf_tokenizer.build(self._file.metadata, self._name, max_length=self.config["max_position_embeddings"])

    def _get(self, key: str, default=None):
        """A setting of the architecture; without a default it must be there. float32 numbers as they were written."""
        value = self._file.metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{self._name} lacks {self._architecture}.{key}: convert the model again")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self._name} has {key} by layer ({value}): layers of one size are supported")
            value = value[0]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def _read_config(self) -> dict:
        hidden, heads = self._get("embedding_length"), self._get("attention.head_count")
        head_dim = self._get("attention.key_length", self._get("rope.dimension_count", hidden // heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, head_dim) != head_dim:
                raise ValueError(f"{self._name} has {key}={self._get(key)}, the heads {head_dim}: they must be equal")
        if not self._family.experts and self._get("expert_count", 0):
            raise ValueError(f"{self._name}: {self._architecture} with experts; of these qwen3moe is supported")
        for needed in ("token_embd.weight", "output_norm.weight"):
            if needed not in self._file.tensors:
                raise ValueError(f"{self._name} lacks the tensor {needed}: it is no whole language model")
        config = {
            "architectures": [self._family.architecture],
            "model_type": self._family.model_type,
            "hidden_size": hidden,
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._get("feed_forward_length", 0 if self._family.experts else None),
            "vocab_size": self._file.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "dtype": "float32",
        }
        config |= self._tokens | self._rope(head_dim)
        if self._architecture.startswith("qwen"):
            config |= {"use_sliding_window": False}
        if self._architecture != "qwen2":  # which has biases and no option for them
            config |= {"attention_bias": "blk.0.attn_q.bias" in self._file.tensors}
        if self._family.experts:
            config |= self._expert_config()
        return config | self._gemma_config(config) if self._architecture.startswith("gemma") else config

    def _expert_config(self) -> dict:
        return {
            "num_experts": self._get("expert_count"),
            "num_experts_per_tok": self._get("expert_used_count"),
            "moe_intermediate_size": self._get("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp computes it so, whatever the model
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def _gemma_config(self, config: dict) -> dict:
        """Constants that llama.cpp keeps in its source (llama-model.cpp) and not in the file."""
        layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
        second = self._architecture == "gemma2"
        every = self._get("attention.sliding_window_pattern", 2 if second else 6)
        largest = layers == (46 if second else 62)  # the 27B models divide by another square root
        extra = {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": hidden // heads if largest else config["head_dim"],
            "sliding_window": self._get("attention.sliding_window"),
            "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
            "attn_logit_softcapping": self._get("attn_logit_softcapping", 50.0 if second else 0.0) or None,
            "final_logit_softcapping": self._get("final_logit_softcapping", 30.0 if second else 0.0) or None,
        }
        if second:
            return extra
        local = self._get("rope.freq_base_swa", 10000.0)
        full = config["rope_parameters"]
        default = {"rope_type": "default", "rope_theta": local}
        extra["rope_parameters"] = {"full_attention": full, "sliding_attention": default}
        return extra | {"rope_local_base_freq": local, "sliding_window_pattern": every}

    def _rope(self, head_dim: int) -> dict:
        """RoPE under its two names: `rope_parameters`, and `rope_theta` with `rope_scaling`."""
        theta = self._get("rope.freq_base", 1e6 if self._architecture == "gemma3" else 10000.0)
        scaling = self._rope_scaling()
        if _ROPE_FACTORS in self._file.tensors:
            if scaling:
                raise ValueError(f"{self._name} has both {_ROPE_FACTORS} and RoPE scaling {scaling}: one is supported")
            scaling = llama3_scaling(self._file.decode(_ROPE_FACTORS), theta=theta, head_dim=head_dim, name=self._name)
        parameters = {"rope_type": "default", "rope_theta": theta} | scaling
        return {"rope_parameters": parameters, "rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})

    def _rope_scaling(self) -> dict:
        kind = self._get("rope.scaling.type", "none")
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0))
        if kind == "none" and factor in (0.0, 1.0):
            return {}
        if kind in ("none", "linear"):
            return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else {}
        known = {f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned")}
        betas = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        unknown = [
            key
            for key in self._file.metadata
            if key.startswith(f"{self._architecture}.rope.scaling.")
            and key.removeprefix(f"{self._architecture}.") not in known | {f"rope.scaling.{b}" for b in betas}
        ]
        if kind != "yarn" or unknown:
            raise ValueError(
                f"{self._name} scales RoPE by {kind!r} {unknown}: supported are linear, plain yarn, llama3"
            )
        found = {hf: self._get(f"rope.scaling.{key}", 0.0) for key, hf in betas.items()}
        original = int(self._get("rope.scaling.original_context_length"))
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return yarn | {key: value for key, value in found.items() if value}

    def _map_tensors(self) -> dict[str, _Entry]:
        """Hugging Face names to entries; a tensor that no rule knows is an error, for it would be dropped."""
        entries, unknown = {}, []
        for name, tensor in self._file.tensors.items():
            stem, _, kind = name.rpartition(".")
            block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
            if name == _ROPE_FACTORS:
                continue
            if stem in _TOP:
                entries[f"{_TOP[stem]}.{kind}"] = _Entry(name, shift=self._shift(stem))
            elif block and block[2] in self._family.names:
                target = f"model.layers.{block[1]}.{self._family.names[block[2]]}.{kind}"
                entries[target] = _Entry(name, heads=self._interleaved_heads(block[2]), shift=self._shift(stem))
            elif block and self._family.experts and block[2] in _EXPERTS:
                target = f"model.layers.{block[1]}.mlp.experts.{{}}.{_EXPERTS[block[2]]}.{kind}"
                entries |= {target.format(e): _Entry(name, expert=e) for e in range(tensor.shape[0])}
            else:
                unknown.append(name)
        if unknown:
            raise ValueError(
                f"{self._name} holds tensors that a {self._architecture} model does not have here: {unknown[:5]} "
                f"({len(unknown)} in all); use a file converted from the plain model"
            )
        return entries

    def _shift(self, stem: str) -> float:
        return self._family.norm_shift if stem.endswith("norm") else 0.0

    def _interleaved_heads(self, part: str) -> int:
        names = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        return self.config[names[part]] if self._family.interleaved and part in names else 0

    def _shape(self, entry: _Entry) -> tuple[int, ...]:
        shape = self._file.tensors[entry.tensor].shape
        return shape if entry.expert is None else shape[1:]


def llama3_scaling(factors: np.ndarray, *, theta: float, head_dim: int, name: str) -> dict:
    """Finds Llama 3's RoPE scaling behind the factors that the converter keeps of it.

    With wavelength λ = 2π θ^(2i/d) and original context c, the factor of frequency i is 1 where λ < c/4
    (high_freq_factor), `factor` where λ > c (low_freq_factor), and 1 / ((1-s)/factor + s) between, with
    s = (c/λ - 1) / 3.

    Args:
      factors: [d/2]. What the frequencies are divided by.
      theta: RoPE base.
      head_dim: d.
      name: of the file, for the error.

    Raises:
      ValueError: if no such scaling gives these factors.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{name} scales RoPE by factors that are not Llama 3's: {factors}; supported are linear, yarn, llama3"
        )
    return {
        "rope_type": "llama3",
        "factor": float(str(np.float32(factor))),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
