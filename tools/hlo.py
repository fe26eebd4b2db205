"""What a compiled program does, read from its text: collectives by kind and mesh axis, FLOPs, the compiler's cycles.

`Compiled.cost_analysis()` counts the body of a loop once, however often it runs, and nearly all of a training step is
in loops: over micro-batches, layers and chunks of the vocabulary projection. Here everything is multiplied by the trip
counts of the loops around it.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8} | {
    f"{sign}{bits}": max(bits // 8, 1) for sign in "su" for bits in (2, 4, 8, 16, 32, 64)
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_SHAPE = re.compile(r"([a-z]+\d*(?:e\d\w*)?)\[([\d,]*)\]")
_NAMED = re.compile(  # the compiler's own mesh, the order of devices in it, and along which of its axes
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    shape: str  # of its result
    op: str
    rest: str  # operands and attributes


class Collective(NamedTuple):
    """One collective of a program."""

    kind: str  # of KINDS
    axes: tuple[str, ...]  # of the mesh, over which its groups run
    times: int  # how often it runs
    bytes: float  # that a device receives each time
    hidden: bool  # asynchronous: the program computes meanwhile
    name: str  # what it belongs to in the model


class Program:
    """A compiled program's text, with how often each of its computations runs.

    Args:
      text: `Compiled.as_text()`.
      assumed: how often a loop runs whose trip count the text does not tell, such as the sampler's over tokens.
    """

    def __init__(self, text: str, *, assumed: int = 1):
        self.assumed = assumed
        self.computations: dict[str, list[Instruction]] = {}
        entry = current = None
        for line in text.splitlines():
            if line and not line[0].isspace() and line.endswith("{"):
                current = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)[1]
                entry = current if line.startswith("ENTRY") else entry
                self.computations[current] = []
            elif current and (found := _INSTRUCTION.match(line)):
                self.computations[current].append(Instruction(*found.groups()))
        self.unknown_loops: list[str] = []  # whose trip counts are not written down
        self.times: dict[str, int] = defaultdict(int)
        self._visit(entry, 1)

    def _visit(self, name: str, times: int) -> None:
        self.times[name] += times
        for instruction in self.computations.get(name, ()):
            inside = times * self._trips(instruction) if instruction.op == "while" else times
            for called in _CALLED.findall(instruction.rest):
                for target in re.findall(r"[\w.\-]+", called):
                    self._visit(target, inside)

    def _trips(self, loop: Instruction) -> int:
        """How often a loop runs: its condition compares a counter, from 0, with a constant."""
        if known := re.search(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)', loop.rest):
            return int(known[1])
        body, condition = (re.search(rf"{name}=%?([\w.\-]+)", loop.rest)[1] for name in ("body", "condition"))
        limits = {int(i.rest.split(")")[0]) for i in self._below(condition) if _is_integer(i) and i.op == "constant"}
        if len(limits) != 1 or min(limits) < 1:
            self.unknown_loops.append(loop.name)
            return self.assumed
        counters = [i for i in self.computations[condition] if i.op == "get-tuple-element" and _is_integer(i)]
        step = self._step(body, int(re.search(r"index=(\d+)", counters[0].rest)[1])) if len(counters) == 1 else None
        return -(-limits.pop() // (step or 1))

    def _step(self, body: str, index: int) -> int | None:
        """What a loop's body adds to its counter; above 1 where the compiler unrolled it."""

        def value(computation: str, name: str, arguments) -> int:
            i = next(i for i in self.computations[computation] if i.name == name)
            inputs = _operands(i)
            if i.op == "constant":
                return int(i.rest.split(")")[0])
            if i.op == "get-tuple-element":
                return 0
            if i.op == "parameter":
                return arguments[int(i.rest.split(")")[0])]
            if i.op == "fusion":
                called = re.search(r"calls=%?([\w.\-]+)", i.rest)[1]
                given = [value(computation, x, arguments) for x in inputs]
                return value(called, self.computations[called][-1].name, given)
            if i.op in ("add", "copy", "bitcast"):
                return sum(value(computation, x, arguments) for x in inputs)
            raise LookupError(i.op)

        try:
            return value(body, _operands(self.computations[body][-1])[index], ())
        except (LookupError, StopIteration, ValueError):
            return None

    def _below(self, name: str) -> Iterator[Instruction]:
        """The instructions of a computation and of what it calls."""
        for instruction in self.computations.get(name, ()):
            yield instruction
            for called in _CALLED.findall(instruction.rest):
                yield from self._below(called.lstrip("%"))

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, how often it runs) for all that run."""
        for name, body in self.computations.items():
            if self.times[name]:
                yield from ((name, instruction, self.times[name]) for instruction in body)

    def cycles(self) -> float:
        """The compiler's estimate of what its own kernels take on one core, in cycles.

        It is 0 for Pallas kernels and collectives, of which the compiler keeps none.
        """
        return float(sum(times * int(c) for _, i, times in self.instructions() for c in _CYCLES.findall(i.rest)))

    def flops(self) -> float:
        """2 · multiply-adds of all matrix products on one device; those inside Pallas kernels are not seen."""
        shapes = {name: {i.name: i.shape for i in body} for name, body in self.computations.items()}
        products = ((n, i, t) for n, i, t in self.instructions() if i.op in ("convolution", "dot"))
        return float(sum(times * _product_flops(instruction, shapes[name]) for name, instruction, times in products))

    def collectives(self, mesh: Mapping[str, int]) -> list[Collective]:
        """All collectives of a program that was partitioned over a mesh.

        Args:
          mesh: axis -> size, in the order of the mesh's devices.
        """
        found: dict[str, Collective] = {}
        for computation, instruction, times in self.instructions():
            kind = instruction.op.removesuffix("-start")
            if kind not in KINDS:
                continue
            starts = instruction.op != kind
            if kind == "all-reduce" and "all-reduce-scatter" in computation:  # a TPU's way to write it down
                kind = "reduce-scatter"
            groups = _groups(instruction, tuple(mesh.values()))
            received = _received(instruction, kind, groups, starts)
            name = re.search(r'op_name="([^"]*)"', instruction.rest)
            hidden = starts or "async" in computation
            one = Collective(kind, _axes(groups, mesh), times, received, hidden, name[1] if name else computation)
            # An asynchronous one may be written down in each of the fusions that it runs beside.
            channel = re.search(r"channel_id=(\d+)", instruction.rest)
            key = channel[1] if channel else f"{computation}/{instruction.name}"
            if one.axes and (key not in found or found[key].times * found[key].bytes < times * received):
                found[key] = one
        return list(found.values())


def _is_integer(instruction: Instruction) -> bool:
    return instruction.shape.startswith(("s32[]", "u32[]"))


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.rest.split(")", 1)[0])


def _sizes(shape: str) -> list[tuple[int, int]]:
    """(entries, bytes) of each array in a shape or tuple of shapes."""
    arrays = [(kind, [int(n) for n in dims.split(",") if n]) for kind, dims in _SHAPE.findall(shape)]
    return [(int(np.prod(dims, dtype=np.int64)), BYTES.get(kind, 1)) for kind, dims in arrays]


def _received(instruction: Instruction, kind: str, groups: list[list[int]], started: bool) -> float:
    """Bytes that a device receives, by the ring algorithms: (n−1)/n of the whole array, twice that for all-reduce."""
    sizes = [entries * width for entries, width in _sizes(instruction.shape)]
    if started and len(sizes) > 1 and kind != "all-reduce":  # (operand, result, and what the runtime keeps)
        sizes = sizes[1:2] if len(sizes) < 5 else sizes[len(sizes) // 2 :]
    n, size = len(groups[0]) if groups else 1, float(sum(sizes))
    if kind == "collective-permute":
        return size if groups else 0.0
    if kind == "reduce-scatter" and instruction.op.startswith("reduce-scatter"):
        return size * (n - 1)  # its result is a share
    return size * (n - 1) / n * (2 if kind == "all-reduce" else 1)


def _groups(instruction: Instruction, mesh: tuple[int, ...]) -> list[list[int]]:
    """The groups of devices, by their place in the mesh, in any of the ways to write them down."""
    text = instruction.rest
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if a != b]
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text):
        groups = [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return groups or [list(range(int(np.prod(mesh))))]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        ids = np.arange(np.prod(source)).reshape(source)
        return (ids if order is None else ids.transpose(order)).reshape(shape).tolist()
    if named := _NAMED.search(text):
        return _named_groups(*named.groups())
    return [list(range(int(np.prod(mesh))))]


def _named_groups(axes: str, _shape, source, order, chosen: str) -> list[list[int]]:
    """Groups along axes of a mesh of the compiler's own, which it writes as mesh['a'=2,'b'=4] {'b'}."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(np.prod(list(sizes.values())))
    if source is not None:
        ids = ids.reshape([int(n) for n in source.split(",")])
        ids = ids.transpose([int(n) for n in order.split(",")]) if order else ids
    ids, names, inner = ids.reshape(list(sizes.values())), list(sizes), []
    for name, before, size in reversed(re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)):
        place = names.index(name)
        if size:  # part of an axis: [before, size, rest]
            split = (int(before), int(size), -1)
            ids = ids.reshape(*ids.shape[:place], *split, *ids.shape[place + 1 :])
            names[place : place + 1] = [f"{name}<", f"{name}={before}", name]
            name = f"{name}={before}"
        inner.insert(0, name)
    places = [names.index(name) for name in inner]
    rest = [i for i in range(ids.ndim) if i not in places]
    return ids.transpose(rest + places).reshape(-1, int(np.prod([ids.shape[i] for i in places]))).tolist()


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ."""
    differing = set()
    for group in groups:
        places = np.unravel_index(group, tuple(mesh.values()))
        differing |= {axis for axis, along in zip(mesh, places, strict=True) if len(set(along.tolist())) > 1}
    return tuple(axis for axis in mesh if axis in differing)


def _product_flops(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    operands = _operands(instruction)
    left, right, out = (
        [int(n) for n in _SHAPE.search(shape)[2].split(",") if n]
        for shape in (shapes[operands[0]], shapes[operands[1]], instruction.shape)
    )
    if instruction.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)[1]
        return (
            2.0 * np.prod(out, dtype=float) * np.prod([left[int(i)] for i in contracted.split(",") if i], dtype=float)
        )
    left_labels, right_labels, out_labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest).groups()
    total = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * right[right_labels.index("i")]
    window = _window(instruction.rest)
    for axis in itertools.takewhile(lambda a: a in out_labels, map(str, range(8))):
        sizes = (left[left_labels.index(axis)], right[right_labels.index(axis)], out[out_labels.index(axis)])
        total *= _valid_pairs(*sizes, **{name: values[int(axis)] for name, values in window.items()})
    return total


def _window(text: str) -> dict[str, list]:
    """Strides, paddings and dilations of a convolution, one a spatial axis; on TPUs they also encode batch axes."""
    inside = re.search(r"window=\{([^}]*)\}", text)
    fields = dict(part.split("=") for part in inside[1].split()) if inside else {}
    count = len(fields.get("size", "").split("x"))

    def numbers(name, default):
        return [int(n) for n in fields[name].split("x")] if name in fields else [default] * count

    pads = fields["pad"].split("x") if "pad" in fields else ["0_0"] * count
    return {
        "stride": numbers("stride", 1),
        "pad": [int(pad.split("_")[0]) for pad in pads],
        "left_dilation": numbers("lhs_dilate", 1),
        "right_dilation": numbers("rhs_dilate", 1),
    }


def _valid_pairs(inputs, kernel, outputs, *, stride, pad, left_dilation, right_dilation) -> int:
    """How many (output, kernel) places along an axis meet an entry of the input and not a hole or padding."""
    place = np.arange(outputs)[:, None] * stride + np.arange(kernel) * right_dilation - pad
    inside = (place >= 0) & (place <= (inputs - 1) * left_dilation)
    return int((inside & (place % left_dilation == 0)).sum())
