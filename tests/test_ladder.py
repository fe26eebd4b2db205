"""Every rung runs from its file, on one device and on eight; and what the rungs share."""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import dynamic_sampling, ladder, loop, report
from jaxpg.metrics import read_jsonl
from jaxpg.tasks import arithmetic
from jaxpg.types import Rollout

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RUNGS = (
    *("reinforce", "reinforce_baseline", "actor_critic", "gae", "trpo", "ppo_penalty", "ppo_clip"),
    *("remax", "rloo", "grpo", "dr_grpo", "dapo", "gspo"),
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled_programs():
    """A folder for the programs that one launch compiles and the next can read."""
    return tempfile.mkdtemp()


@pytest.fixture
def quick_compilation():
    """Programs that one test compiles and the next can read."""
    saved = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", compiled_programs())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    yield
    jax.config.update("jax_compilation_cache_dir", saved[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", saved[1])


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_trains_on_a_mesh_of_eight_devices(name, tmp_path, monkeypatch):
    # An untrained model gets no sum right: reward what it can do, so that there is a signal.
    monkeypatch.setattr(arithmetic, "score", lambda problem, text: float(len(text) >= 2))
    module = load(name)
    config = module.Config(smoke=True, run_dir=tmp_path / "run", mesh="data=2,fsdp=2,tensor=2")
    module.train(module.prepare(config))
    found = sorted((tmp_path / "run").rglob("metrics.jsonl"))
    assert found
    for path in found:
        rows = [row for row in read_jsonl(path) if row["phase"] == "rl"]
        assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
        assert rows[0]["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"
        assert all(row.get("grad_norm", row.get("gradient_norm")) > 0 for row in rows), rows
        assert {"accuracy_before", "accuracy_after"} <= set(json.loads((path.parent / "summary.json").read_text()))


@pytest.mark.parametrize("name", ("reinforce", "gae", "trpo", "grpo", "dapo"))  # one of each kind
def test_a_rung_runs_from_the_command_line(name, tmp_path):
    flags = "--xla_backend_optimization_level=0"
    quick = {"JAX_COMPILATION_CACHE_DIR": compiled_programs(), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    result = subprocess.run(
        [sys.executable, str(EXPERIMENTS / f"{name}.py"), "--smoke", "--run-dir", str(tmp_path / "run")],
        env=os.environ | quick | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "watch the reward, not the loss" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("quick_compilation")
def test_the_comparison_skips_what_is_done_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    compare = load("compare")
    config = compare.Config(rungs=("rloo", "dapo"), seeds=(0,), smoke=True, run_dir=tmp_path)
    compare.train(compare.prepare(config))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(written) == 2 and "rloo" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png", "length.png", "difficulty.png"}
    compare.train(compare.prepare(config))
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    with pytest.raises(ValueError, match="--rungs=nonsense: choose among reinforce"):
        compare.prepare(dataclasses.replace(config, rungs=("nonsense",)))


# ---- Dynamic sampling ------------------------------------------------------------------------------------------------


def drawn(rewards, name):
    """Groups of two rows whose tokens say where they come from."""
    rewards = np.asarray(rewards, np.float32)
    rows = rewards.size
    tokens = jnp.asarray([[name, i] for i in range(rows)], jnp.int32)
    mask = jnp.ones((rows, 2), bool)
    rollout = Rollout(tokens, mask, mask, jnp.zeros((rows, 2)), jnp.zeros(rows, jnp.int32))
    scores = loop.Scores(rewards, np.ones(rewards.shape, bool), token_rewards=np.asarray(tokens, np.float32))
    return dynamic_sampling.Drawn([f"{name}{p}" for p in range(len(rewards))], rollout, scores)


def test_groups_without_a_signal_are_replaced_until_the_batch_is_full():
    draws = [
        drawn([[0, 0], [0, 1], [1, 1]], 0),
        drawn([[1, 1], [0, 0], [1, 0]], 1),
        drawn([[0, 1], [1, 0], [0, 1]], 2),
    ]
    kept, attempts = dynamic_sampling.fill(lambda k: draws[k], max_resamples=9)
    assert attempts == 3
    # Group 0 comes from the second draw's last, group 2 from the third's first; group 1 stays.
    assert list(kept.problems) == ["12", "01", "20"]
    np.testing.assert_array_equal(kept.scores.rewards, [[1, 0], [0, 1], [0, 1]])
    np.testing.assert_array_equal(kept.rollout.tokens, [[1, 4], [1, 5], [0, 2], [0, 3], [2, 0], [2, 1]])
    np.testing.assert_array_equal(kept.scores.token_rewards, kept.rollout.tokens)


def test_the_bound_on_draws_holds_and_keeps_the_shape():
    constant = drawn([[1, 1], [0, 0]], 0)
    asked = []
    kept, attempts = dynamic_sampling.fill(lambda k: asked.append(k) or constant, max_resamples=2)
    assert attempts == 3 and asked == [0, 1, 2]
    np.testing.assert_array_equal(kept.rollout.tokens, constant.rollout.tokens)
    kept, attempts = dynamic_sampling.fill(lambda k: constant, max_resamples=0)
    assert attempts == 1


def test_a_reward_that_does_not_count_is_no_signal():
    scores = loop.Scores(np.array([[0.0, 1.0], [0.0, np.nan]]), np.array([[True, True], [True, False]]))
    np.testing.assert_array_equal(dynamic_sampling.has_signal(scores), [True, False])


# ---- What the rungs share --------------------------------------------------------------------------------------------


def test_a_warm_up_is_taken_over_from_another_run_to_the_bit(tmp_path):
    config = ladder.Config(smoke=True, run_dir=tmp_path / "first", seed=3)
    run = ladder.prepare(config, name="first")
    with ladder.session(run) as session:
        first = ladder.warm_up(session)
    other = dataclasses.replace(config, run_dir=tmp_path / "second", warm_start=tmp_path / "first")
    with ladder.session(ladder.prepare(other, name="second")) as session:
        second = ladder.warm_up(session)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other = dataclasses.replace(other, run_dir=tmp_path / "third", seed=4)
    with (
        pytest.raises(ValueError, match="warmed up with other options: seed is 3 there, 4 here"),
        ladder.session(ladder.prepare(other, name="third")) as session,
    ):
        ladder.warm_up(session)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spare": -1}, "--spare=-1: must be at least 0"),
        ({"levels": (2, 9)}, "level=9"),
        ({"evaluate_every": 0}, "--evaluate-every=0"),
        ({"mesh": "data=3"}, "asks for 3 devices"),
    ],
)
def test_bad_options_are_named_and_nothing_is_written(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ladder.prepare(ladder.Config(run_dir=tmp_path / "run", **change), name="refused")
    assert not (tmp_path / "run").exists()


def test_levels_take_turns_and_both_sides_of_the_split_stay_apart():
    task = ladder.arithmetic_task((2, 3), spare=2)
    assert [p.level for p in task.problems(0, 4, 4)] == [2, 3, 2, 3]
    assert task.problems(0, 0, 8)[4:] == task.problems(0, 4, 4)
    held_out = task.held_out(7)
    assert len(held_out) == 7 and [p.level for p in held_out[:2]] == [2, 3]
    assert not {p.prompt for p in held_out} & {p.prompt for p in task.problems(0, 0, 500)}
    assert task.max_new_tokens == len("198") + 1 + 2


def test_rewards_are_told_by_level_and_lengths_by_outcome():
    tokens, mask = jnp.zeros((4, 3), jnp.int32), jnp.ones((4, 3), bool)
    actions = jnp.array([[0, 0, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1]], bool)
    rollout = Rollout(tokens, mask, actions, jnp.zeros((4, 3)), jnp.array([1, 1, 1, 0]))
    scores = loop.Scores(np.array([[1.0, 0.0], [1.0, 0.0]]), np.ones((2, 2), bool))
    row = loop.describe([arithmetic.problem(0, 0, level=2), arithmetic.problem(0, 0, level=3)], rollout, scores)
    assert row["completion_length_better"] == 1.5 and row["completion_length_worse"] == 2.5
    assert row["reward/level_2"] == row["reward/level_3"] == 0.5
    assert row["cut_completions"] == 0.25 and row["zero_variance_groups"] == 0.0
    sentences = " ".join(report.in_words([row | {"loss": 0.0, "log_prob_gap": 1e-7}]))
    assert "In 0% of the groups" in sentences and "25.0% of the completions were cut" in sentences
    assert "watch the reward, not the loss" in sentences
