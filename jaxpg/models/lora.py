"""Low-rank adapters: W is frozen and W + A·B·alpha/r computes (LoRA; Hu et al. 2021, eq. 3).

Adapters are one more entry of a model's parameters, `params["lora"]`: wherever there is one, the forward pass adds it.
So the reference model is the parameters without that entry, and costs no copy:

    params = lora.attach(params, lora.init(key, config, rank=8))
    state = train_state.init(params, optimizer, key, trainable=lora.is_adapter)
    update = make_update(loss_fn, optimizer, trainable=lora.is_adapter)
    reference = lora.base(state.params)          # before each update anew, since the update takes the state's arrays
    hf.save(folder, config, lora.merge(config, state.params))

`save` and `load` speak the format of PEFT (https://github.com/huggingface/peft).
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxpg.estimators import checks
from jaxpg.models.config import Config
from jaxpg.models.hf import names
from jaxpg.models.hf.export import gather
from jaxpg.parallel.paths import by_path, path_name
from jaxpg.types import Array

ATTENTION = ("attention/query", "attention/key", "attention/value", "attention/out")
MLP = ("mlp/gate", "mlp/up", "mlp/down")
TARGETS = ATTENTION + MLP

WEIGHTS, DESCRIPTION = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # how PEFT wraps a model
# What an adapter_config.json must not ask for, since we would silently compute something else.
REFUSED = {
    "use_dora": "magnitudes apart from directions (DoRA)",
    "use_rslora": "another scale, alpha/√r",
    "modules_to_save": "whole modules beside the adapters",
    "rank_pattern": "ranks that differ from module to module",
    "alpha_pattern": "scales that differ from module to module",
    "fan_in_fan_out": "weights stored transposed",
    "lora_bias": "biases of adapters",
    "layer_replication": "layers used more than once",
}


def init(key: Array, config: Config, *, rank: int, targets: Sequence[str] | None = None) -> dict:
    """Draws adapters that change nothing yet.

        A_ij ~ N(0, 1/fan_in),   B = 0

    Source: Hu et al. 2021, section 4.1. The adapters of a target do not depend on which others there are.

    Args:
      key: a typed PRNG key.
      config: the model's; `config.lora_alpha` / rank scales the adapters wherever they are used.
      rank: r.
      targets: projections, some of `TARGETS`; default all of them.

    Returns:
      {"layers": {"attention": {"query": {"a": [L, in..., r], "b": [L, r, out...]}, ...}, ...}}, float32.

    Raises:
      ValueError: for a rank below 1, no target or an unknown one, or an adapter on experts.
    """
    checks.at_least("rank", rank, 1)
    weights, layers = names.tensors(config), {}
    for target in _check_targets(config, targets):
        ins, outs = _axes(weights[f"layers/{target}"][0])
        shape = (config.num_layers, *ins, rank)
        drawn = jax.random.normal(jax.random.fold_in(key, TARGETS.index(target)), shape, jnp.float32)
        b = jnp.zeros((config.num_layers, rank, *outs), jnp.float32)
        _put(layers, target, {"a": drawn / np.sqrt(np.prod(ins)), "b": b})
    return {"layers": layers}


def attach(params: dict, adapters: dict) -> dict:
    """Gives a model's parameters adapters, in place of those they may have.

    Raises:
      ValueError: if an adapter is of no parameter, or of one with another shape.
    """
    weights = _leaves(base(params))
    for target, (a, b) in _pairs(adapters).items():
        if target not in weights:
            raise ValueError(f"adapters hold {target}, params do not: make the adapters with the config of params")
        shape = (*a.shape[:-1], *b.shape[2:])
        if weights[target].shape != shape or a.shape[-1] != b.shape[1]:
            raise ValueError(
                f"adapters of {target} have shapes {a.shape} and {b.shape}, params {weights[target].shape}: must be "
                "[layers, in..., r] and [layers, r, out...]"
            )
    return {**params, "lora": adapters}


def base(params: dict) -> dict:
    """Leaves the adapters out: the model as it was before them, the same arrays."""
    return {name: value for name, value in params.items() if name != "lora"}


def is_adapter(path: str) -> bool:
    """Says whether the parameter at a path such as "actor/lora/layers/mlp/up/a" is an adapter's."""
    return "lora" in path.split("/")


