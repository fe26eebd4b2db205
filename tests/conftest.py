"""Eight virtual CPU devices and one canonical platform, set before JAX is imported."""

import gc
import os
from pathlib import Path

from launching import QUICK_COMPILATION, compiled_programs

# XLA ends the process when one of the eight devices has not come to a collective within 40 seconds, which may happen on
# a loaded machine: it waits for two minutes.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + f" {QUICK_COMPILATION}"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=120"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings():
    """Drops the compiled programs of a process that has many.

    Each takes three or more of the 65,530 memory mappings that Linux allows a process; where none is left, XLA's
    compiler ends it with a segmentation fault.
    """
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_text().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def quick_compilation():
    """Programs that one test compiles and the next can read."""
    saved = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", compiled_programs())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    yield
    jax.config.update("jax_compilation_cache_dir", saved[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", saved[1])


@pytest.fixture
def x64():
    """Runs a test in float64, for oracles and proofs."""
    with jax.enable_x64(True):
        yield


SLOWEST_FIRST = (
    "test_ladder",
    "test_rlhf",
    "test_distributed",
    "test_sampler_modes",
    "test_meshes",
    "test_faults",
    "test_compile_for_tpu",
    "test_hf_parity_fixtures",
    "test_step_level",
    "test_quickstart",
    "test_lora",
    "test_games",
    "test_notebooks",
    "test_real_models",
    "test_algorithms",
    "test_exact",
    "test_sampler",
    "test_heads",
    "test_attention",
    "test_models",
)


def pytest_collection_modifyitems(items):
    """Starts with the slowest files: two processes that share files would else wait for the last one.

    The Makefile asks pytest-xdist for this order (--no-loadscope-reorder), or it would begin with what has most tests.
    """
    order = {name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
