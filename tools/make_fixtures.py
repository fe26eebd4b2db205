"""Makes the golden fixtures of the model families: tiny random checkpoints, and what transformers computes with them.

    make test-parity ARGS=--co                            # once: installs torch
    .venv-parity/bin/python tools/make_fixtures.py        # all, into tests/fixtures/
    .venv-parity/bin/python tools/make_fixtures.py llama2 gemma3

Each folder holds config.json and safetensors as transformers saves them, and golden.npz:

    {none,left,right}_tokens [2, T] int32    no padding, or padded with real tokens' ids on that side
    {none,left,right}_mask [2, T] bool
    {none,left,right}_logits [N, V] float32  at the N real positions, row by row
    prompts, prompt_mask [3, S]              padded on the left
    continuations [3, 12] int32              greedy, whatever the stop tokens

A fixture proves something only where every number matters. So this fails if any tensor of a model, or any setting that
its family lists under `matters`, could be changed without changing the logits, or if a greedy choice hangs by a hair.
"""

import argparse
import copy
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"
LENGTHS = (20, 13)  # real tokens of the two rows
PROMPT_LENGTHS = (9, 3, 6)
NEW_TOKENS = 12
SEED = 0
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}


@dataclasses.dataclass(frozen=True)
class Family:
    """What to make: fields of a transformers config, and how config.json and the weights are written."""

    model_type: str
    config: dict  # fields beyond COMMON
    matters: dict = dataclasses.field(default_factory=dict)  # setting -> another value, which must change the logits
    flat: dict | None = None  # written into config.json, None removes: as spelled before transformers 5
    dtype: str = "float32"  # of the stored weights
    shard_bytes: int | None = None


COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,  # large enough to be seen at 1e-4
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 512}
YARN_SHORT = {
    **YARN,
    "original_max_position_embeddings": 8,
    "beta_fast": 1.0,
    "beta_slow": 0.1,
    "attention_factor": 1.3,
}
GEMMA2 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 5,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
    "pad_token_id": 0,
}
GEMMA3 = {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 5,
    "head_dim": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
    },
}
LOCAL, GLOBAL = (GEMMA3["rope_parameters"][kind] for kind in ("sliding_attention", "full_attention"))
GEMMA3_MATTERS = {
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention"] * 4,
    "rope_parameters": {"sliding_attention": LOCAL, "full_attention": {**GLOBAL, "factor": 7.0}},
}
MOE = {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}

FAMILIES = {
    "llama2": Family("llama", {"tie_word_embeddings": False, "rope_parameters": ROPE}, {"rms_norm_eps": 2e-3}),
    "llama3": Family(
        "llama",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3, "eos_token_id": [2, 5]},
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 5.0}},
    ),
    "llama3_flat": Family(
        "llama",
        {"head_dim": 16, "tie_word_embeddings": False, "rope_parameters": LLAMA3},
        {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}},
        flat={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        },
    ),
    "llama_linear": Family(
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 3.5}},
    ),
    "llama_yarn": Family(
        "llama",
        {"head_dim": 16, "rope_parameters": YARN_SHORT},
        {"rope_parameters": {**YARN_SHORT, "beta_slow": 0.2}},
    ),
    "smollm2": Family(
        "llama",
        {"num_hidden_layers": 4, "tie_word_embeddings": True, "rope_parameters": ROPE},
        dtype="bfloat16",
        flat={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None}
        | {"dtype": None, "torch_dtype": "bfloat16", "head_dim": None},
    ),
    "qwen2": Family("qwen2", {"tie_word_embeddings": True, "rope_parameters": ROPE}),
    "qwen2_yarn": Family(  # as Qwen2.5's page says to switch YaRN on; and the last layer is local
        "qwen2",
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}, "sliding_window": 5},
        flat={
            "layer_types": None,
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        },
    ),
    "qwen3": Family(
        "qwen3", {"head_dim": 16, "tie_word_embeddings": False, "rope_parameters": ROPE}, shard_bytes=50_000
    ),
    "gemma2": Family(
        "gemma2",
        GEMMA2,
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.1,
            "final_logit_softcapping": 6.1,
        },
    ),
    "gemma3": Family("gemma3_text", GEMMA3, GEMMA3_MATTERS),
    "gemma3_flat": Family(
        "gemma3_text",
        GEMMA3 | {"layer_types": None, "sliding_window_pattern": 3},
        flat={
            "rope_parameters": None,
            "layer_types": None,
            "_sliding_window_pattern": None,
            "sliding_window_pattern": 3,
            "rope_theta": 500.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        dtype="bfloat16",
    ),
    "mistral": Family("mistral", {"head_dim": 16, "sliding_window": None, "rope_parameters": ROPE}),
    "mistral_window": Family("mistral", {"sliding_window": 4, "rope_parameters": ROPE}, {"sliding_window": 5}),
    "qwen3_moe": Family("qwen3_moe", {**MOE, "norm_topk_prob": True}, {"norm_topk_prob": False}),
    "qwen3_moe_unnormalized": Family(
        "qwen3_moe",
        {**MOE, "norm_topk_prob": False},
        {"norm_topk_prob": True, "num_experts_per_tok": 3},
        flat={"num_local_experts": None, "num_experts": 4},  # as published
    ),
}


