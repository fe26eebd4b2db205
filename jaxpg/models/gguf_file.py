"""The header of a GGUF file: metadata and where each tensor lies, read with every length checked against the file.

The package `gguf` knows the types and decodes the blocks. Its own reader took 10 s for the header of SmolLM2-135M and
40 s for Gemma 3 (it makes array views for each token of the vocabulary), against 0.5 s and 0.8 s here, and tells of a
truncated file by an IndexError.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
PIECE = 1 << 24  # weights decoded at a time
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: its shape slowest axis first (numpy's order), block type, first byte and length."""

    shape: tuple[int, ...]
    type: str
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """Metadata by key, tensors by llama.cpp's name, and the file, mapped into memory."""

    path: Path
    metadata: dict
    tensors: dict[str, Tensor]
    bytes: np.ndarray

    def decode(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Dequantises a tensor, or the entries `rows` of its first axis, to float32; the file is read only now."""
        gguf = package()
        tensor = self.tensors[name]
        raw, shape = self.bytes[tensor.start : tensor.start + tensor.length], tensor.shape
        if rows is not None:
            each = tensor.length // shape[0]
            raw, shape = raw[rows[0] * each : rows[1] * each], (rows[1] - rows[0], *shape[1:])
        raw = raw.reshape(math.prod(shape[:-1]), -1)
        weights = np.empty((raw.shape[0], shape[-1]), np.float32)
        step = max(1, PIECE // shape[-1])  # decoding a large embedding at once would take several times its size
        for i in range(0, raw.shape[0], step):
            weights[i : i + step] = gguf.quants.dequantize(raw[i : i + step], gguf.GGMLQuantizationType[tensor.type])
        return weights.reshape(shape)


def package():
    """Imports the package `gguf`, or says how to get it."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf: pip install 'jaxpg[gguf]'") from error
    return gguf


def open_file(path: str | Path) -> GGUFFile:
    """Reads the header of a GGUF file and maps the rest into memory.

    Args:
      path: the file.

    Raises:
      ValueError: if it is no GGUF file, of another version, truncated, or holds tensors of a type not supported.
      ModuleNotFoundError: if the package `gguf` is missing.
    """
    gguf = package()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path={str(path)!r} is no file: name a .gguf file")
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != MAGIC or len(start) < 8:
            raise ValueError(f"path={str(path)!r} starts with {start[:4]!r}, not {MAGIC!r}: it is no GGUF file")
        version = struct.unpack("<I", start[4:])[0]
        if version not in VERSIONS:
            raise ValueError(
                f"path={str(path)!r} is GGUF version {version}: versions {VERSIONS}, little-endian, can be read; "
                "convert the model again with a current llama.cpp"
            )
        cursor = _Cursor(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = dict(cursor.key_value() for _ in range(num_keys))
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"path={str(path)!r} is one of {metadata['split.count']} parts: join them with llama-gguf-split --merge"
        )
    infos = [cursor.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"path={str(path)!r} has general.alignment={alignment!r}: a positive number is needed")
    data = -(-cursor.position // alignment) * alignment
    tensors = {name: _locate(gguf, path, name, *info, data, len(cursor.buffer)) for name, *info in infos}
    if len(tensors) != len(infos):
        raise ValueError(f"path={str(path)!r} names a tensor twice: get the file again")
    return GGUFFile(path, metadata, tensors, np.frombuffer(cursor.buffer, np.uint8))


def _locate(gguf, path: Path, name: str, shape: tuple, type_number: int, offset: int, data: int, size: int) -> Tensor:
    types = {
        int(getattr(gguf.GGMLQuantizationType, t)): t for t in TENSOR_TYPES if hasattr(gguf.GGMLQuantizationType, t)
    }
    if type_number not in types:
        known = {int(t): t.name for t in gguf.GGMLQuantizationType}
        raise ValueError(
            f"path={str(path)!r}: tensor {name} is of type {known.get(type_number, type_number)}; "
            f"supported are {', '.join(types.values())}"
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_number)]
    if shape[-1] % block:
        raise ValueError(
            f"path={str(path)!r}: tensor {name} of shape {shape} does not fit {types[type_number]}, whose blocks hold "
            f"{block} weights of a row: get the file again"
        )
    tensor = Tensor(shape, types[type_number], data + offset, math.prod(shape) // block * block_bytes)
    if tensor.start + tensor.length > size:
        raise ValueError(
            f"path={str(path)!r} is truncated: tensor {name} ends at byte "
            f"{tensor.start + tensor.length:,}, the file at {size:,}; get it again"
        )
    return tensor


class _Cursor:
    """Reads values one after the other; nothing is taken from behind the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path, self.buffer, self.position = path, buffer, 8

    def take(self, length: int) -> int:
        """Moves over `length` bytes and returns where they start."""
        start = self.position
        if start + length > len(self.buffer):
            raise ValueError(
                f"path={str(self.path)!r} is truncated or damaged: its header asks for {length:,} bytes at byte "
                f"{start:,}, the file has {len(self.buffer):,}; get it again"
            )
        self.position = start + length
        return start

    def scalar(self, code: str):
        return struct.unpack_from("<" + code, self.buffer, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"path={str(self.path)!r} is damaged: no UTF-8 at byte {start:,}; get it again") from error

    def value(self, kind: int):
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"path={str(self.path)!r} is damaged: metadata of type {kind}; get it again")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack_from(code, self.buffer, self.take(count * struct.calcsize(_SCALARS[item]))))
        return [self.value(item) for _ in range(count)]

    def key_value(self) -> tuple:
        return self.string(), self.value(self.scalar("I"))

    def tensor_info(self) -> tuple:
        """Name, shape (slowest axis first), type number and offset of one tensor."""
        name, dimensions = self.string(), self.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"path={str(self.path)!r} is damaged: tensor {name!r} has {dimensions} axes; get it again")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")
