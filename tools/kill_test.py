"""Kills a run at random moments with SIGKILL, resumes it, and compares it with a run that nobody killed.

    python tools/kill_test.py                            # --kills 30; about two minutes
    python tools/kill_test.py --signal TERM              # as a scheduler announces that it takes the machine away

The run is a loop of `run.open`, `steps` and `commit`, as in a user's own file. It saves after every step, so that many
kills hit a save. After the last kill it runs to its end, and its metrics and its last checkpoint must be those of the
undisturbed run to the bit. After each kill the newest checkpoint must be at least as far as every step but the last two
of the log: one may be on its way to the disk and one not yet begun when the process dies.
"""

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from jaxpg.estimators import checks
from jaxpg.run import cli

STEPS = 60
WIDTH = 1000  # the state is 12 MB: a save takes about as long as a step


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the test."""

    kills: int = 30
    signal: Literal["KILL", "TERM"] = "KILL"
    seed: int = 0  # of the moments
    run_dir: Path | None = None  # default a temporary folder
    victim: Path | None = None  # be the run that is killed, in this folder


def victim(folder: Path) -> None:
    """A regression as a user would write it: enough to have parameters, an optimizer and a log."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxpg import run

    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(state, x):
        def loss_fn(w):
            return jnp.mean((jnp.tanh(x @ w) - x) ** 2)

        w, opt_state = state
        loss, gradient = jax.value_and_grad(loss_fn)(w)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(w, updates), opt_state), {"loss": loss}

    def batch(k):
        return jax.random.normal(jax.random.fold_in(jax.random.key(2), k), (8, WIDTH))

    w = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / WIDTH**0.5
    with run.open(run.Options(run_dir=folder, resume=True, checkpoint_every=1), name="victim") as r:
        for k, state in r.steps((w, optimizer.init(w)), STEPS):
            state, row = update(state, batch(k))
            r.commit(k, state, row)
            (folder / "started").touch()


def start(folder: Path) -> subprocess.Popen:
    command = [sys.executable, __file__, "--victim", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, folder: Path) -> None:
    _, said = process.communicate()
    if process.returncode:
        sys.exit(f"a run in {folder} could not go on:\n{said}")


def rows(folder: Path) -> list[dict]:
    """What was logged, less the clocks; of a line that was cut by the kill, nothing."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in whole]


def newest(folder: Path) -> int:
    """The newest checkpoint that stands there whole."""
    saved = [int(path.name) for path in (folder / "checkpoints" / "train").glob("*") if path.name.isdigit()]
    return max(saved, default=0)


def arrays(folder: Path) -> dict:
    """The fingerprints of the last checkpoint."""
    record = folder / "checkpoints" / "train" / str(STEPS) / "record"
    return json.loads(next(record.glob("metadata*")).read_text())["fingerprints"]


def kill_once(folder: Path, number: signal.Signals, draw: random.Random) -> tuple[int, int] | None:
    """Starts the run and kills it after a random time; returns the steps logged and saved, None if it was over."""
    (folder / "started").unlink(missing_ok=True)
    process = start(folder)
    while not (folder / "started").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 1.5))
    if process.poll() is None:
        process.send_signal(number)
    _, said = process.communicate()
    if process.returncode == 0:
        return None
    if process.returncode not in (-number, 128 + number):
        sys.exit(f"the run ended by itself with code {process.returncode}:\n{said}")
    return len(rows(folder)), newest(folder)


def test(config: Config) -> None:
    """Kills, resumes, compares."""
    if config.victim:
        victim(config.victim)
        return
    base = config.run_dir or Path(tempfile.mkdtemp())
    draw, number = random.Random(config.seed), signal.Signals[f"SIG{config.signal}"]
    undisturbed, killed, i, runs = base / "undisturbed", base / "killed-0", 0, 1
    finish(start(undisturbed), undisturbed)
    while i < config.kills:
        told = kill_once(killed, number, draw)
        if told is None:  # it came to its end between two kills: check it, and begin another one
            compare(undisturbed, killed)
            shutil.rmtree(killed)
            killed, runs = base / f"killed-{runs}", runs + 1
            continue
        i += 1
        logged, saved = told
        print(f"kill {i}: {logged} steps logged, checkpoint {saved}", flush=True)
        if saved < logged - 2:
            sys.exit(f"{logged} steps were logged, but the newest checkpoint is {saved}: {killed}")
    finish(start(killed), killed)
    compare(undisturbed, killed)
    print(f"{config.kills} kills by SIG{config.signal} in {runs} run(s): each ended as the undisturbed one, to the bit")


def compare(undisturbed: Path, killed: Path) -> None:
    if rows(killed) != rows(undisturbed):
        sys.exit(f"the logs differ: {undisturbed} and {killed}")
    if arrays(killed) != arrays(undisturbed):
        sys.exit(f"the last checkpoints differ: {undisturbed} and {killed}")


def prepare(config: Config) -> Config:
    """Checks the options."""
    checks.options_at_least(config, 1, "kills")
    return config


if __name__ == "__main__":
    cli.main(Config, prepare, test, description=__doc__)
