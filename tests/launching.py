"""Files that users run, in the tests: imported as modules, or launched as they are launched from a shell."""

import atexit
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"

# The suite is compilation, most of it: without LLVM's optimisations, and with the older of the two ways in which XLA
# makes kernels for a CPU (JAX 0.12 has the newer alone and ignores the option), it takes a third of the time.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def load(path: Path, name: str | None = None):
    """Imports a file as a module of the given name, default its own."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def compiled_programs() -> str:
    """A folder for the programs that one process of the suite compiles and all others read.

    The workers of pytest-xdist and what tests launch inherit it. It is not the user's, and ends with the suite.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return os.environ["JAX_COMPILATION_CACHE_DIR"]
    folder = tempfile.mkdtemp(prefix="jaxpg-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(devices: int) -> dict[str, str]:
    """Of a process with so many virtual devices."""
    flags = f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILATION}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def launch(path: Path, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess:
    """Runs a file as a user does."""
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def by_flags(i: int, count: int, port: int):
    """How a process is told of the others: options, environment."""
    return ["--coordinator", f"localhost:{port}", "--num-processes", str(count), "--process-id", str(i)], {}


def start_together(path: Path, *arguments: str, count: int, found=by_flags) -> list[subprocess.Popen]:
    """Starts a file in several processes, on eight virtual devices in all; one alone is told of no others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for i in range(count):
        options, told = found(i, count, port) if count > 1 else ([], {})
        processes.append(
            subprocess.Popen(
                [sys.executable, str(path), *arguments, *options],
                env=environment(8 // count) | told,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen]) -> None:
    """Waits for processes, all of which should end well; none is left behind."""
    with contextlib.closing(outcomes(processes, timeout=300)) as ended:
        for code, said in ended:
            assert code == 0, said[-3000:]


def outcomes(processes: list[subprocess.Popen], *, timeout: float = 120) -> Iterator[tuple[int, str]]:
    """How each ended and what it said, one after the other; each has so many seconds, and none is left behind."""
    try:
        for process in processes:
            said, _ = process.communicate(timeout=timeout)
            yield process.returncode, said
    finally:
        for process in processes:
            process.kill()
