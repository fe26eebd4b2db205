"""Parameters -> a directory that `transformers` and every tool of its kind loads."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from jaxpg.models.config import Config
from jaxpg.models.hf import names
from jaxpg.models.hf.config import to_hf
from jaxpg.parallel.paths import by_path


def save(
    folder: str | Path,
    config: Config,
    params: dict,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str = "float32",
    generation: dict | None = None,
    max_shard_bytes: int = 2 * 2**30,
    overwrite: bool = False,
) -> None:
    """Writes safetensors shards, config.json, generation_config.json and the tokenizer.

    One tensor at a time is gathered, and one shard is held on the host. The folder appears whole or not at all. With
    several processes each must call; the first one writes.

    Args:
      folder: to be made.
      config: the model's. The family is the one that computes the same.
      params: the model's parameters; merge adapters first (`lora.merge`).
      tokenizer: written beside the weights.
      dtype: of the weights in the file.
      generation: content of generation_config.json, such as {"temperature": 0.6}; stop, begin and padding tokens are
        filled in from `config` and `tokenizer`.
      max_shard_bytes: a tensor larger than that gets a file of its own.
      overwrite: replace what stands at `folder`.

    Raises:
      ValueError: if the folder exists, adapters are not merged, no family computes this config, or the parameters
        are not those of `config`.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise ValueError(f"folder={str(folder)!r} exists: choose another, or pass overwrite=True to replace it")
    if "lora" in params:
        raise ValueError("params hold adapters: merge them first (lora.merge) or save them alone (lora.save)")
    hf_config = to_hf(config, dtype=dtype)
    table = names.tensors(config)
    leaves = _check(table, params)
    writer = jax.process_index() == 0
    partial = folder.with_name(f".{folder.name}.partial")
    if writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        hf_config.save_pretrained(partial)
        content = _generation(config, tokenizer) | (generation or {})
        (partial / "generation_config.json").write_text(json.dumps(content, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    _write_weights(partial, table, leaves, jnp.dtype(dtype), max_shard_bytes, writer)
    if writer:
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)


def _check(table: dict, params: dict) -> dict[str, jax.Array]:
    leaves = by_path(params)
    if leaves.keys() != table.keys():
        differ = sorted(leaves.keys() ^ table.keys())
        raise ValueError(f"params are not those of config, they differ in: {', '.join(differ)}")
    for path, leaf in leaves.items():
        last = table[path][-1]
        expected = tuple(i + 1 for i in last.index) + last.cell
        if leaf.shape != expected:
            raise ValueError(f"params: {path} has shape {leaf.shape}, config says {expected}")
    return leaves


def _write_weights(folder: Path, table, leaves, dtype, max_shard_bytes: int, writer: bool) -> None:
    shards = _plan(table, dtype.itemsize, max_shard_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for path, tensor in shard:
            cell = gather(leaves[path][tensor.index])
            if writer:
                content[tensor.name] = np.ascontiguousarray(tensor.theirs(cell).astype(dtype))
                weight_map[tensor.name] = file
        if writer:
            save_file(content, folder / file, metadata={"format": "pt"})
    if writer and len(shards) > 1:
        total = sum(_size(tensor, dtype.itemsize) for shard in shards for _, tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plan(table, itemsize: int, max_shard_bytes: int) -> list[list]:
    """Deals tensors out to files, in order."""
    shards, room = [], 0
    for path, tensors in table.items():
        for tensor in tensors:
            size = _size(tensor, itemsize)
            if not shards or size > room:
                shards.append([])
                room = max_shard_bytes
            shards[-1].append((path, tensor))
            room -= size
    return shards


def _size(tensor: names.Tensor, itemsize: int) -> int:
    return int(np.prod(tensor.cell)) * itemsize


def gather(x: jax.Array) -> np.ndarray:
    """The whole array on the host."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def _generation(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> dict:
    stops = config.stop_tokens
    content = {"eos_token_id": stops[0] if len(stops) == 1 else list(stops)} if stops else {}
    for name in ("bos_token_id", "pad_token_id"):
        if getattr(tokenizer, name, None) is not None:
            content[name] = getattr(tokenizer, name)
    return content
