"""Starts an experiment on every host of a TPU pod; by default it only prints what it would do.

    python tools/launch_pod.py --name my-pod --zone europe-west4-b -- \\
        python experiments/ladder/grpo.py --mesh data=-1,fsdp=8
    python tools/launch_pod.py --name my-pod --zone europe-west4-b --run -- ...        # really

The pod is a Cloud TPU VM that exists already, with the same folder of this repository on each host (--directory) and
`make quickstart`'s environment in it. `--distributed` is added to the experiment: the processes find each other by the
TPU's metadata. The run folder must lie where all hosts see it, e.g. in a mounted bucket.

What was run: the commands that are printed, on no real pod; `tests/test_distributed.py` runs such processes on one
machine.
"""

import dataclasses
import shlex
import shutil
import subprocess
import sys
from typing import Annotated

import tyro

from jaxpg.run import cli


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the launcher."""

    name: str  # of the TPU VM
    zone: str
    command: Annotated[tuple[str, ...], tyro.conf.Positional]  # after --: what to run on every host
    project: str | None = None  # default that of gcloud's configuration
    directory: str = "jaxpg"  # of the repository, on each host
    run: bool = False  # do it, in place of printing it


def prepare(config: Config) -> list[str]:
    """Builds the command line of gcloud.

    Raises:
      ValueError: if an option is empty, the experiment is missing or no Python file, or gcloud is not there to run
        it.
    """
    for name in ("name", "zone", "directory"):
        if not getattr(config, name).strip():
            raise ValueError(f"--{name} is empty: say which, e.g. --name my-pod --zone europe-west4-b")
    if not config.command or not any(part.endswith(".py") for part in config.command):
        raise ValueError(
            f"command={shlex.join(config.command)!r}: give a Python file after --, "
            "e.g. -- python experiments/ladder/grpo.py"
        )
    if config.run and shutil.which("gcloud") is None:
        raise ValueError(
            "--run needs gcloud on the PATH: install the Google Cloud CLI, or leave --run out to see the command"
        )
    command = config.command if "--distributed" in config.command else (*config.command, "--distributed")
    home, folder = ("~/", config.directory[2:]) if config.directory.startswith("~/") else ("", config.directory)
    remote = f"cd {home}{shlex.quote(folder)} && . .venv/bin/activate && {shlex.join(command)}"
    project = ["--project", config.project] if config.project else []
    place = ["--zone", config.zone, *project, "--worker=all"]
    line = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", config.name, *place, "--command", remote]
    return line if config.run else ["echo", shlex.join(line)]


def launch(line: list[str]) -> None:
    """Runs it, and ends as it ends."""
    sys.exit(subprocess.run(line, check=False).returncode)


if __name__ == "__main__":
    cli.main(Config, prepare, launch, description=__doc__)
