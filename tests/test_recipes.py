"""Every recipe shows its loop, runs from its file, and trains on one device and on eight; and what recipes share."""

import ast
import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from launching import EXPERIMENTS, launch, load

from jaxpg import recipe, run
from jaxpg.run.metrics import read_jsonl
from jaxpg.tasks import steps

pytestmark = pytest.mark.usefixtures("quick_compilation")

LADDER = sorted((EXPERIMENTS / "ladder").glob("*.py"))
MESH = "data=2,fsdp=2,tensor=2"
# One of each kind: groups, one sample, a critic, a natural gradient, a greedy row, refilled groups, a coefficient that
# moves, several scorers. The rest differ from one of them in a function with tests of its own.
KINDS = {"grpo", "reinforce_baseline", "ppo", "trpo", "remax", "dapo", "ppo_penalty", "gdpo"}


def of_each_kind(paths):
    """The paths as parameters of a test; those that are one more of a kind only run in the exhaustive tier."""
    rare = pytest.mark.exhaustive
    return [pytest.param(path, id=path.stem, marks=() if path.stem in KINDS else rare) for path in paths]


def two_or_more(name):
    """Scorers that an untrained model satisfies now and then: it gets no sum right."""
    return ("regex:^.{2,}", "regex:^.{4,}@0.5") if name == "gdpo" else ("regex:^.{2,}",)


# ---- Each recipe -----------------------------------------------------------------------------------------------------


@functools.cache
def body(path: Path) -> tuple[str, ...]:
    """The lines of a recipe's loop, without comments."""
    (train,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "train")
    (loop,) = (node for node in train.body if isinstance(node, ast.For))
    return tuple(line.strip() for node in loop.body for line in ast.unparse(node).splitlines())


