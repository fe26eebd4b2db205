"""Between the configurations of `transformers` and ours. The families differ in these few lines and nowhere else."""

import dataclasses
import math

from transformers import AutoConfig, PreTrainedConfig

from jaxpg.models.config import Config, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What a checkpoint must not ask for, since we would silently compute something else.
REFUSED = {
    "attention_bias": "biases on attention outputs",
    "mlp_bias": "biases in the MLP",
    "use_bidirectional_attention": "attention to later tokens",
    "mlp_only_layers": "dense layers among experts",
    "quantization_config": "quantised weights: dequantise the checkpoint first",
    "auto_map": "code of its own: convert it to a supported architecture first",
}
# Fields of ours that say how to compute, not what: a checkpoint does not hold them.
RUNTIME = ("compute_dtype", "attention", "remat", "remat_policy", "lora_alpha")


def from_dict(fields: dict, *, name: str) -> Config:
    """Reads the content of a config.json.

    Raises:
      ValueError: if the architecture, or something it asks for, is not supported. `name` says where it stood.
    """
    model_type = fields.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(f"{name}: model_type={model_type!r} is not supported, only {', '.join(ARCHITECTURES)}")
    for field, meaning in REFUSED.items():
        if fields.get(field):
            raise ValueError(f"{name}: {field}={fields[field]!r} asks for {meaning}")
    if fields.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"{name}: decoder_sparse_step={fields['decoder_sparse_step']} asks for dense layers among experts"
        )
    try:
        hf = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers checks the types of fields with errors of many classes
        raise ValueError(f"{name}: transformers does not take this config.json ({error})") from error
    activation = getattr(hf, "hidden_activation", None) or hf.hidden_act
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation {activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
    eos = hf.eos_token_id
    return Config(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        mlp_size=hf.moe_intermediate_size if model_type == "qwen3_moe" else hf.intermediate_size,
        max_length=hf.max_position_embeddings,
        tie_embeddings=hf.tie_word_embeddings,
        stop_tokens=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        activation=ACTIVATIONS[activation],
        norm_epsilon=hf.rms_norm_eps,
        qkv_bias=model_type == "qwen2",
        query_key_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        **_windows(hf),
        **_rope(hf, name),
        **_gemma(hf),
        **_experts(hf),
    )


def _windows(hf: PreTrainedConfig) -> dict:
    window = getattr(hf, "sliding_window", None)
    layer_types = getattr(hf, "layer_types", None)
    local = (window is not None,) * hf.num_hidden_layers
    if layer_types is not None:
        local = tuple(kind == "sliding_attention" for kind in layer_types)
    if not any(local):
        return {}
    return {"window": window} if all(local) else {"window": window, "local_layers": local}


def _gemma(hf: PreTrainedConfig) -> dict:
    if not hf.model_type.startswith("gemma"):
        return {}
    return {
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": math.sqrt(hf.hidden_size),
        "query_scale": hf.query_pre_attn_scalar**-0.5,
        "attention_softcap": hf.attn_logit_softcapping,
        "final_softcap": hf.final_logit_softcapping,
    }


def _experts(hf: PreTrainedConfig) -> dict:
    if hf.model_type != "qwen3_moe":
        return {}
    return {
        "num_experts": hf.num_experts,
        "experts_per_token": hf.num_experts_per_tok,
        "normalize_experts": hf.norm_topk_prob,
    }


def _rope(hf: PreTrainedConfig, name: str) -> dict:
    """`rope_parameters`, to which transformers brings the older spellings; by kind of layer in Gemma 3."""
    parameters = hf.rope_parameters
    if "full_attention" not in parameters:
        return {"rope_base": parameters["rope_theta"], "rope_scaling": _scaling(parameters, hf, name)}
    local = parameters["sliding_attention"]
    if local["rope_type"] != "default":
        raise ValueError(f"{name}: rope_type={local['rope_type']!r} on local layers is not supported, only default")
    everywhere = parameters["full_attention"]
    return {
        "rope_base": everywhere["rope_theta"],
        "rope_scaling": _scaling(everywhere, hf, name),
        "local_rope_base": local["rope_theta"],
    }


def _scaling(parameters: dict, hf: PreTrainedConfig, name: str) -> RopeScaling | None:
    kind = parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{name}: partial_rotary_factor={parameters['partial_rotary_factor']} is not supported, only 1"
        )
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"{name}: rope_type={kind!r} is not supported, only default, linear, llama3, yarn")
    original = parameters.get("original_max_position_embeddings") or hf.max_position_embeddings
    if kind == "linear":
        return RopeScaling(kind=kind, factor=parameters["factor"])
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        return RopeScaling(kind=kind, factor=parameters["factor"], original_length=original, low=low, high=high)
    factor = parameters["factor"] or hf.max_position_embeddings / original
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_length=original,
        low=parameters.get("beta_slow") or 1.0,
        high=parameters.get("beta_fast") or 32.0,
        attention_factor=_yarn_attention_factor(parameters, factor),
        truncate=parameters.get("truncate", True),
    )