def make_model(family: Family, seed: int) -> transformers.PreTrainedModel:
    """A random model in float32 whose weights can all be stored in the family's dtype."""
    fields = copy.deepcopy({**COMMON, **family.config})
    model = build(transformers.AutoConfig.for_model(family.model_type, **fields))
    randomize(model, seed, getattr(torch, family.dtype))
    return model


def build(config) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(config, **PLAIN).eval()


def load(folder: Path) -> transformers.PreTrainedModel:
    """A saved model, by transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **PLAIN).eval()


@torch.no_grad()
def randomize(model, seed: int, dtype: torch.dtype) -> None:
    """Draws matrices at 0.25, norm weights around their neutral value and biases at 0.5: nothing is at its default."""
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")  # its norms multiply by 1 + weight
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            # Gemma's norms behind a block at 2: else the embedding outweighs the layers and greedy repeats one token.
            value = (0.0 if gemma else 1.0) + (gemma and "post_" in name) + 0.3 * noise
        else:
            value = (0.5 if name.endswith(".bias") else 0.25) * noise
        parameter.copy_(value.to(dtype))


def draw_tokens(seed: int, rows: int, length: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length), dtype=np.int32)


def mask_of(lengths, total: int, side: str) -> np.ndarray:
    """[rows, total] bool: each row has its length of real tokens, padded on that side."""
    column, length = np.arange(total), np.asarray(lengths)[:, None]
    return column >= total - length if side == "left" else column < length


def padded_batches(seed: int, vocab_size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tokens and mask for no, left and right padding; padding holds ids like any other."""
    longest = max(LENGTHS)
    batches = {}
    for place, side in enumerate(("none", "left", "right")):
        lengths = (longest, longest) if side == "none" else LENGTHS
        batches[side] = draw_tokens(seed + place, 2, longest, vocab_size), mask_of(lengths, longest, side)
    return batches


