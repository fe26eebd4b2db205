"""Checkpoint -> sharded parameters, tensor by tensor."""

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from transformers import PreTrainedTokenizerBase

from jaxpg.models.config import Config
from jaxpg.models.hf import names
from jaxpg.models.hf.config import RUNTIME, from_dict
from jaxpg.models.hf.source import Directory, Source
from jaxpg.parallel import sharding
from jaxpg.parallel.paths import path_name

# What checkpoints hold beside parameters.
BUFFERS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


class Loaded(NamedTuple):
    """A model as `Model(config)` and its parameters, and the tokenizer if the checkpoint has one."""

    config: Config
    params: dict
    tokenizer: PreTrainedTokenizerBase | None


def load(
    path_or_repo: str | Path,
    *,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.TRANSFORMER_RULES,
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **changes,
) -> Loaded:
    """Loads a model in Hugging Face's layout, or from a GGUF file.

    Each tensor is read, cast and put where it belongs before the next, and each device gets the part it keeps: the
    host holds one tensor at a time. Names and shapes are compared before anything is allocated.

    Args:
      path_or_repo: a directory with config.json and safetensors files, a .gguf file, or a name on the hub, which
        `huggingface_hub` fetches.
      mesh: where to put the parameters; default one device.
      rules: path rules of the mesh, as in `sharding.shardings`.
      dtype: of the parameters.
      revision: branch, tag or commit on the hub.
      trust_remote_code: may the tokenizer run code that comes with the checkpoint? The model never does.
      **changes: how to compute, not what: compute_dtype, attention, remat, remat_policy, lora_alpha, and max_length.

    Raises:
      ValueError: for an unsupported architecture, pickle weights, a missing or damaged file, or tensors that are
        missing, unexpected or of another shape.
    """
    source = open_source(path_or_repo, revision=revision, trust_remote_code=trust_remote_code)
    config = _change(read_config(source, name=str(path_or_repo)), changes)
    table = names.tensors(config)
    check(table, source, name=str(path_or_repo), tied=config.tie_embeddings)
    shapes = names.shapes(config)
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
    else:
        places = sharding.shardings(mesh, shapes, rules)

    def assemble(path, shape, place):
        return _assemble(table[path_name(path)], shape.shape, jnp.dtype(dtype), place, source)

    params = jax.tree_util.tree_map_with_path(assemble, shapes, places)
    return Loaded(config, params, source.tokenizer())


def open_source(path_or_repo: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Opens a checkpoint, fetching it from the hub if there is no such path."""
    path = Path(path_or_repo).expanduser()
    if not path.exists():
        path = _fetch(str(path_or_repo), revision)
    if path.is_file() or (not (path / "config.json").exists() and len(list(path.glob("*.gguf"))) == 1):
        from jaxpg.models.gguf import GGUFSource

        return GGUFSource(path if path.is_file() else next(path.glob("*.gguf")))
    return Directory(path, trust_remote_code=trust_remote_code)


def _fetch(repo: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    except Exception as error:  # of many kinds: a bad name, no network, no access
        raise ValueError(
            f"path_or_repo={repo!r}: no such path here, and the hub did not give it ({type(error).__name__}: {error})"
        ) from error


def read_config(source: Source, *, name: str) -> Config:
    """The Config of a checkpoint, with the stop tokens of its generation config if that names any."""
    config = from_dict(source.config, name=name)
    stops = source.generation_config.get("eos_token_id")
    if stops is None:
        return config
    return dataclasses.replace(config, stop_tokens=(stops,) if isinstance(stops, int) else tuple(stops))


def _change(config: Config, changes: dict) -> Config:
    allowed = (*RUNTIME, "max_length")
    unknown = [name for name in changes if name not in allowed]
    if unknown:
        raise ValueError(
            f"{unknown[0]}={changes[unknown[0]]!r} cannot be changed in a checkpoint, only {', '.join(allowed)}"
        )
    return dataclasses.replace(config, **changes)


def check(table: dict[str, list[names.Tensor]], source: Source, *, name: str, tied: bool) -> None:
    """Compares the names and shapes that the model needs with those that the checkpoint has."""
    needed = {tensor.name: tensor.shape for tensors in table.values() for tensor in tensors}
    ignored = {"lm_head.weight"} if tied else set()
    unexpected = [
        found for found in source.shapes if found not in needed and found not in ignored and not found.endswith(BUFFERS)
    ]
    missing = [wanted for wanted in needed if wanted not in source.shapes]
    wrong = [
        f"{wanted} has shape {source.shapes[wanted]}, its config.json says {shape}"
        for wanted, shape in needed.items()
        if wanted in source.shapes and source.shapes[wanted] != shape
    ]
    parts = [
        f"{len(found)} {what} ({', '.join(found[:4])}{', ...' if len(found) > 4 else ''})"
        for what, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if found
    ]
    if parts:
        raise ValueError(f"{name}: its tensors are not those of its config.json: {'; '.join(parts)}")


def _assemble(tensors, shape: tuple[int, ...], dtype, place, source: Source) -> jax.Array:
    """Builds one parameter on its devices."""
    leading = len(tensors[0].index)
    cell_place = _behind(place, leading)

    def cell(tensor: names.Tensor) -> jax.Array:
        def part(index):
            return np.asarray(tensor.ours(lambda stored: source.read(tensor.name, stored), index), dtype)

        return jax.make_array_from_callback(tensor.cell, cell_place, part)

    if not leading:
        return cell(tensors[0])
    # Written into one buffer in place: a stack of all cells at the end would hold the parameter twice.
    stack, write = jnp.zeros(shape, dtype, device=place), _writer(place)
    for tensor in tensors:
        stack = write(stack, cell(tensor), np.asarray(tensor.index, np.int32))
    return jax.block_until_ready(stack)


@lru_cache
def _writer(place):
    """Compiles once for each shape and place, not for each load."""
    return jax.jit(_write, donate_argnums=0, out_shardings=place)


def _write(stack: jax.Array, cell: jax.Array, index: jax.Array) -> jax.Array:
    leading = index.shape[0]
    start = [*index, *([0] * cell.ndim)]
    return jax.lax.dynamic_update_slice(stack, cell.reshape((1,) * leading + cell.shape), start)


def _behind(place, leading: int):
    """The sharding of an entry of the leading axes, which no rule cuts."""
    if not isinstance(place, NamedSharding):
        return place
    spec = tuple(place.spec)
    if any(axis is not None for axis in spec[:leading]):
        raise ValueError(f"rules cut a stacked parameter along its layers, {place.spec}: cut one of its other axes")
    return NamedSharding(place.mesh, PartitionSpec(*spec[leading:]))
