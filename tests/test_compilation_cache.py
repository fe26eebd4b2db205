"""Compiled programs on disk: a second start compiles nothing, and what stands in the way is told once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from launching import environment

from jaxpg.run import compilation_cache

START = """
import collections, json, sys
import jax, jax.numpy as jnp
from jaxpg.run import compilation_cache

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rsplit("/", 1)[-1]]))
folder = compilation_cache.enable(*sys.argv[1:])
f = jax.jit(lambda x: jnp.tanh(x @ x).sum())
value = float(f(jnp.eye(8)) + jnp.arange(3.0)[1])
print(json.dumps({"folder": str(folder), "value": value, **seen}))
"""


def start(*arguments: str, **variables: str) -> dict:
    """What a process tells that compiles a few programs."""
    inherited = {name: value for name, value in environment(1).items() if not name.startswith("JAX_")}
    told = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(told.stdout)


@pytest.fixture
def no_cache():
    """JAX as a user has it who has set nothing."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_second_start_compiles_nothing(tmp_path):
    first, second = (start(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2))
    assert first["folder"] == str(tmp_path / "jaxpg" / "xla")
    assert first["cache_misses"] > 1 and "cache_hits" not in first
    assert second["cache_hits"] == first["cache_misses"] and "cache_misses" not in second
    assert first["value"] == second["value"]


def test_processes_that_start_together_share_a_folder(tmp_path):
    command = [sys.executable, "-c", START, str(tmp_path)]
    inherited = {name: value for name, value in environment(1).items() if not name.startswith("JAX_")}
    processes = [
        subprocess.Popen(command, env=inherited | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    values = {json.loads(process.communicate(timeout=120)[0])["value"] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert values == {start(str(tmp_path))["value"]}


def test_a_program_cut_off_in_the_middle_is_compiled_again(tmp_path):
    value = start(str(tmp_path))["value"]
    for file in tmp_path.glob("*-cache"):
        file.write_bytes(file.read_bytes()[:100])
    assert start(str(tmp_path))["value"] == value


def test_a_folder_of_the_user_comes_first(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    assert compilation_cache.enable(tmp_path / "other") == tmp_path / "own"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == least
    assert not (tmp_path / "other").exists()


def test_the_users_shortest_compile_time_stays(tmp_path, no_cache, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
    assert compilation_cache.enable(tmp_path) == tmp_path
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0


def test_a_cache_that_the_user_turned_off_stays_off(tmp_path, no_cache):
    jax.config.update("jax_enable_compilation_cache", False)
    assert compilation_cache.enable(tmp_path) is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize(("backend", "enabled"), [("gpu", False), ("tpu", True), ("cpu", True)])
def test_several_processes_on_gpus_need_a_folder_that_the_user_names(backend, enabled, tmp_path, no_cache, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert (compilation_cache.enable(tmp_path) is not None) == enabled


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, no_cache):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="not kept for the next start.*file"):
        assert compilation_cache.enable(tmp_path / "file" / "xla") is None
    assert jax.config.jax_compilation_cache_dir is None


def test_without_a_home_it_warns(no_cache, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="home"):
        assert compilation_cache.enable() is None


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", (".cache", "jaxpg", "xla")),
        ("darwin", ("Library", "Caches", "jaxpg", "xla")),
        ("win32", ("AppData", "Local", "jaxpg", "xla")),
    ],
)
def test_the_default_folder_is_where_the_platform_keeps_caches(platform, expected, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert compilation_cache.default_folder() == tmp_path.joinpath(*expected)


def test_pruning_deletes_what_was_used_longest_ago(tmp_path):
    for i in range(8):
        file = tmp_path / f"jit_f-{i}-cache"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 + i, 1000 + i))
    os.utime(tmp_path / "jit_f-0-cache", (5000, 1000))  # written first, read last
    (tmp_path / "something else").write_bytes(bytes(1000))
    compilation_cache.prune(tmp_path, limit=800)
    assert len(list(tmp_path.iterdir())) == 9
    compilation_cache.prune(tmp_path, limit=799)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *(f"jit_f-{i}-cache" for i in (0, 6, 7)),
        "something else",
    ]