def merge(config: Config, params: dict) -> dict:
    """Adds the adapters to the weights, for export to whatever knows no adapters.

        W ← W + A·B·alpha/r

    Returns:
      Parameters without adapters. Weights that had one come in float32, whatever they were: rounded to bfloat16 a small
      adapter would vanish.
    """
    pairs = _pairs(params.get("lora", {}))

    def merged(path, weight: Array) -> Array:
        if path_name(path) not in pairs:
            return weight
        a, b = pairs[path_name(path)]
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision="highest"))(checks.as_float(a), b)
        return checks.as_float(weight) + product * (config.lora_alpha / a.shape[-1])

    return jax.tree_util.tree_map_with_path(merged, base(params))


def save(
    folder: str | Path, config: Config, params: dict, *, base_model: str | None = None, overwrite: bool = False
) -> None:
    """Writes the adapters as PEFT does: adapter_config.json and adapter_model.safetensors, float32.

    With several processes each must call; the first one writes. The folder appears whole or not at all.

    Args:
      folder: to be made.
      config: the model's.
      params: the model's parameters with adapters, of one rank.
      base_model: name or path of the model without adapters, for whoever loads them.
      overwrite: replace what stands at `folder`.

    Raises:
      ValueError: if the folder exists, or `params` hold no adapters, or some of different rank.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise ValueError(f"folder={str(folder)!r} exists: choose another, or pass overwrite=True to replace it")
    pairs = _pairs(params.get("lora", {}))
    ranks = {a.shape[-1] for a, _ in pairs.values()}
    if len(ranks) != 1:
        raise ValueError(f"params hold adapters of ranks {sorted(ranks)}: must be of one rank, see lora.init")
    targets = [target.removeprefix("layers/") for target in pairs]
    table, leaves = _tensors(config, targets, *ranks), _leaves(params["lora"])
    content = {}
    for path, tensors in table.items():
        stacked = gather(leaves[path])
        for tensor in tensors:
            stored = tensor.theirs(stacked[tensor.index])
            content[tensor.name] = np.ascontiguousarray(stored, np.float32)
    if jax.process_index() == 0:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(content, partial / WEIGHTS, metadata={"format": "pt"})
        description = _description(config, targets, *ranks, base_model)
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)


def _description(config: Config, targets: list[str], rank: int, base_model: str | None) -> dict:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": [names.IN_LAYER[target].split(".")[-2] for target in targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def load(folder: str | Path, config: Config) -> dict:
    """Reads adapters that `save` or PEFT wrote; `attach` gives them to a model.

    Returns:
      The tree of `init`, float32.

    Raises:
      ValueError: if a file is missing or damaged, asks for something that is not supported or for another scale than
        `config.lora_alpha`, or holds tensors that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    description = _read_description(folder / DESCRIPTION, config)
    try:
        content = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS}: not a whole safetensors file ({error}); copy it again") from error
    every = _tensors(config, _available(config), description["r"])
    # A target is there if any layer has it; if not all do, the rest is missing.
    table = {
        path: tensors
        for path, tensors in every.items()
        if any(tensor.name in content for half in "ab" for tensor in every[f"{path[:-1]}{half}"])
    }
    _check_content(folder / WEIGHTS, table, content)
    adapters = {}
    for path, tensors in table.items():
        cells = [tensor.ours(content[tensor.name].__getitem__, (slice(None),) * len(tensor.cell)) for tensor in tensors]
        _put(adapters, path, jnp.asarray(np.stack(cells), jnp.float32))
    return adapters


