"""One process at work on a run: its records, its bars, and a way to end it like a power cut."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import Progress

from jaxpg.ladder.config import Run
from jaxpg.ladder.parts import make_greedy
from jaxpg.parallel import distributed
from jaxpg.run import faults, metrics, report
from jaxpg.run import folder as run_folder
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.training import loop

PHASES = ("warmup", "rl")


class Stopped(Exception):
    """The session has done the steps that --stop-after allows."""


class StopAfter:
    """Counts the steps of this session, and ends it like a power cut, without a last checkpoint."""

    def __init__(self, limit: int | None):
        self.limit, self.done = limit, 0

    def count(self) -> None:
        self.done += 1
        if self.done == self.limit:
            raise Stopped(self.done)


@dataclasses.dataclass(frozen=True)
class Session:
    """What the phases of a run write to."""

    run: Run
    console: Console
    progress: Progress
    writer: metrics.JsonlWriter
    saves: dict[str, Checkpointer]  # of each phase
    stop: StopAfter
    greedy: Callable  # (params, problems) -> texts; one for all phases, so that it compiles once
    started: float

    @property
    def key(self) -> jax.Array:
        """Of what is drawn once a run, besides the model: the heads."""
        return jax.random.fold_in(jax.random.key(self.run.config.seed), 1)

    def journal(self, phase: str, identity: dict[str, str] | None = None) -> loop.Journal:
        """Where a phase records itself, and what it depends on besides its state."""
        return loop.Journal(phase, self.writer, self.saves[phase], self.run.config.checkpoint_every, identity or {})


@contextlib.contextmanager
def session(run: Run) -> Iterator[Session]:
    """Opens the records of a run, within its mesh, and closes them whatever happens. --stop-after ends the block."""
    c, console = run.config, Console(quiet=not distributed.is_first())
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    devices = f"{run.mesh.size} {jax.devices()[0].platform} device(s){processes}"
    console.print(f"[bold]{run.name}[/] on {devices}, folder {c.run_dir}")
    about = {"config": run_folder.config_dict(c)}
    options = {"keep": c.keep, "keep_best": c.keep_best, "about": about}
    saves = {phase: Checkpointer(c.run_dir / "checkpoints" / phase, **options) for phase in PHASES}
    newest = saves["rl"].record() or saves["warmup"].record() or {"metrics_bytes": 0}
    path = c.run_dir / "metrics.jsonl" if distributed.is_first() else None
    writer = metrics.JsonlWriter(path, offset=newest["metrics_bytes"])
    try:
        with faults.Preemption(), jax.set_mesh(run.mesh), report.progress(console) as progress:
            yield Session(
                run, console, progress, writer, saves, StopAfter(c.stop_after), make_greedy(run), time.perf_counter()
            )
    except Stopped as stopped:
        console.print(f"Stopped after {stopped} steps of this session, --resume goes on.")
    except faults.Preempted as preempted:
        console.print(f"SIGTERM: saved after step {preempted.done}, --resume goes on.")
        raise
    finally:
        for closing in (writer, *saves.values()):
            closing.close()
