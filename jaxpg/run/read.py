"""Reading what runs left in their folders, and comparing several of them with their spread over seeds."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpg.run import metrics, report


def is_finished(folder: Path) -> bool:
    """Says whether the run of a folder came to its end."""
    return (folder / "summary.json").exists()


def summary(folder: Path) -> dict:
    """The summary of a finished run."""
    return json.loads((folder / "summary.json").read_text())


def config(folder: Path) -> dict:
    """The options of a run."""
    return json.loads((folder / "config.json").read_text())


def rows(folder: Path, phase: str) -> list[dict]:
    """The numbers of each step of a phase."""
    return phases(folder, [phase])[0]


def phases(folder: Path, names: Sequence[str]) -> list[list[dict]]:
    """The numbers of each step of several phases."""
    every = metrics.read_jsonl(folder / "metrics.jsonl")
    return [[row for row in every if row["phase"] == phase] for phase in names]


def columns(rows: list[dict], name: str) -> tuple[list, list]:
    """The x and y of a curve over the steps."""
    return [row["step"] for row in rows], [row[name] for row in rows]


def spread(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> report.Band:
    """Mean and range of the y of several seeds' curves (x, y), at the first one's x."""
    length = min(len(y) for _, y in curves)
    values = np.stack([y[:length] for _, y in curves])
    return report.Band(curves[0][0][:length], values.mean(0), values.min(0), values.max(0))


def gains(folders: Sequence[Path], measure: str) -> tuple[str, str, str]:
    """A held-out measure before and after RL, and the gain of each seed, since three make no error bar."""
    told = [summary(folder) for folder in folders]
    before, after = (np.array([t[f"{measure}_{when}"] for t in told]) for when in ("before", "after"))
    return f"{before.mean():.3f}", f"{after.mean():.3f}", " ".join(f"{gain:+.3f}" for gain in after - before)


def standard_errors(folders: Sequence[Path]) -> float:
    """How many standard errors the mean gain in held-out accuracy is above 0.

        Σ_seeds (after − before) / √(Σ_seeds Σ_{p = before, after} p·(1 − p)/n),   n held-out problems

    The problems before and after are the same, which the binomial error does not use: the true one is smaller.
    """
    told = [(summary(folder), config(folder)["held_out"]) for folder in folders]
    gain = sum(t["accuracy_after"] - t["accuracy_before"] for t, _ in told)
    variance = sum(p * (1 - p) / n for t, n in told for p in (t["accuracy_before"], t["accuracy_after"]))
    return gain / max(variance, 1e-12) ** 0.5