@torch.no_grad()
def logits(model, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """transformers' logits [N, V] at the real positions, row by row."""
    mask = torch.from_numpy(mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens = torch.from_numpy(tokens).long()
    output = model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    return output.logits[mask].numpy()


@torch.no_grad()
def greedy(model, prompts: np.ndarray, mask: np.ndarray, new_tokens: int = NEW_TOKENS) -> np.ndarray:
    """transformers' greedy continuations [rows, new_tokens] by its own cached generation; no token stops it."""
    kept = model.generation_config
    # Not passed to generate, which would fill in the stop tokens of the model's own.
    model.generation_config = transformers.GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0)
    output = model.generate(torch.from_numpy(prompts).long(), attention_mask=torch.from_numpy(mask).long())
    model.generation_config = kept
    return output[:, prompts.shape[1] :].numpy().astype(np.int32)


def prompts_of(seed: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    longest = max(PROMPT_LENGTHS)
    tokens = draw_tokens(seed + 100, len(PROMPT_LENGTHS), longest, vocab_size)
    return tokens, mask_of(PROMPT_LENGTHS, longest, "left")


def clear_greedy(model, seed: int, *, margin: float = 0.02, distinct: int = 4) -> dict[str, np.ndarray]:
    """Prompts whose greedy continuations hang by no hair, checked row by row without cache and padding."""
    for attempt in range(seed, seed + 50):
        prompts, mask = prompts_of(attempt, model.config.vocab_size)
        continuations = greedy(model, prompts, mask)
        scores = [_scores_of(model, *row) for row in zip(prompts, mask, continuations, strict=True)]
        first, second = np.moveaxis(np.sort(scores, axis=-1)[..., :-3:-1], -1, 0)
        varied = min(len(set(row.tolist())) for row in continuations) >= distinct
        if (first - second).min() < margin or not varied:
            continue
        np.testing.assert_array_equal(np.argmax(scores, axis=-1), continuations)
        return {"prompts": prompts, "prompt_mask": mask, "continuations": continuations}
    raise SystemExit("no prompts with clear and varied greedy continuations: take another seed")


def _scores_of(model, prompt: np.ndarray, real: np.ndarray, continuation: np.ndarray) -> np.ndarray:
    """Logits [new tokens, V] that a greedy continuation was chosen by."""
    row = np.concatenate([prompt[real], continuation])[None]
    return logits(model, row, np.ones_like(row, bool))[real.sum() - 1 : -1]


@torch.no_grad()
def check_everything_matters(family: Family, model, tokens: np.ndarray, mask: np.ndarray) -> None:
    """Fails if a tensor, an expert's slice of one, or a setting has no say in the logits."""
    reference = logits(model, tokens, mask)
    for name, parameter in model.named_parameters():
        slices = list(parameter) if parameter.ndim == 3 else [parameter]
        for place, part in enumerate(slices):
            kept = part.clone()
            part.add_(0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(7)))
            _check_changed(f"{name}[{place}]", reference, logits(model, tokens, mask))
            part.copy_(kept)
    for name, value in family.matters.items():
        config = copy.deepcopy(model.config)
        setattr(config, name, copy.deepcopy(value))
        other = build(config)
        other.load_state_dict(model.state_dict())
        _check_changed(name, reference, logits(other, tokens, mask))


def _check_changed(name: str, reference: np.ndarray, changed: np.ndarray) -> None:
    difference = np.abs(reference - changed).max()
    if not difference > 2e-3:
        raise SystemExit(f"{name} hardly matters: the logits change by {difference:.1e}")


def save(family: Family, model, folder: Path) -> None:
    """Writes config.json and the weights as transformers does, and respells the config where the family says so."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = copy.deepcopy(model).to(getattr(torch, family.dtype))
    shards = {"max_shard_size": family.shard_bytes} if family.shard_bytes else {}
    stored.save_pretrained(folder, **shards)
    if family.flat is None:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text()) | family.flat
    config = {key: value for key, value in config.items() if value is not None or key == "rope_scaling"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def make(name: str) -> None:
    family, folder = FAMILIES[name], FIXTURES / name
    model = make_model(family, SEED)
    golden = clear_greedy(model, SEED)
    batches = padded_batches(SEED, model.config.vocab_size)
    for side, (tokens, mask) in batches.items():
        golden |= {f"{side}_tokens": tokens, f"{side}_mask": mask, f"{side}_logits": logits(model, tokens, mask)}
    tokens, mask = batches["left"]
    check_everything_matters(family, model, tokens, mask)

    exact = logits(copy.deepcopy(model).double(), *batches["none"])  # with padding transformers gives NaN in float64
    rounding = np.abs(exact - golden["none_logits"]).max()
    if not rounding < 3e-5:  # the tests allow 1e-4
        raise SystemExit(f"{name}: float32 rounding alone moves the logits by {rounding:.1e}")

    shutil.rmtree(folder, ignore_errors=True)
    save(family, model, folder)
    np.testing.assert_array_equal(logits(load(folder), tokens, mask), golden["left_logits"])
    np.savez_compressed(folder / "golden.npz", **golden)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name:24} {size / 1000:5.0f} kB, rounding {rounding:.0e}, largest logit {golden['left_logits'].max():.1f}")
    if size > 250_000:
        raise SystemExit(f"{folder} is {size} bytes: keep fixtures under 250 kB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the golden fixtures of the model families.")
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="default: all")
    names = parser.parse_args().names or list(FAMILIES)
    if unknown := set(names) - set(FAMILIES):
        sys.exit(f"{', '.join(sorted(unknown))}: no such family, there are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in names:
        make(name)


if __name__ == "__main__":
    main()
