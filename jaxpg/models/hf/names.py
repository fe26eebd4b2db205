"""Which tensors of a Hugging Face checkpoint make up each of our parameters.

A linear layer there is [out, in]; here it is [in..., out...], with heads as an axis of their own, and the layers of a
model are stacked along a leading axis.
"""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np

from jaxpg.models.config import Config
from jaxpg.models.transformer import INPUT_AXES, Model
from jaxpg.parallel.paths import by_path

TOP = {
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm/scale": "model.norm.weight",
}
IN_LAYER = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",  # in Gemma, which has norms on both sides, another name
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "attention/query": "self_attn.q_proj.weight",
    "attention/key": "self_attn.k_proj.weight",
    "attention/value": "self_attn.v_proj.weight",
    "attention/out": "self_attn.o_proj.weight",
    "attention/query_bias": "self_attn.q_proj.bias",
    "attention/key_bias": "self_attn.k_proj.bias",
    "attention/value_bias": "self_attn.v_proj.bias",
    "mlp/gate": "mlp.gate_proj.weight",
    "mlp/up": "mlp.up_proj.weight",
    "mlp/down": "mlp.down_proj.weight",
    "experts/router": "mlp.gate.weight",
    "experts/gate": "mlp.experts.{expert}.gate_proj.weight",
    "experts/up": "mlp.experts.{expert}.up_proj.weight",
    "experts/down": "mlp.experts.{expert}.down_proj.weight",
}


class Tensor(NamedTuple):
    """One tensor of the checkpoint: an entry of our parameter's leading axes."""

    name: str
    index: tuple[int, ...]  # (), (layer,) or (layer, expert)
    cell: tuple[int, ...]  # our shape behind those axes
    inputs: int | None  # input axes of a linear layer; None: stored as it is, perhaps flattened

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        if self.inputs is not None:
            return math.prod(self.cell[self.inputs :]), math.prod(self.cell[: self.inputs])
        return (math.prod(self.cell),) if self.name.endswith(".bias") else self.cell

    def ours(self, read, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the part `index` of our cell: read(slices of the stored tensor) -> array."""
        if self.inputs is None:
            return np.asarray(read((slice(None),) * len(self.shape))).reshape(self.cell)[index]
        ins, outs = self.cell[: self.inputs], self.cell[self.inputs :]
        # Along the first of the merged axes a part is contiguous; along the others it is cut afterwards.
        stored = np.asarray(read((_rows(index[self.inputs], outs), _rows(index[0], ins))))
        cell = stored.T.reshape(-1, *ins[1:], *_leading(stored.shape[0], outs))
        rest = list(index)
        rest[0] = rest[self.inputs] = slice(None)
        return cell[tuple(rest)]

    def theirs(self, cell: np.ndarray) -> np.ndarray:
        """The stored tensor of our cell."""
        if self.inputs is None:
            return cell.reshape(self.shape)
        return cell.reshape(self.shape[::-1]).T


def _rows(part: slice, axes: tuple[int, ...]) -> slice:
    """A part of the first axis as a part of all axes merged."""
    start, stop, _ = part.indices(axes[0])
    inner = math.prod(axes[1:])
    return slice(start * inner, stop * inner)


def _leading(size: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return (size // math.prod(axes[1:]), *axes[1:])


@lru_cache
def shapes(config: Config) -> dict:
    """The model's parameters as a tree of ShapeDtypeStruct."""
    return jax.eval_shape(Model(config).init, jax.random.key(0))


@lru_cache
def tensors(config: Config) -> dict[str, list[Tensor]]:
    """Maps the path of each parameter, such as "layers/attention/query", to the tensors that it is made of."""
    return {path: list(_of(config, path, leaf.shape)) for path, leaf in by_path(shapes(config)).items()}


def _of(config: Config, path: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    if path in TOP:
        yield Tensor(TOP[path], (), shape, None)
        return
    path = path.removeprefix("layers/")
    suffix = IN_LAYER[path]
    if path == "mlp_norm/scale" and config.post_norms:
        suffix = "pre_feedforward_layernorm.weight"
    leading = 2 if "{expert}" in suffix else 1
    inputs = None if path.endswith(("scale", "bias")) else INPUT_AXES.get(path.split("/")[-1], 1)
    for index in itertools.product(*map(range, shape[:leading])):
        name = f"model.layers.{index[0]}.{suffix.format(expert=index[-1])}"
        yield Tensor(name, index, shape[leading:], inputs)
