"""Where tensors come from: a directory of safetensors files, read slice by slice."""

import json
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

FLOATS = ("F32", "BF16", "F16", "F64")


class Source(Protocol):
    """What `load` reads from."""

    config: dict  # the content of config.json
    generation_config: dict
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...

    def tokenizer(self): ...


class Directory:
    """A local Hugging Face directory; opening it reads the headers alone."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False):
        self.folder, self.trust_remote_code = folder, trust_remote_code
        self.config = _json(folder / "config.json")
        optional = folder / "generation_config.json"
        self.generation_config = _json(optional) if optional.exists() else {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}
        for file in _weight_files(folder):
            self._open(file)

    def _open(self, file: Path):
        try:
            handle = safe_open(file, "numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}); fetch or copy it again") from error
        for name in handle.keys():  # noqa: SIM118 - it is no dict
            part = handle.get_slice(name)
            if part.get_dtype() not in FLOATS:
                raise ValueError(f"{file}: {name} has dtype {part.get_dtype()}, only {', '.join(FLOATS)} can be read")
            if name in self.shapes:
                raise ValueError(f"{file}: {name} stands in another file too; remove one of the two checkpoints")
            self.shapes[name] = tuple(part.get_shape())
            self._files[name] = handle

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._files[name].get_slice(name)[index]

    def tokenizer(self):
        """The tokenizer, or None where the directory has none."""
        from transformers import AutoTokenizer

        if not any((self.folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        return AutoTokenizer.from_pretrained(self.folder, padding_side="left", trust_remote_code=self.trust_remote_code)


def _json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing: pass a directory that holds a model, or a hub name") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); fetch or copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, a JSON object is expected")
    return content


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or the only ones there are."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(_json(index).get("weight_map", {}).values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"{folder}: {index.name} names {', '.join(missing)}, not there; fetch the missing shards")
    if files:
        return files
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickles:
        raise ValueError(
            f"{folder}: only pickle weights ({', '.join(pickles)}), which can run any code when they are read; "
            "convert them to safetensors on a machine you trust"
        )
    raise ValueError(f"{folder}: no *.safetensors file in it")
