"""The whole run, small: it resumes exactly, does not care about the mesh, compiles once, refuses bad input."""

import dataclasses
import json
import logging

import jax
import pytest
from launching import EXPERIMENTS, launch, load

from jaxpg import recipe, run
from jaxpg.run.metrics import read_jsonl

SCRIPT = EXPERIMENTS / "quickstart.py"
TINY = {
    "batch-size": 64, "group-size": 4, "rl-steps": 5, "warmup-steps": 20, "warmup-batch-size": 32,
    "held-out": 64, "warmup-accuracy": 0.9, "checkpoint-every": 3,
}  # fmt: skip


quickstart = load(SCRIPT)


def launch_tiny(run_dir, *extra, devices=1):
    options = [text for name, value in TINY.items() for text in (f"--{name}", str(value))]
    return launch(SCRIPT, *options, "--run-dir", str(run_dir), *extra, devices=devices)


def exact_rows(run_dir):
    """The metrics without the clock."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [{name: x for name, x in row.items() if not name.startswith("seconds")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    result = launch_tiny(run_dir)
    assert result.returncode == 0, result.stderr
    return run_dir


def test_a_run_leaves_its_records(whole):
    assert {path.name for path in whole.iterdir()} == {
        "config.json", "metrics.jsonl", "checkpoints", "curves.png", "summary.json", "model",
    }  # fmt: skip
    summary = json.loads((whole / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds"} <= set(summary)
    rows = exact_rows(whole)
    assert [row["step"] for row in rows if row["phase"] == "rl"] == [1, 2, 3, 4, 5]
    first = next(row for row in rows if row["phase"] == "rl")
    assert first["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"


@pytest.mark.parametrize(
    "stops",
    [
        (21, 4),  # at the start of the RL phase, and between its checkpoints
        pytest.param((2,), marks=pytest.mark.exhaustive),  # before the first checkpoint, as at the start of a phase
    ],
)
def test_stopped_and_resumed_metrics_are_the_same_to_the_bit(stops, whole, tmp_path):
    for stop in stops:
        result = launch_tiny(tmp_path / "run", "--resume", "--stop-after", str(stop))
        assert f"Stopped after {stop} steps" in result.stdout, result.stderr
    assert launch_tiny(tmp_path / "run", "--resume").returncode == 0
    assert exact_rows(tmp_path / "run") == exact_rows(whole)
    # A finished run, resumed, shows its results again and changes none.
    assert launch_tiny(tmp_path / "run", "--resume").returncode == 0
    assert exact_rows(tmp_path / "run") == exact_rows(whole)


def test_mesh_and_microbatches_change_no_metric(whole, tmp_path):
    result = launch_tiny(tmp_path / "run", "--mesh", "data=2,fsdp=2,tensor=2", "--num-microbatches", "2", devices=8)
    assert result.returncode == 0, result.stderr
    assert "rematerialization" not in result.stderr
    for row, expected in zip(exact_rows(tmp_path / "run"), exact_rows(whole), strict=True):
        assert row.pop("phase") == expected.pop("phase")
        assert row == pytest.approx(expected, rel=2e-3, abs=2e-5)


@pytest.mark.usefixtures("quick_compilation")
def test_nothing_is_compiled_after_the_first_steps(tmp_path, caplog):
    """Every compiled function compiles once: later steps, checks and evaluations compile nothing."""
    compiled_at, commit = [], run.Run.commit

    def counted(self, *args, **options):
        commit(self, *args, **options)
        compiled_at.append(len([r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]))

    config = quickstart.Config(
        run_dir=tmp_path / "run", batch_size=64, group_size=4, rl_steps=6, warmup_steps=30, warmup_batch_size=32,
        held_out=64, warmup_accuracy=0.9, checkpoint_every=2,
    )  # fmt: skip
    setup = recipe.prepare(config, name="quickstart")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING), jax.log_compiles(True):
        patch.setattr(run.Run, "commit", counted)
        recipe.execute(setup, train=quickstart.train)
    assert compiled_at[0] > 0 and compiled_at[30] > compiled_at[29], "the log was read"
    assert len(set(compiled_at[19:30])) == 1, "the warm-up compiles nothing after its first check and checkpoints"
    assert len(set(compiled_at[32:])) == 1, "the RL phase compiles nothing after its first steps"
    names = [r.args[0] if r.args else r.getMessage() for r in caplog.records if "XLA compilation" in r.getMessage()]
    for name in ("update", "sample"):
        assert sum(name in str(n) for n in names) == 2, "one for each phase or temperature"


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "algorithm",
    [  # the others have recipes that other tests run
        name if name == "ppo_critic_free" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in quickstart.ALGORITHMS
    ],
)
def test_every_algorithm_runs(algorithm, tmp_path):
    # An untrained model gets no sum right: reward what it can do, so that there is a signal.
    config = quickstart.Config(run_dir=tmp_path / "run", algorithm=algorithm, smoke=True, scorers=("regex:^.{2,}",))
    recipe.execute(recipe.prepare(config, name="quickstart"), train=quickstart.train)
    rl = [row for row in exact_rows(tmp_path / "run") if row["phase"] == "rl"]
    assert all(0 < row["grad_norm"] < 100 for row in rl) and rl[1]["update_norm"] > 0


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "change, message",
    [
        ({"mesh": "data=3"}, "mesh='data=3' asks for 3 devices"),
        ({"mesh": "tensor=8"}, "not divisible by mesh axis tensor=8"),
        ({"group_size": 7}, "--group-size=7 does not divide --batch-size=1024"),
        ({"minibatches": 3}, "cannot be spread over data"),
        ({"batch_size": 8, "group_size": 8}, "cannot be spread over data"),
        ({"level": 7}, "level=7"),
        ({"held_out": 10_000}, "count=10000"),
        ({"rl_steps": -1}, "--rl-steps=-1"),
        ({"temperature": 0.0}, "--temperature=0.0"),
    ],
)
def test_bad_options_are_named_and_nothing_is_written(change, message, tmp_path):
    config = dataclasses.replace(quickstart.Config(run_dir=tmp_path / "run"), **change)
    with pytest.raises(ValueError, match=message):
        recipe.prepare(config, name="quickstart")
    assert not (tmp_path / "run").exists()


def test_mistakes_on_the_command_line_are_one_line(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    for extra, message in [
        (("--seed", "1", "--resume"), "another configuration (seed is 0 there, 1 here)"),
        ((), "already holds this run: pass --resume"),
    ]:
        result = launch_tiny(whole, *extra)
        assert result.returncode == 2 and message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    result = launch_tiny(whole, "--temprature", "1")
    assert result.returncode == 2 and "--temprature" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert (whole / "metrics.jsonl").read_bytes() == before
