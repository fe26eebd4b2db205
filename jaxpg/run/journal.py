"""The journal of one phase of a run: its rows in metrics.jsonl and its checkpoints."""

import dataclasses
from collections.abc import Mapping

from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.metrics import JsonlWriter


@dataclasses.dataclass(frozen=True)
class Journal:
    """Where a phase of a run records itself."""

    phase: str  # written into every row
    writer: JsonlWriter
    checkpointer: Checkpointer
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of what the state depends on but lacks

    def restore(self, state):
        """Returns the newest saved state, how many steps it had done, and whether the phase was over.

        Without a checkpoint, the state given, 0 and False.

        Raises:
          ValueError: if the checkpoint depends on something else than this run, e.g. another reference policy.
        """
        if self.checkpointer.latest is None:
            return state, 0, False
        state, record = self.checkpointer.restore(state)
        for name, value in self.identity.items():
            if record["identity"].get(name) != value:
                raise ValueError(
                    f"{self.phase}: {name} is {record['identity'].get(name)} in the checkpoint and {value} here: go on "
                    "with the one that the run began with, or begin anew in another folder"
                )
        if not record["finished"]:  # else the rows of later phases follow
            self.writer.rewind(record["metrics_bytes"])
        return state, record["steps"], record["finished"]

    def save(self, state, done: int, *, finished: bool, score: float | None) -> None:
        """Starts to save what `restore` returns.

        Args:
          state: after `done` steps.
          done: steps of this phase.
          finished: is the phase over?
          score: held-out accuracy of the state, by which the best checkpoints are kept; None where it is not known.
        """
        record = {
            "steps": done,
            "finished": finished,
            "metrics_bytes": self.writer.offset,
            "identity": dict(self.identity),
        }
        self.checkpointer.save(done, state, record, score=score)


def metrics_bytes(checkpointers) -> int:
    """How much of metrics.jsonl the newest checkpoint of any phase vouches for; the rest is written again."""
    return max((record["metrics_bytes"] for saves in checkpointers if (record := saves.record())), default=0)
