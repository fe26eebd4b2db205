"""Compiled programs kept on disk, so that a second start compiles nothing."""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import jax

LIMIT = 4 * 2**30  # bytes that the folder may hold when a process starts


def enable(folder: str | Path | None = None) -> Path | None:
    """Makes JAX keep every program that it compiles in a folder, and read it there the next time.

    JAX's keys hold the program, the version of jaxlib, the XLA flags and the features of the CPU or accelerator: one
    folder serves all of them, and a program never runs on a machine that it was not made for. Call this before the
    first compilation; what was compiled before is not kept.

    Args:
      folder: where; default `default_folder()`. A folder that the user has given JAX, e.g. by
        JAX_COMPILATION_CACHE_DIR, comes first and stays as it is, as does JAX_ENABLE_COMPILATION_CACHE=false.

    Returns:
      The folder in use. None where there is none: the user has turned the cache off, the folder cannot be written
      (which is a warning), or several processes share GPUs. These tune kernels together, and a process that reads its
      program lets the others wait for it: they need a folder that all of them see, which only the user can name.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    if jax.distributed.is_initialized() and jax.default_backend() == "gpu":
        return None
    try:
        folder = default_folder() if folder is None else Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what may write there may run code here
        with tempfile.TemporaryFile(dir=folder):
            pass
        prune(folder, limit=LIMIT)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"Compiled programs are not kept for the next start: {error}", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small programs too: there are hundreds
    return folder


def default_folder() -> Path:
    """Returns jaxpg/xla in the user's cache folder: XDG_CACHE_HOME, or what the platform has for it.

    Raises:
      RuntimeError: where the user has no home folder.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        caches = Path(chosen)
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path.home() / ".cache"
    return caches / "jaxpg" / "xla"


def prune(folder: Path, *, limit: int) -> None:
    """Deletes the files that were last used longest ago, until half the limit is free again.

    JAX's own limit, jax_compilation_cache_max_size, has processes wait for one another at each read, and in JAX 0.10
    one that is killed while it writes leaves a folder into which nothing can be written.

    Args:
      folder: of the cache. Another process may delete or write files in it meanwhile.
      limit: bytes. Nothing is deleted from a folder that holds less.
    """
    found = []
    for file in folder.glob("*-cache"):
        try:
            stat = file.stat()
        except FileNotFoundError:
            continue
        found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, file))
    total = sum(size for _, size, _ in found)
    if total <= limit:
        return
    for _, size, file in sorted(found):
        file.unlink(missing_ok=True)
        total -= size
        if total <= limit / 2:
            return
