"""The record of a run: options, folder, checkpoints, log, faults, and what a person sees.

from jaxpg import run

@dataclasses.dataclass(frozen=True)
class Config(run.Options): ...

with run.open(Config(), name="mine") as r:
    for k, state in r.steps(state, 100):
        state, metrics = update(state, batch(k))
        r.commit(k, state, metrics)
"""

from jaxpg.run.options import Options
from jaxpg.run.record import Run, check, open

__all__ = ["Options", "Run", "check", "open"]