@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_a_recipe_is_short_shows_its_loop_and_differs_from_grpo_in_its_algorithm(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert "    for k, state in r.steps(state):\n" in text
    assert body(path)[-1].startswith("r.commit(k, state, ")
    grpo = body(EXPERIMENTS / "ladder" / "grpo.py")
    own = [line for line in body(path) if line not in grpo]
    assert len(own) <= 5, own
    lost = [line for line in grpo if line not in body(path)]
    assert len(lost) <= 6, lost


@pytest.mark.parametrize("path", of_each_kind(LADDER))
def test_a_recipe_trains_on_a_mesh_of_eight_devices(path, tmp_path):
    module = load(path)
    options = {"smoke": True, "mesh": MESH, "scorers": two_or_more(path.stem)}
    setup = recipe.prepare(module.Config(run_dir=tmp_path / "run", **options), name=path.stem)
    recipe.execute(setup, train=module.train)
    assert_trained(tmp_path / "run")
    left = {"config.json", "metrics.jsonl", "checkpoints", "curves.png", "summary.json", "model"}
    assert {found.name for found in (tmp_path / "run").iterdir()} == left


@pytest.mark.exhaustive  # test_quickstart resumes GRPO at odd moments, and test_run any loop
@pytest.mark.parametrize("name", ["ppo_penalty", "trpo", "dapo", "remax"])
def test_a_recipe_resumes_to_the_bit(name, tmp_path):
    """Critics, two optimizers, a coefficient that moves, groups that are refilled, a greedy row."""
    module = load(EXPERIMENTS / "ladder" / f"{name}.py")

    def execute(folder, **options):
        config = module.Config(smoke=True, scorers=two_or_more(name), checkpoint_every=1, run_dir=folder, **options)
        recipe.execute(recipe.prepare(config, name=name), train=module.train)

    def told(folder):
        rows = read_jsonl(folder / "metrics.jsonl")
        return [{key: x for key, x in row.items() if not key.startswith("seconds")} for row in rows]

    def saved(folder):
        (record,) = (folder / "checkpoints" / "rl" / "2" / "record").glob("metadata*")
        return json.loads(record.read_text())["fingerprints"]

    execute(tmp_path / "whole")
    execute(tmp_path / "stopped", stop_after=3)  # two steps of the warm-up, and one of the reinforcement learning
    assert not (tmp_path / "stopped" / "summary.json").exists()
    execute(tmp_path / "stopped", resume=True)
    assert told(tmp_path / "stopped") == told(tmp_path / "whole")
    assert saved(tmp_path / "stopped") == saved(tmp_path / "whole")


def assert_trained(folder):
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
    assert rows[0]["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"
    assert all(row["grad_norm"] > 0 for row in rows), rows
    summary = json.loads((folder / "summary.json").read_text())
    for when in ("before", "after"):
        low, mean, high = (summary[f"accuracy{bound}_{when}"] for bound in ("_low", "", "_high"))
        assert 0 <= low <= mean <= high <= 1 and low < high


@pytest.mark.parametrize("path", of_each_kind([EXPERIMENTS / "ladder" / f"{n}.py" for n in ("grpo", "rloo")]))
def test_a_recipe_runs_from_the_command_line(path, tmp_path):
    result = launch(path, "--smoke", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert "watch the reward, not the loss" in " ".join(result.stdout.split())
    assert (tmp_path / "run" / "summary.json").exists()


# ---- Studies of several runs -----------------------------------------------------------------------------------------


def test_the_comparison_skips_what_is_done_and_draws(tmp_path, capsys):
    compare = load(EXPERIMENTS / "studies" / "compare.py")
    config = compare.Config(rungs=("rloo", "dapo", "grpo"), smoke=True, run_dir=tmp_path)  # two rungs, one seed
    compare.train(compare.prepare(config))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(written) == 2 and "rloo" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png", "length.png", "difficulty.png"}
    compare.train(compare.prepare(config))
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}


def test_the_comparison_knows_every_recipe_that_needs_no_further_options():
    compare = load(EXPERIMENTS / "studies" / "compare.py")
    assert set(compare.RUNGS) == {path.stem for path in LADDER} - {"gdpo"}  # which compares scorers
    with pytest.raises(ValueError, match="--rungs=nonsense: choose among reinforce"):
        compare.prepare(compare.Config(rungs=("nonsense",)))
    with pytest.raises(ValueError, match="--seeds is empty"):
        compare.prepare(compare.Config(seeds=()))


def test_gae_stops_in_the_first_warm_up_which_the_others_start_from(tmp_path, capsys):
    module = load(EXPERIMENTS / "studies" / "gae.py")
    module.train(module.prepare(module.Config(smoke=True, run_dir=tmp_path, stop_after=1)))
    assert "Stopped after 1 steps" in capsys.readouterr().out
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.exhaustive  # two runs of a loss that `ppo` and `actor_critic` share
def test_gae_trains_with_each_lambda_on_a_mesh_of_eight_devices(tmp_path):
    module = load(EXPERIMENTS / "studies" / "gae.py")
    module.train(module.prepare(module.Config(smoke=True, run_dir=tmp_path, mesh=MESH, scorers=two_or_more("gae"))))
    for name in ("lambda_0", "lambda_0.5"):
        assert_trained(tmp_path / name)
    assert (tmp_path / "curves.png").exists()


def test_granularities_train_on_a_mesh_of_eight_and_are_compared(tmp_path, monkeypatch, capsys):
    # An untrained model gets no step right: reward what it can do, so that there is a signal.
    monkeypatch.setattr(steps, "_rewards", lambda problem, texts: [float(len(text) > 1) for text in texts])
    module = load(EXPERIMENTS / "studies" / "step_level.py")
    config = module.Config(smoke=True, run_dir=tmp_path, mesh=MESH)
    module.train(module.prepare(dataclasses.replace(config, stop_after=1)))  # in the midst of the first warm-up
    assert not list(tmp_path.rglob("summary.json"))
    module.train(module.prepare(config))
    found = {path: list(read_jsonl(path)) for path in sorted(tmp_path.rglob("metrics.jsonl"))}
    assert [path.parts[-3:-1] for path in found] == [(name, "seed_0") for name in ("step", "token")]
    for path, rows in found.items():
        assert_trained(path.parent)
        assert all(row["reward"] > 0 for row in rows if row["phase"] == "rl"), rows
    # The same warm-up and the same samples; what differs is what is learned from them.
    first = [next(row for row in rows if row["phase"] == "rl") for rows in found.values()]
    assert len({row["reward"] for row in first}) == 1 and len({row["grad_norm"] for row in first}) == 2
    assert (tmp_path / "curves.png").exists() and "right steps" in " ".join(capsys.readouterr().out.split())
    written = {path: path.stat().st_mtime_ns for path in found}
    module.train(module.prepare(config))
    assert written == {path: path.stat().st_mtime_ns for path in found}
    with pytest.raises(ValueError, match="--granularities=word: choose among token, step, response"):
        module.prepare(dataclasses.replace(config, granularities=("word",)))


# ---- What recipes share ----------------------------------------------------------------------------------------------


def warmed_up(config):
    """The parameters after the warm-up of a run."""
    setup = recipe.prepare(config, name="warm-up")
    with run.open(setup.config, name=setup.name, mesh=setup.mesh) as opened:
        return recipe.Recipe(setup, opened).warm_up()


def test_a_warm_up_is_taken_over_from_another_run_to_the_bit(tmp_path):
    config = recipe.Config(smoke=True, run_dir=tmp_path / "first", seed=3)
    warmed_up(dataclasses.replace(config, stop_after=1))
    other = dataclasses.replace(config, run_dir=tmp_path / "early", warm_start=tmp_path / "first")
    with pytest.raises(ValueError, match="has not finished its warm-up"):
        warmed_up(other)
    first = warmed_up(dataclasses.replace(config, resume=True))
    second = warmed_up(dataclasses.replace(other, run_dir=tmp_path / "second"))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    with pytest.raises(ValueError, match="warmed up with other options: seed is 3 there, 4 here"):
        warmed_up(dataclasses.replace(other, run_dir=tmp_path / "third", seed=4))
    with pytest.raises(ValueError, match="is not the folder of a run"):
        warmed_up(dataclasses.replace(other, run_dir=tmp_path / "fourth", warm_start=tmp_path / "nowhere"))


def test_a_run_without_rewards_is_supervised_fine_tuning(tmp_path):
    module = load(EXPERIMENTS / "rlhf" / "sft.py", "rlhf_sft")
    options = {"smoke": True, "batch_size": 64, "evaluate_samples": 4, "run_dir": tmp_path / "run"}
    config = module.Config(task="arithmetic", **options)
    recipe.execute(recipe.prepare(config, name="sft"), train=module.train)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["phase"] == "warmup"]
    assert len(losses) >= 2 and losses[-1] < losses[0] and not [row for row in rows if row["phase"] == "rl"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rl_steps"] == 0 and summary["warmup_steps"] == len(losses)
    assert 0 <= summary["pass@1"] <= summary["pass@2"] <= summary["pass@4"] <= 1
    assert 0 <= summary["majority@4"] <= 1