def _yarn_attention_factor(parameters: dict, factor: float) -> float:
    """0.1·ln(factor) + 1 unless the checkpoint says otherwise (Peng 2023, eq. 22)."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    ours, theirs = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(ours) / magnitude(theirs) if ours and theirs else magnitude(1.0)


def to_hf(config: Config, *, dtype: str) -> PreTrainedConfig:
    """Finds the family that computes what a Config says, and writes its configuration.

    Raises:
      ValueError: if no family has this combination of features.
    """
    c = config
    model_type = _family(c)
    fields = {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "moe_intermediate_size" if c.num_experts else "intermediate_size": c.mlp_size,
        "max_position_embeddings": c.max_length,
        "tie_word_embeddings": c.tie_embeddings,
        "eos_token_id": list(c.stop_tokens) if len(c.stop_tokens) > 1 else (*c.stop_tokens, None)[0],
        "rms_norm_eps": c.norm_epsilon,
        "rope_parameters": _rope_parameters(c),
        "dtype": dtype,
    }
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation)
    fields["hidden_activation" if model_type.startswith("gemma") else "hidden_act"] = activation
    fields["sliding_window"], fields["use_sliding_window"] = c.window, c.window is not None
    if model_type in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        fields["layer_types"] = ["sliding_attention" if local else "full_attention" for local in c.locality]
    if model_type.startswith("gemma"):
        fields |= {
            "query_pre_attn_scalar": round(c.score_scale**-2),  # transformers wants an integer
            "attn_logit_softcapping": c.attention_softcap,
            "final_logit_softcapping": c.final_softcap,
        }
    if c.num_experts:
        fields |= {
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.experts_per_token,
            "norm_topk_prob": c.normalize_experts,
        }
    _check_same(c, from_dict(fields, name="config"), model_type)
    return AutoConfig.for_model(**fields)


def _family(c: Config) -> str:
    if c.num_experts:
        return "qwen3_moe"
    if c.post_norms:
        return "gemma3_text" if c.query_key_norm else "gemma2"
    if c.query_key_norm:
        return "qwen3"
    if c.qkv_bias:
        return "qwen2"
    return "llama" if c.window is None else "mistral"


def _rope_parameters(c: Config) -> dict:
    s = c.rope_scaling
    everywhere = {"rope_type": "default" if s is None else s.kind, "rope_theta": c.rope_base}
    if s is not None:
        everywhere["factor"] = s.factor
    if s is not None and s.kind != "linear":
        everywhere["original_max_position_embeddings"] = s.original_length
        low, high = ("low_freq_factor", "high_freq_factor") if s.kind == "llama3" else ("beta_slow", "beta_fast")
        everywhere |= {low: s.low, high: s.high}
    if s is not None and s.kind == "yarn":
        everywhere |= {"attention_factor": s.attention_factor, "truncate": s.truncate}
    if c.local_rope_base is None:
        return everywhere
    local = {"rope_type": "default", "rope_theta": c.local_rope_base}
    return {"full_attention": everywhere, "sliding_attention": local}


def _check_same(ours: Config, read_back: Config, model_type: str):
    pairs = ((name, getattr(ours, name), getattr(read_back, name)) for name in _checkpoint_fields())
    differ = [f"{name}={a!r} (read back as {b!r})" for name, a, b in pairs if not _equal(a, b)]
    if differ:
        raise ValueError(
            f"no Hugging Face family computes this config; {model_type} is nearest, but: {'; '.join(differ)}"
        )


def _checkpoint_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Config) if field.name not in RUNTIME]


def _equal(a, b) -> bool:
    numbers = isinstance(a, float) and isinstance(b, (int, float))
    return math.isclose(a, b, rel_tol=1e-12) if numbers else a == b
