"""Saving and restoring all that a run needs to go on: the train state and a small JSON record, by Orbax."""

import dataclasses
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxpg.train_state import TrainState


class Checkpointer:
    """Checkpoints of one phase of a run, one folder per iteration.

    Writing happens in the background and appears atomically; nothing is pickled.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2):
        """Opens (and makes) the directory.

        Args:
          directory: where the checkpoints of this phase live.
          keep: how many of the newest stay.
        """
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The iteration of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, iteration: int, state: TrainState, record: dict) -> None:
        """Starts writing a checkpoint and returns; a later save waits for this one.

        Args:
          iteration: iterations done.
          state: may be donated as soon as this returns.
          record: anything JSON, kept beside the state.

        Raises:
          RuntimeError: if Orbax declined to save.
        """
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_without_key_type(state)), record=ocp.args.JsonSave(record)
        )
        if not self._manager.save(iteration, args=args):
            raise RuntimeError(f"Orbax declined to save iteration {iteration}; the newest is {self.latest}")

    def record(self) -> dict | None:
        """Reads the JSON record of the newest checkpoint, None if there is none."""
        if self.latest is None:
            return None
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return self._manager.restore(self.latest, args=args)["record"]

    def restore(self, like: TrainState, iteration: int | None = None) -> tuple[TrainState, dict]:
        """Reads a checkpoint into the shapes, dtypes and shardings of `like`.

        Args:
          like: a state of arrays or of `jax.ShapeDtypeStruct` with shardings.
          iteration: default the newest.

        Raises:
          FileNotFoundError: if there is no such checkpoint.
        """
        iteration = self.latest if iteration is None else iteration
        if iteration is None or iteration not in self._manager.all_steps():
            raise FileNotFoundError(f"no checkpoint {iteration} in {self._manager.directory}")
        raw = _without_key_type(like)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), raw)
        restored = self._manager.restore(
            iteration,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore()),
        )
        key = jax.random.wrap_key_data(restored["state"].key, impl=jax.random.key_impl(like.key))
        return dataclasses.replace(restored["state"], key=key), restored["record"]

    def close(self) -> None:
        """Waits for the last save."""
        self._manager.wait_until_finished()
        self._manager.close()


def _without_key_type(state: TrainState) -> TrainState:
    """Replaces the typed key by its integers, the form that is stored."""
    return dataclasses.replace(state, key=jax.random.key_data(state.key))
