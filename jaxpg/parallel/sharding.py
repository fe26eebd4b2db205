"""Where arrays live: a mesh of data × fsdp × tensor, and path rules that map parameters onto it.

Rows of a batch are spread over data × fsdp. Parameters (and their optimizer moments, which carry the same path) are
cut over fsdp and tensor by the first rule whose pattern is found in their path; what no rule names is replicated.
"""

import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpg.parallel.paths import path_name

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))

# Layer parameters have a leading axis: the scanned layers. Embedding and head are cut along their features, so that any
# vocabulary size will do, and over both axes, so that no device holds much of their moments; the model gathers what
# it looks up or multiplies (`constrain`): a look-up in a table that is cut over the rows' axes would be rematerialised.
TRANSFORMER_RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embedding$|head$", PartitionSpec(None, ("fsdp", "tensor"))),
    (r"attention/(query|key|value)$", PartitionSpec(None, "fsdp", "tensor", None)),
    (r"attention/(query|key|value)_bias$", PartitionSpec(None, "tensor", None)),
    (r"attention/out$", PartitionSpec(None, "tensor", None, "fsdp")),
    (r"mlp/(gate|up)$", PartitionSpec(None, "fsdp", "tensor")),
    (r"mlp/down$", PartitionSpec(None, "tensor", "fsdp")),
    (r"experts/(gate|up)$", PartitionSpec(None, None, "fsdp", "tensor")),
    (r"experts/down$", PartitionSpec(None, None, "tensor", "fsdp")),
    # Of adapters, the half that meets the axis which their weight has on tensor; the other half is whole.
    (r"attention/(query|key|value)/b$", PartitionSpec(None, None, "tensor", None)),
    (r"attention/out/a$", PartitionSpec(None, "tensor", None, None)),
    (r"mlp/(gate|up)/b$", PartitionSpec(None, None, "tensor")),
    (r"mlp/down/a$", PartitionSpec(None, "tensor", None)),
)

Rules = Sequence[tuple[str, PartitionSpec]]


def make_mesh(spec: str = "data=-1", *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh from text such as "data=-1,fsdp=4,tensor=2".

    Args:
      spec: sizes by axis; an axis left out is 1, and one of them may be −1, which takes what is left.
      devices: default all.

    Raises:
      ValueError: for an unknown axis, one that stands there twice, a size that is not a positive integer or −1, or a
        product that is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    named = {}
    for part in filter(None, spec.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise ValueError(f"mesh={spec!r}: there is no axis {axis!r}, choose among {', '.join(AXES)}")
        if axis in named:
            raise ValueError(f"mesh={spec!r}: {axis} stands there twice, name it once")
        if not re.fullmatch(r"-1|[1-9]\d*", size):
            raise ValueError(f"mesh={spec!r}: {axis}={size!r} must be a positive integer, or -1 for what is left")
        named[axis] = int(size)
    sizes = dict.fromkeys(AXES, 1) | named
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1:
        raise ValueError(f"mesh={spec!r}: only one axis may be -1")
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    elif free or fixed != len(devices):
        raise ValueError(
            f"mesh={spec!r} asks for {'a multiple of ' if free else ''}{fixed} devices, this process sees "
            f"{len(devices)}: make the sizes multiply to {len(devices)}"
        )
    try:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    except NotImplementedError as error:  # of a TPU, whose chips are wired as a torus
        said = str(error).split(". ")[0]
        raise ValueError(f"mesh={spec!r}: each size must be a product of sizes of the chips' torus: {said}") from error


def sampler_mesh(trained: Mesh, spec: str | None) -> Mesh:
    """The mesh that completions are drawn on: `spec` of the trainer's devices, or its mesh `folded`."""
    return folded(trained) if spec is None else make_mesh(spec, devices=list(trained.devices.flat))


def folded(mesh: Mesh) -> Mesh:
    """The mesh with fsdp folded into data: rows stay where they are, weights are cut over tensor alone."""
    if mesh.shape["fsdp"] == 1:
        return mesh
    devices = mesh.devices.reshape(-1, 1, mesh.shape["tensor"])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shardings(mesh: Mesh, tree, rules: Rules = TRANSFORMER_RULES):
    """Maps a pytree of arrays (or shapes) to a pytree of NamedShardings.

    A parameter and its optimizer moments end in the same path, so that one rule serves both.

    Raises:
      ValueError: if a mesh axis does not divide the dimension that a rule puts on it.
    """

    def place(path, leaf):
        name = path_name(path)
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
        if len(spec) > leaf.ndim:  # e.g. a scalar that an optimizer keeps beside a moment
            spec = PartitionSpec()
        _check_divisible(mesh, name, leaf.shape, spec)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def _check_divisible(mesh: Mesh, name: str, shape: tuple[int, ...], spec: PartitionSpec):
    for size, axis in zip(shape, spec, strict=False):
        ways = _ways(mesh, (axis,) if isinstance(axis, str) else axis or ())
        if size % ways:
            raise ValueError(
                f"{name} has shape {shape}: its dimension of {size} is not divisible by mesh axis {axis}={ways}; "
                f"choose another mesh or model size"
            )


def constrain(x: jax.Array, *axes) -> jax.Array:
    """Fixes how an intermediate array is cut, on the mesh of the moment (`jax.set_mesh`); without one it is x.

    XLA may else follow the parameters and cut activations along their features over fsdp, with all rows on every
    device.

    Args:
      x: any array.
      *axes: for each leading dimension a mesh axis, a tuple of them, or None; the other dimensions are whole. What the
        mesh lacks, or what does not divide its dimension, is left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    names = [(axis,) if isinstance(axis, str) else axis or () for axis in axes]
    names = [tuple(name for name in group if name in mesh.axis_names) for group in names]
    fits = [size % _ways(mesh, group) == 0 for size, group in zip(x.shape, names, strict=False)]
    spec = PartitionSpec(*(group if fit else None for group, fit in zip(names, fits, strict=True)))
    return jax.lax.with_sharding_constraint(x, spec)


def parts(size: int, *axes: str) -> int:
    """Into how many parts `constrain` cuts a dimension of this size over these axes."""
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else _ways(mesh, [axis for axis in axes if axis in mesh.axis_names])
    return ways if size % ways == 0 else 1


def _ways(mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def constrain_rows(x: jax.Array) -> jax.Array:
    """`constrain` for whatever has a leading row axis."""
    return constrain(x, *ROWS)


def target_platform() -> str:
    """What is compiled for: the platform of the mesh of the moment, which may be of another machine, or the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The sharding of everything that has a leading row axis."""
    return NamedSharding(mesh, ROWS)


def row_shards(mesh: Mesh) -> int:
    """How many devices share the rows of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def put_rows(mesh: Mesh, tree):
    """Makes global arrays, rows spread over the mesh, from the rows that this process holds."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows(mesh), np.asarray(x)), tree)


def put_whole(mesh: Mesh, tree):
    """Makes global arrays, rows spread over the mesh, from whole arrays that every process has."""
    place = rows(mesh)

    def put(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    return jax.tree.map(put, tree)
