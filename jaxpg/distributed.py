"""Many processes as one program: how they find each other, which rows are whose, and what all of them must know.

Every process runs the same file. Arrays of the mesh are global; each process tokenizes the prompts and scores the
completions of the rows that lie on its own devices, and small results, such as rewards, are gathered on every host, so
that all of them take the same decisions. One process, number 0, writes the records.
"""

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpg import sharding


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every program that may run in many processes."""

    distributed: bool = False  # join the processes that Slurm, Open MPI or a TPU pod started
    coordinator: str | None = None  # in place of that, host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None


OPTIONS = tuple(field.name for field in dataclasses.fields(Options))


def initialize(
    *,
    detect: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_seconds: int = 30,
) -> None:
    """Joins the other processes of the run, where there are any; before anything else of JAX.

    Args:
      detect: find them by what the environment says: a Cloud TPU's metadata, Slurm, Open MPI or Kubernetes, as
        `jax.distributed.initialize` reads them.
      coordinator: in place of that, host:port of process 0.
      num_processes: how many there are.
      process_id: which of them this is, from 0.
      heartbeat_seconds: after so long without a sign of life a process counts as dead, and all others end with an
        error that says so.

    Raises:
      ValueError: if only some of the three that belong together are given, they contradict each other, or the
        environment does not tell of other processes.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: give {names} together, or none of them")
    if not missing and not 0 <= process_id < num_processes:
        raise ValueError(f"--process-id={process_id}: must be from 0 to {num_processes - 1}, of --num-processes")
    if not missing and ":" not in coordinator:
        raise ValueError(f"--coordinator={coordinator}: must be host:port, the same for all processes")
    if jax.distributed.is_initialized() or (missing and not detect):
        return
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat_seconds)
    except ValueError as error:
        raise ValueError(
            f"--distributed: the environment tells of no other processes ({error}): run it under Slurm, Open MPI or on "
            "a TPU pod, or say --coordinator, --num-processes and --process-id"
        ) from error


def is_first() -> bool:
    """Says whether this process writes the records."""
    return jax.process_index() == 0


def local_rows(mesh: Mesh, count: int) -> np.ndarray:
    """Finds which of `count` global rows lie on this process's devices, in their order."""
    indices = sharding.rows(mesh).addressable_devices_indices_map((count,)).values()
    found = np.zeros(count, bool)
    for (index,) in indices:
        found[index] = True
    return np.flatnonzero(found)


def pick_local(mesh: Mesh, items) -> list:
    """Takes the items, one a global row, whose rows lie on this process's devices."""
    return [items[row] for row in local_rows(mesh, len(items))]


def local(tree):
    """Brings the rows that lie on this process's devices to the host, in their order, of arrays spread by rows."""
    return jax.tree.map(_local_rows_of, tree)


def _local_rows_of(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable:
        return np.asarray(x)
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def fetch(tree):
    """Brings whole arrays to every host."""

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, tree)


def gather(mesh: Mesh, tree):
    """Puts together on every host what each knows of its own rows, as `pick_local` dealt them out."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return fetch(sharding.put_rows(mesh, tree))


def meet(where: str) -> None:
    """Waits until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def agree(message: str | None) -> str | None:
    """Tells all processes what the first one found wrong, None if nothing."""
    if jax.process_count() == 1:
        return message
    room = np.zeros(4096, np.uint8)
    if message and is_first():
        said = message.encode()[: len(room)]
        room[: len(said)] = np.frombuffer(said, np.uint8)
    said = bytes(np.asarray(multihost_utils.broadcast_one_to_all(room))).rstrip(b"\0")
    return said.decode(errors="replace") or None