def _read_description(file: Path, config: Config) -> dict:
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: no JSON to be read ({error}); pass a folder of lora.save or PEFT") from error
    if description.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={description.get('peft_type')!r} is not supported, only LORA")
    for field, meaning in REFUSED.items():
        if description.get(field):
            raise ValueError(f"{file}: {field}={description[field]!r} asks for {meaning}")
    if description.get("bias", "none") != "none":
        raise ValueError(f"{file}: bias={description['bias']!r} is not supported, only none")
    alpha = description["lora_alpha"]
    if alpha != config.lora_alpha:
        raise ValueError(
            f"{file}: lora_alpha={alpha}, the config says {config.lora_alpha}: load the model with "
            f"hf.load(..., lora_alpha={alpha}), or change the config with dataclasses.replace"
        )
    return description


def _check_content(file: Path, table: dict, content: dict) -> None:
    needed = {tensor.name: tensor.shape for tensors in table.values() for tensor in tensors}
    differ = [f"{name} is missing" for name in needed.keys() - content.keys()]
    differ += [f"{name} is unexpected" for name in content.keys() - needed.keys()]
    differ += [
        f"{name} has shape {content[name].shape} instead of {shape}"
        for name, shape in needed.items()
        if name in content and content[name].shape != shape
    ]
    if differ or not content:
        what = "; ".join(sorted(differ)[:4]) or "it is empty"
        raise ValueError(f"{file}: not the adapters of this config, {len(differ)} tensors differ: {what}")


def _available(config: Config) -> tuple[str, ...]:
    return ATTENTION if config.num_experts else TARGETS


def _check_targets(config: Config, targets: Sequence[str] | None) -> Sequence[str]:
    if isinstance(targets, str) or (targets is not None and not targets):
        raise ValueError(f"targets={targets!r}: must be a sequence of some of {', '.join(_available(config))}")
    for target in TARGETS if targets is None else targets:
        if config.num_experts and target not in ATTENTION:
            raise ValueError(
                f"targets: {target} would be an adapter on experts, num_experts={config.num_experts}, which is not "
                f"supported; pass targets={ATTENTION}, or some of these"
            )
        if target not in TARGETS:
            raise ValueError(f"targets: there is no projection {target!r}, choose among {', '.join(TARGETS)}")
    return TARGETS if targets is None else targets


def _axes(weight: names.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input and the output axes of a projection."""
    return weight.cell[: weight.inputs], weight.cell[weight.inputs :]


def _tensors(config: Config, targets: Sequence[str], rank: int) -> dict[str, list[names.Tensor]]:
    """Maps the path of each adapter half, such as "layers/mlp/up/a", to PEFT's tensors, one a layer."""
    every, table = names.tensors(config), {}
    for target in targets:
        for half, name in (("a", "lora_A"), ("b", "lora_B")):
            table[f"layers/{target}/{half}"] = [_half(weight, half, name, rank) for weight in every[f"layers/{target}"]]
    return table


def _half(weight: names.Tensor, half: str, name: str, rank: int) -> names.Tensor:
    ins, outs = _axes(weight)
    name = f"{PREFIX}{weight.name.removesuffix('weight')}{name}.weight"
    if half == "a":
        return names.Tensor(name, weight.index, (*ins, rank), weight.inputs)
    return names.Tensor(name, weight.index, (rank, *outs), 1)


def _leaves(tree) -> dict[str, Array]:
    return by_path(tree)


def _pairs(adapters: dict) -> dict[str, tuple[Array, Array]]:
    """Maps the path of each weight that has an adapter, such as "layers/mlp/up", to its two halves."""
    leaves = _leaves(adapters)
    return {path[:-2]: (leaves[path], leaves[f"{path[:-2]}/b"]) for path in leaves if path.endswith("/a")}


def _put(tree: dict, path: str, value) -> None:
    *parents, last = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value
