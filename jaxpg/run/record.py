"""A run at work: an iterator over steps that goes on from the newest checkpoint, and a commit after each of them.

    with run.open(options, name="mine") as r:
        for k, state in r.steps(state, 100):
            state, metrics = update(state, batch(k))
            r.commit(k, state, metrics)
    r.state                                   # after the last step, also where a resumed run had nothing left to do

What happens between the two calls is plain code. It must depend on (state, k) alone: then a run that was killed at any
moment and resumed ends with the same bits as one that nobody disturbed.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

from jaxpg.parallel import distributed, sharding
from jaxpg.run import compilation_cache, faults, folder, metrics, ranges, report
from jaxpg.run import sinks as sinks_lib
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.clock import Clock
from jaxpg.run.journal import Journal, metrics_bytes
from jaxpg.run.options import Options, identity

Row = Mapping[str, object]  # numbers and `types.Weighted` by name
Evaluate = Callable[[object], dict[str, float]]  # state -> numbers; "accuracy" ranks checkpoints


class Stopped(Exception):
    """This process has done the steps that --stop-after allows."""


class Phase:
    """Where a phase stands: what `commit` writes and `steps` reads."""

    def __init__(self, journal: Journal, count: int, guard: faults.NonFiniteGuard):
        self.journal, self.count, self.guard = journal, count, guard
        self.done, self.finished = 0, False
        self.evaluate: Evaluate | None = None
        self.evaluate_every, self.show, self.bar = 0, (), None


class Run:
    """The record of a run. `open` makes one."""

    def __init__(
        self,
        options: Options,
        *,
        name: str,
        mesh: jax.sharding.Mesh,
        console: Console,
        progress: Progress,
        preemption: faults.Preemption,
    ):
        self.options, self.name, self.mesh = options, name, mesh
        self.console, self.progress, self._preemption = console, progress, preemption
        self.folder, self.started, self.clock = Path(options.run_dir), time.perf_counter(), Clock()
        self.state = None  # after the last committed step of the newest phase
        self.commits = 0  # of the newest phase, by this process
        self._phase: Phase | None = None
        self._steps_here = 0
        self._saves: dict[str, Checkpointer] = {}
        known = sorted(path.name for path in (self.folder / "checkpoints").glob("*") if path.is_dir())
        path = self.folder / "metrics.jsonl" if distributed.is_primary() else None
        self.writer = metrics.JsonlWriter(path, offset=metrics_bytes(map(self.checkpointer, known)))
        track = options.track if distributed.is_primary() else ()
        self._sinks = sinks_lib.Sinks(track, self.folder, name, folder.config_dict(options))

    def checkpointer(self, phase: str) -> Checkpointer:
        """The checkpoints of a phase."""
        if phase not in self._saves:
            c, about = self.options, {"config": folder.config_dict(self.options)}
            place = self.folder / "checkpoints" / phase
            self._saves[phase] = Checkpointer(place, keep=c.keep, keep_best=c.keep_best, about=about)
        return self._saves[phase]

    def steps(
        self,
        state,
        count: int,
        *,
        phase: str = "train",
        identity: Mapping[str, str] | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 25,
        show: Sequence[str] = ("loss",),
    ) -> Iterator[tuple[int, object]]:
        """Iterates over the steps of a phase, from its newest checkpoint on; each must end with `commit`.

        Args:
          state: of step 0, any pytree of arrays; a restored state takes its shapes and shardings. What was put on no
            device in particular is replicated over the mesh.
          count: steps of the phase.
          phase: its name, written into every row.
          identity: name -> text of what the steps depend on besides the state, e.g. a fingerprint of the reference
            policy; a checkpoint with other texts is refused.
          evaluate: called with the state before the first step, after every `evaluate_every` steps and after the last.
          evaluate_every: steps.
          show: numbers of a row that the progress bar shows.

        Yields:
          k, from 0, and the state before step k.

        Raises:
          RuntimeError: where the body of the loop went on without `commit`.
        """
        journal = Journal(phase, self.writer, self.checkpointer(phase), identity or {})
        current = self._phase = Phase(journal, count, faults.NonFiniteGuard(self.options.max_nonfinite))
        current.evaluate, current.evaluate_every, current.show = evaluate, evaluate_every, show
        state = _placed(self.mesh, state)
        if evaluate is not None:
            told = evaluate(state)
            if journal.checkpointer.latest is None:  # else the row stands in the file already
                self.log("evaluation", 0, told)
        self.commits = 0
        self.state, current.done, current.finished = journal.restore(state)
        del state
        current.bar = self.progress.add_task(phase, total=count, completed=current.done, numbers="")
        while not current.finished and current.done < count:
            k = current.done
            self.clock.restart()
            yield k, self.state
            if current.done != k + 1:
                raise RuntimeError(f"step {k} of {phase!r} ended without commit(k, state, row)")
        self.progress.update(current.bar, total=current.done, completed=current.done)

    def commit(self, k: int, state, row: Row, *, last: bool = False) -> None:
        """Ends step k: logs its row, evaluates and saves where that is due, and stops where that was asked for.

        Args:
          k: the step, as `steps` said it.
          state: after it.
          row: numbers by name; a `types.Weighted` is divided. Where its "nonfinite" says that an update was skipped,
            the row counts it.
          last: does the phase end with this step?

        Raises:
          faults.Preempted: after SIGTERM, once the state is saved; it ends the process with 143.
          faults.NonFiniteError: after more than --max-nonfinite consecutive steps with a skipped update.
          RuntimeError: if a checkpoint could not be written, or k is not the step that is due.
        """
        phase = self._phase
        if phase is None or k != phase.done:
            due = "no step" if phase is None else f"step {phase.done}"
            raise RuntimeError(f"commit(k={k}): {due} is due")
        self.state, done, journal = _placed(self.mesh, state), k + 1, phase.journal
        row = metrics.numbers(row)
        self.log(journal.phase, done, {**row, **self.clock.row()})
        phase.guard.look(row)
        finished = last or done == phase.count
        score = self._evaluated(done, self.state) if finished or done % phase.evaluate_every == 0 else None
        shown = "  ".join(f"{name} {row[name]:.3g}" for name in phase.show if name in row)
        self.progress.update(phase.bar, completed=done, numbers=shown)
        self._count()
        preempted = self._preemption.noticed()
        if finished or preempted or done % self.options.checkpoint_every == 0:
            journal.save(self.state, done, finished=finished, score=score)
        else:
            journal.checkpointer.check()
        if preempted:
            journal.checkpointer.wait()
            raise faults.Preempted(done)
        phase.done, phase.finished = done, finished
        self.commits += 1

    def _evaluated(self, done: int, state) -> float | None:
        """Evaluates the state after `done` steps, and returns what ranks it."""
        if self._phase.evaluate is None:
            return None
        told = self._phase.evaluate(state)
        self.log("evaluation", done, told)
        return told.get("accuracy")

    def log(self, phase: str, step: int, row: Mapping[str, object]) -> None:
        """Writes a row into metrics.jsonl and to every sink of --track."""
        row = metrics.numbers(row)
        self.writer.write({"phase": phase, "step": step, **row})
        self._sinks.write(phase, step, row)

    def timed(self, name: str, function: Callable, *, advice: str = "") -> Callable:
        """Makes a function add its time to `seconds_<name>` of the step's row, and wait for its results.

        Args:
          name: of the part of the step.
          function: any.
          advice: what needs less memory, should the device have too little.
        """

        @functools.wraps(function)
        def call(*args, **kwargs):
            with self.clock.measure(name), faults.memory_advice(name, advice):
                return jax.block_until_ready(function(*args, **kwargs))

        return call

    def _count(self) -> None:
        """Ends the process like a power cut after --stop-after steps: nothing more is saved."""
        self._steps_here += 1
        if self._steps_here == self.options.stop_after:
            raise Stopped(self._steps_here)

    def close(self) -> None:
        """Waits for what is being saved, and lets go of all files."""
        for closing in (self.writer, self._sinks, *self._saves.values()):
            closing.close()


def _placed(mesh: jax.sharding.Mesh, state):
    """The state as a checkpoint would bring it back: strongly typed arrays, each with its place.

    Else a run that goes on would differ from one that was never stopped: what was restored is bound to its devices, and
    no scalar of Python any more, whose type others may override.
    """

    def put(x):
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        x = jnp.asarray(x, x.dtype) if jax.typeof(x).weak_type else x
        return x if x.committed else jax.device_put(x, sharding.replicated(mesh))

    return jax.tree.map(put, state)


def check(options: Options, *, name: str) -> Options:
    """Checks the ranges of all options, and whether the run's folder may be used. Writes nothing.

    Returns:
      The options with the folder, runs/<name> where none was given.

    Raises:
      ValueError: for an option out of its range, a sink that is not installed, or a folder that holds another run, or
        this one without --resume.
    """
    ranges.check(options)
    sinks_lib.check(options.track)
    options = dataclasses.replace(options, run_dir=Path(options.run_dir or Path("runs") / name))
    if not options.dry_run:
        folder.check_run(options.run_dir, identity(options), resume=options.resume)
    return options


@contextlib.contextmanager
def open(options: Options, *, name: str, mesh: jax.sharding.Mesh | None = None) -> Iterator[Run]:
    """Opens the record of a run, within its mesh, and closes it whatever happens. --stop-after ends the block.

    Args:
      options: a dataclass of `Options`, with fields of one's own.
      name: of the experiment.
      mesh: default that of --mesh.

    Raises:
      ValueError: as `check`; or if the folder cannot be written.
    """
    options = check(options, name=name)
    mesh = sharding.make_mesh(options.mesh) if mesh is None else mesh
    folder.open_run(options.run_dir, identity(options), resume=options.resume)
    if options.compilation_cache:
        compilation_cache.enable()
    console = Console(quiet=not distributed.is_primary())
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    devices = f"{mesh.size} {jax.devices()[0].platform} device(s){processes}"
    console.print(f"[bold]{name}[/] on {devices}, folder {options.run_dir}")
    with contextlib.ExitStack() as stack:
        try:
            preemption = stack.enter_context(faults.Preemption())
            stack.enter_context(jax.set_mesh(mesh))
            progress = stack.enter_context(report.progress(console))
            screen = {"console": console, "progress": progress}
            opened = Run(options, name=name, mesh=mesh, preemption=preemption, **screen)
            stack.callback(opened.close)
            yield opened
        except Stopped as stopped:
            console.print(f"Stopped after {stopped} steps of this session, --resume goes on.")
        except faults.Preempted as preempted:
            console.print(f"SIGTERM: saved after step {preempted.done}, --resume goes on.")
            raise
