"""The folder of a run: config.json, metrics.jsonl, checkpoints; never two configurations in one."""

import dataclasses
import json
import os
import tempfile
from pathlib import Path

from jaxpg.parallel import distributed


def check_run(run_dir: Path, config: dict, *, resume: bool) -> None:
    """Does what `open_run` does before it writes anything.

    Raises:
      ValueError: as `open_run`.
    """
    with distributed.raise_together():
        if distributed.is_primary():
            _check(run_dir, config, resume=resume)
            _check_writable("--run-dir", run_dir)


def open_run(run_dir: Path, config: dict, *, resume: bool) -> None:
    """Makes the folder of a run, or returns to it: the first process for all, and what it finds wrong they all raise.

    Args:
      run_dir: the folder.
      config: what makes this run different from others, JSON values.
      resume: go on with the run that the folder holds; where it holds none, start one.

    Raises:
      ValueError: if the folder holds a run and `resume` is off, a run of another configuration, or something else, or
        cannot be written. Nothing has been written then.
    """
    with distributed.raise_together():
        if distributed.is_primary():
            _check(run_dir, config, resume=resume)
            if not (run_dir / "config.json").exists():
                make_folder("--run-dir", run_dir)
                write_json(run_dir / "config.json", config)


def _check(run_dir: Path, config: dict, *, resume: bool) -> None:
    """Raises ValueError where the folder holds a run that this one does not go on with, or something else."""
    path = run_dir / "config.json"
    if path.exists():
        differences = _differences(json.loads(path.read_text()), config)
        if differences:
            raise ValueError(
                f"--run-dir={run_dir} holds a run with another configuration ({'; '.join(differences)}): "
                "choose another --run-dir, or delete the folder"
            )
        if not resume:
            raise ValueError(
                f"--run-dir={run_dir} already holds this run: pass --resume to go on with it, "
                "or choose another --run-dir"
            )
    elif run_dir.exists() and not (run_dir.is_dir() and all(_is_partial(found) for found in run_dir.iterdir())):
        raise ValueError(f"--run-dir={run_dir} exists and is not the folder of a run: choose another --run-dir")


def _check_writable(option: str, folder: Path) -> None:
    """Raises ValueError where the folder could not be made, or files in it."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise ValueError(f"{option}: {folder} cannot be written, choose another folder")


def make_folder(option: str, folder: Path) -> None:
    """Makes the folder that an option names, if there is none, and tries whether files can be written there.

    Raises:
      ValueError: if they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{option}: {folder} cannot be written ({error.strerror}), choose another folder") from error


def write_json(path: Path, value) -> None:
    """Writes a JSON file in one piece."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file in one piece: a reader sees the old text or the new, never half."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def config_dict(config, *, without: tuple[str, ...] = ()) -> dict:
    """Turns a dataclass of plain values into JSON values, less the fields that do not change the results."""
    plain = {name: value for name, value in dataclasses.asdict(config).items() if name not in without}
    return json.loads(json.dumps(plain, default=str))


def _is_partial(path: Path) -> bool:
    """Says whether a killed process left this half-written."""
    return path.suffix == ".partial"


def _differences(old: dict, new: dict) -> list[str]:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} is {old.get(name)!r} there, {new.get(name)!r} here" for name in names]
