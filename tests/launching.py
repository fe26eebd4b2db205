"""Files that users run, in the tests: imported as modules, or launched as they are launched from a shell."""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"


def load(path: Path, name: str | None = None):
    """Imports a file as a module of the given name, default its own."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled_programs() -> str:
    """A folder for the programs that one launch or test compiles and the next can read."""
    return tempfile.mkdtemp()


def launch(path: Path, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess:
    """Runs a file as a user does, on so many virtual devices; most of its time would be compilation."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    quick = {"JAX_COMPILATION_CACHE_DIR": compiled_programs(), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        env=os.environ | quick | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
