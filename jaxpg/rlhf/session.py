"""One step at work: its records, its bar, and what it leaves to the next step."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxpg import ladder
from jaxpg.models import hf
from jaxpg.parallel import distributed
from jaxpg.rlhf.config import Run
from jaxpg.run import faults, metrics, report
from jaxpg.run import folder as run_folder
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.training import loop
from jaxpg.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Session:
    """What a step writes to."""

    run: Run
    console: Console
    progress: Progress
    journal: loop.Journal
    started: float

    @property
    def rows(self) -> list[dict]:
        """All that was logged so far."""
        return metrics.read_jsonl(self.run.folder / "metrics.jsonl")

    @property
    def key(self) -> jax.Array:
        """Of what is drawn once a run, besides the model: the heads."""
        return jax.random.fold_in(jax.random.key(self.run.config.seed), 1)


@contextlib.contextmanager
def session(run: Run) -> Iterator[Session]:
    """Opens the records of a step, within its mesh, and closes them whatever happens."""
    console = Console(quiet=not distributed.is_first())
    console.print(
        f"[bold]{run.name}[/] on {run.mesh.size} {jax.devices()[0].platform} device(s), folder {run.folder}, "
        f"model {run.config.model or 'tiny'}"
    )
    about = {"config": run_folder.config_dict(run.config)}
    saves = Checkpointer(run.folder / "checkpoints", keep=run.config.keep, about=about)
    newest = saves.record() or {"metrics_bytes": 0}
    path = run.folder / "metrics.jsonl" if distributed.is_first() else None
    writer = metrics.JsonlWriter(path, offset=newest["metrics_bytes"])
    journal = loop.Journal(run.name, writer, saves, run.config.checkpoint_every)
    try:
        with faults.Preemption(), jax.set_mesh(run.mesh), report.progress(console) as progress:
            yield Session(run, console, progress, journal, time.perf_counter())
    finally:
        writer.close()
        saves.close()


def fit(session: Session, step: loop.Step, state: TrainState, *, show: Sequence[str]) -> TrainState:
    """Does the steps that the run asks for, with a bar that shows these numbers of each row."""
    c = session.run.config
    bar = session.progress.add_task(session.run.name, total=c.steps, numbers="")

    def on_step(state, done, row):
        numbers = "  ".join(f"{name.removeprefix('score/')} {row[name]:.3f}" for name in show)
        session.progress.update(bar, completed=done, numbers=numbers)

    options = {"steps": c.steps, "max_nonfinite": c.max_nonfinite}
    state = loop.run(step, state, session.journal, on_step=on_step, **options)
    session.progress.update(bar, completed=c.steps)
    return state


def leave(session: Session, found: dict, *, params: dict | None = None) -> dict:
    """Writes the policy, if there is one, and then summary.json, which says that the step is done."""
    run = session.run
    if params is not None:
        hf.save(run.folder / "model", run.model.config, params, run.tokenizer, overwrite=True)
    found = {"step": run.name, "seed": run.config.seed} | found
    found |= {"seconds": time.perf_counter() - session.started}
    if distributed.is_first():
        run_folder.write_json(run.folder / "summary.json", found)
    return found


def peak(rows: Sequence[dict], *, width: int = 10) -> dict[str, float]:
    """Finds where the true reward was highest, averaged over `width` steps, and compares that with the last steps."""
    names = {"true": "score/true", "learned": "score/learned", "kl": "kl_measured"}
    width = min(width, len(rows))
    smooth = {
        name: np.convolve([row[key] for row in rows], np.full(width, 1 / width), mode="valid")
        for name, key in names.items()
    }
    best = int(smooth["true"].argmax())
    found = {f"peak_{name}": float(x[best]) for name, x in smooth.items()}
    found |= {f"last_{name}": float(x[-1]) for name, x in smooth.items()}
    return found | {"peak_step": rows[best + width // 2]["step"]}


def compare(session: Session, policies: dict[str, dict]) -> None:
    """Prints what policies are worth, a row each; what a policy was not asked for stays empty."""
    names = ("true", "learned", "kl", "right", "marks")
    rows = [
        (policy, *(f"{found[name]:.2f}" if name in found else "" for name in names))
        for policy, found in policies.items()
    ]
    columns = ("after", "true reward", "learned reward", "KL, nats", "right", "marks")
    session.console.print(report.table("What the policies write", columns, rows))


def summary(run: Run, step: str) -> dict:
    """Reads what another step of the same folder found."""
    return ladder.read_summary(run.config.run_dir / step)
