"""Many processes as one program: how they find each other, which rows are whose, and what all of them must know.

Every process runs the same file. Arrays of the mesh are global; each process tokenizes the prompts and scores the
completions of the rows that lie on its own devices, and small results, such as rewards, are gathered on every host, so
that all of them take the same decisions. One process, number 0, writes the records.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpg.parallel import sharding


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
    # Its handler would swallow SIGTERM, see `faults.Preemption`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat_seconds)
    except ValueError as error:
        raise ValueError(
            f"--distributed: the environment tells of no other processes ({error}): run it under Slurm, Open MPI or on "
            "a TPU pod, or say --coordinator, --num-processes and --process-id"
        ) from error


def is_primary() -> bool:
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
    if single_process():
        return jax.tree.map(np.asarray, tree)
    return fetch(sharding.put_rows(mesh, tree))


def barrier(where: str) -> None:
    """Waits until all processes have come here."""
    if not single_process():
        multihost_utils.sync_global_devices(where)


def any_of(flag: bool) -> bool:
    """Says whether it is so in any process."""
    return flag if single_process() else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def allgather_strings(text: str) -> list[str]:
    """Tells every process the text of each, in the order of the processes."""
    if single_process():
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    who = multihost_utils.process_allgather(np.array([jax.process_index(), len(data)], np.int32))
    room = np.zeros(max(int(who[:, 1].max()), 1), np.uint8)
    room[: len(data)] = data
    rooms = multihost_utils.process_allgather(room)
    return [bytes(rooms[row][: who[row, 1]]).decode() for row in np.argsort(who[:, 0])]


def single_process() -> bool:
    """Says whether there are no other processes, without waking the devices where JAX was told of none."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


class RemoteError(ValueError):
    """What one process found wrong, raised in all of them."""


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
    """Raises a ValueError of this block in all processes, also in those that found nothing wrong.

    All processes wait for each other at the end of the block. Blocks may be nested: where a process fails before an
    inner one, the others are told at the end of that.

    Raises:
      RemoteError: in place of the ValueError, where there are other processes.
    """
    if single_process():
        yield
        return
    wrong = ""
    try:
        yield
    except RemoteError:
        raise  # all have heard of it
    except ValueError as error:
        wrong = str(error) or repr(error)
    for process, said in enumerate(allgather_strings(wrong)):
        if said:
            raise RemoteError(said if process == 0 else f"{said} (process {process})")


def check_same(options: Mapping[str, object]) -> None:
    """Makes sure that all processes have the same options; else their programs would wait for each other for ever.

    Args:
      options: values by name, whose `str` says what they are. Those of `Options` may differ.

    Raises:
      RemoteError: in all processes, naming what differs.
    """
    mine = {name: str(value) for name, value in options.items() if name not in OPTIONS}
    first, *others = map(json.loads, allgather_strings(json.dumps(mine)))
    differences = [
        f"{name} is {first.get(name)!r} in process 0 and {other.get(name)!r} in process {process}"
        for process, other in enumerate(others, 1)
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    if differences:
        listed = "; ".join(differences[:8])
        raise RemoteError(f"the processes have different options ({listed}): give all of them the same")
