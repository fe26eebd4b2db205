"""Saving and restoring all that a run needs to go on: the train state and a small JSON record, by Orbax.

A checkpoint says what it is: its format, the versions of the libraries, the name, shape, dtype and fingerprint of every
array. So a file that does not belong to the run is refused with a reason, and one that was damaged is found out.
"""

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from jaxpg.parallel import distributed
from jaxpg.parallel.paths import by_path
from jaxpg.run import faults, fingerprint

FORMAT = 2  # of the record; a reader refuses a newer one
LIBRARIES = ("jaxpg", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class MismatchError(ValueError):
    """A checkpoint is whole, but of another model, optimizer or version than is asked for."""


class DamagedError(RuntimeError):
    """A checkpoint cannot be read, or holds other numbers than were saved."""


class Checkpointer:
    """Checkpoints of one phase of a run, one folder per iteration.

    Writing happens in the background and appears atomically; nothing is pickled.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 2,
        keep_best: int = 0,
        about: dict | None = None,
        read_only: bool = False,
    ):
        """Opens (and makes) the directory. One process, or one group of them, may write to it at a time.

        Args:
          directory: where the checkpoints of this phase live.
          keep: how many of the newest stay.
          keep_best: how many of those with the highest score stay too.
          about: JSON to keep in each checkpoint for whoever finds it, e.g. the options of the run.
          read_only: change nothing in it, since another run may be at work there.

        Raises:
          ValueError: if `keep` is below 1 or `keep_best` below 0.
        """
        if keep < 1 or keep_best < 0:
            raise ValueError(f"keep={keep} must be at least 1, keep_best={keep_best} at least 0")
        self._about, self._scores, self._read_only = about or {}, {}, read_only
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(
                [managers.LatestN(keep), _Best(keep_best, self._scores)]
            ),
            cleanup_tmp_directories=not read_only,  # what a killed process left half-written
            create=not read_only,
            read_only=read_only,
        )
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)
        for iteration in self.all:
            with contextlib.suppress(DamagedError, MismatchError):  # `restore` says so
                self._scores[iteration] = self._read_record(iteration)["score"]

    @property
    def latest(self) -> int | None:
        """The iteration of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The iteration of the checkpoint with the highest score, None if none has one."""
        return max(_scored(self._scores, self.all), default=(None, None))[1]

    @property
    def all(self) -> list[int]:
        """The iterations that have a complete checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, iteration: int, state, record: dict, *, score: float | None = None) -> None:
        """Starts writing a checkpoint and returns; a later save waits for this one.

        Args:
          iteration: iterations done.
          state: any pytree of arrays; may be donated as soon as this returns.
          record: anything JSON, kept beside the state.
          score: what `keep_best` compares, e.g. held-out accuracy.

        Raises:
          RuntimeError: if Orbax declined to save, or could not write the checkpoint before this one.
        """
        self.check()
        state = _tree(fingerprint.without_key_types(state))
        told = {
            "format": FORMAT,
            "versions": {name: _version(name) for name in LIBRARIES},
            "arrays": _arrays(state),
            "fingerprints": fingerprint.of_tree(state),
            "about": self._about,
            "score": None if score is None or not math.isfinite(score) else float(score),
            "record": record,
        }
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(sealed(told)))
        self._scores[iteration] = told["score"]
        with self._explained():
            if not self._manager.save(iteration, args=args, force=True):
                raise RuntimeError(f"Orbax declined to save iteration {iteration}; the newest is {self.latest}")

    def check(self) -> None:
        """Raises RuntimeError if a checkpoint could not be written in the background."""
        with self._explained():
            self._manager.check_for_errors()

    def record(self) -> dict | None:
        """Reads the record of the newest checkpoint that has a readable one, None if there is none."""
        for iteration in reversed(self.all):
            try:
                return self._read_record(iteration)["record"]
            except DamagedError:  # `restore` says so
                continue
        return None

    def restore(self, like, iteration: int | None = None) -> tuple[Any, dict]:
        """Reads a checkpoint into the shapes, dtypes and shardings of `like`, on any mesh and number of processes.

        Args:
          like: a pytree of arrays or of `jax.ShapeDtypeStruct` with shardings.
          iteration: default the newest that is whole; damaged ones are set aside, with a warning.

        Raises:
          FileNotFoundError: if there is no such checkpoint.
          MismatchError: if it is of another model or optimizer, or of a newer version.
          DamagedError: if it is damaged, or all are.
        """
        self._check_exists(iteration)
        if iteration is not None:
            return self._read(iteration, like)
        damaged = []
        for candidate in reversed(self.all):
            try:
                return self._read(candidate, like)
            except DamagedError as error:
                damaged.append(self._set_aside(candidate, error))
        raise DamagedError(
            f"no checkpoint in {self._manager.directory} can be read, see {', '.join(damaged)}: begin anew in another "
            "folder, or bring back copies of them"
        )

    def restore_params(self, like: dict, iteration: int | None = None) -> dict:
        """Reads the parameters alone, whatever the optimizer was.

        Args:
          like: parameters of arrays or of `jax.ShapeDtypeStruct` with shardings.
          iteration: default the newest.

        Raises:
          As `restore`, but nothing is set aside.
        """
        self._check_exists(iteration)
        iteration = self.latest if iteration is None else iteration
        item = {"params": _abstract(like)}
        told = self._read_record(iteration)
        saved = {name: told["arrays"][name] for name in told["arrays"] if name.startswith("params/")}
        self._check_arrays(iteration, saved, _arrays(item))
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args, partial_restore=True)
        path = self._manager.directory / str(iteration) / "state"
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = self._all_agree(iteration, lambda: reader.restore(path, args=args))
        self._check_fingerprints(iteration, told, found)
        return found["params"]

    def wait(self) -> None:
        """Waits for the last save.

        Raises:
          RuntimeError: if it could not be written.
        """
        with self._explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save, as `wait`, and lets go of the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _check_exists(self, iteration: int | None) -> None:
        if self.latest is None or (iteration is not None and iteration not in self.all):
            wanted = "" if iteration is None else f" {iteration}"
            raise FileNotFoundError(f"no checkpoint{wanted} in {self._manager.directory}, it has {self.all}")

    def _read_record(self, iteration: int) -> dict:
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        told = self._all_agree(iteration, lambda: self._manager.restore(iteration, args=args)["record"])
        if told != sealed(told):
            raise DamagedError(f"{self._where(iteration)}: its record is not what was saved")
        found = told["format"]
        if found != FORMAT:
            side = "a newer" if found > FORMAT else "an older"
            raise MismatchError(
                f"{self._where(iteration)} has format {found}, of {side} jaxpg ({told['versions']['jaxpg']}); "
                f"this one, {_version('jaxpg')}, reads format {FORMAT}: install that version to go on with this run"
            )
        return told

    def _read(self, iteration: int, like) -> tuple[Any, dict]:
        raw = _tree(fingerprint.without_key_types(like))
        told = self._read_record(iteration)
        self._check_arrays(iteration, told["arrays"], _arrays(raw))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(_abstract(raw)))
        state = self._all_agree(iteration, lambda: self._manager.restore(iteration, args=args)["state"])
        self._check_fingerprints(iteration, told, state)
        leaves = map(_with_key_type, jax.tree.leaves(state), jax.tree.leaves(like))
        return jax.tree.unflatten(jax.tree.structure(like), leaves), told["record"]

    def _check_arrays(self, iteration: int, saved: dict, wanted: dict) -> None:
        differing = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
        if differing:
            said = "; ".join(
                f"{name} is {saved.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
                for name in differing[:3]
            )
            raise MismatchError(
                f"{self._where(iteration)} is of another model or optimizer, in {len(differing)} of "
                f"{len(wanted)} arrays: {said}. Give the options that it was made with"
            )

    def _check_fingerprints(self, iteration: int, told: dict, state) -> None:
        found = fingerprint.of_tree(state)
        bad = [name for name, value in found.items() if told["fingerprints"].get(name) != value]
        if bad:
            raise DamagedError(f"{self._where(iteration)}: {bad[0]}, one of {len(bad)}, is not what was saved")

    def _all_agree(self, iteration: int, read):
        """Calls `read`; what makes it fail on one process makes it fail on all, so that none waits for the others."""
        found, failure = None, None
        try:
            found = read()
        except MemoryError:
            raise
        except Exception as error:
            if faults.is_out_of_memory(error):
                raise
            failure = error
        if distributed.any_of(failure is not None):
            reason = f"{type(failure).__name__}: {str(failure)[:300]}" if failure else "another process could not"
            raise DamagedError(f"{self._where(iteration)} cannot be read: {reason}") from failure
        return found

    def _set_aside(self, iteration: int, error: DamagedError) -> str:
        """Renames a damaged checkpoint, so that its number can be used again, and warns."""
        folder = Path(self._manager.directory)
        aside = next(path for i in range(1000) if not (path := folder / f"damaged-{iteration}-{i}").exists())
        if distributed.is_primary() and not self._read_only:
            (folder / str(iteration)).rename(aside)
        distributed.barrier(f"jaxpg, set aside {iteration}")
        self._manager.reload()
        done = "Not touched, since this is for reading only" if self._read_only else f"Set aside as {aside.name}"
        warnings.warn(f"{error}. {done}; going on with the one before", stacklevel=3)
        return aside.name

    def _where(self, iteration: int) -> str:
        return f"checkpoint {iteration} in {self._manager.directory}"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says of an error while writing what is safe and what helps."""
        try:
            yield
        except Exception as error:
            number = _error_number(error)
            if number is None:
                raise
            folder = Path(self._manager.directory)
            whole = max((i for i in self.all if (folder / str(i)).exists()), default=None)
            raise RuntimeError(
                f"a checkpoint could not be written to {folder}: {os.strerror(number)}. The newest whole one is "
                f"{whole}: make room, then go on with --resume"
            ) from error


def sealed(told: dict) -> dict:
    """The record with a checksum of the rest of it."""
    rest = {name: value for name, value in told.items() if name != "checksum"}
    return rest | {"checksum": zlib.crc32(json.dumps(rest, sort_keys=True).encode())}


def _error_number(error: BaseException | None) -> int | None:
    """The error number of the operating system behind an exception; TensorStore tells it in words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            if os.strerror(number) in str(error):
                return number
        error = error.__cause__ or error.__context__
    return None


class _Best(managers.PreservationPolicy):
    """Keeps the checkpoints of the highest scores, of equal ones the newest."""

    def __init__(self, count: int, scores: dict[int, float | None]):
        self._count, self._scores = count, scores

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = sorted(_scored(self._scores, steps), reverse=True)[: self._count]
        kept = {step for _, step in best}
        return [step in kept for step in steps]


def _scored(scores: dict[int, float | None], steps: Sequence[int]) -> list[tuple[float, int]]:
    """Score and iteration of those that have one."""
    return [(scores[step], step) for step in steps if scores.get(step) is not None]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _arrays(tree) -> dict[str, str]:
    """Path -> dtype and shape, such as "float32[64,192]"."""
    return {path: f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "") for path, leaf in by_path(tree).items()}


def _tree(state):
    """The state, one array alone within a dictionary: Orbax saves no bare arrays."""
    return {"state": state} if jax.tree.structure(state) == jax.tree.structure(0) else state


def _with_key_type(x, like):
    """Makes a typed key of its integers, where there was one."""
    if not jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
