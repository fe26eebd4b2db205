"""Every rung runs from its file, on one device and on eight; and what the rungs share."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import EXPERIMENTS, launch, load

from jaxpg import ladder
from jaxpg.ladder import parts
from jaxpg.rollout import dynamic_sampling
from jaxpg.run import folder as run_folder
from jaxpg.run import report
from jaxpg.run.metrics import read_jsonl
from jaxpg.tasks import arithmetic, steps
from jaxpg.training import loop
from jaxpg.types import Rollout

RUNGS = (
    *("reinforce", "reinforce_baseline", "actor_critic", "gae", "trpo", "ppo_penalty", "ppo_clip"),
    *("remax", "rloo", "grpo", "dr_grpo", "dapo", "gspo"),
)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_trains_on_a_mesh_of_eight_devices(name, tmp_path, monkeypatch):
    # An untrained model gets no sum right: reward what it can do, so that there is a signal.
    monkeypatch.setattr(arithmetic, "score", lambda problem, text: float(len(text) >= 2))
    module = load(EXPERIMENTS / f"{name}.py")
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
    result = launch(EXPERIMENTS / f"{name}.py", "--smoke", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert "watch the reward, not the loss" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("quick_compilation")
def test_the_comparison_skips_what_is_done_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    compare = load(EXPERIMENTS / "compare.py")
    config = compare.Config(rungs=("rloo", "dapo", "grpo"), smoke=True, run_dir=tmp_path)  # two rungs, one seed
    compare.train(compare.prepare(config))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(written) == 2 and "rloo" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png", "length.png", "difficulty.png"}
    compare.train(compare.prepare(config))
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    with pytest.raises(ValueError, match="--rungs=nonsense: choose among reinforce"):
        compare.prepare(dataclasses.replace(config, rungs=("nonsense",)))


@pytest.mark.usefixtures("quick_compilation")
def test_gae_stops_in_the_first_warm_up_which_the_others_start_from(tmp_path, capsys):
    module = load(EXPERIMENTS / "gae.py")
    module.train(module.prepare(module.Config(smoke=True, run_dir=tmp_path, stop_after=1)))
    assert "Stopped after 1 steps" in capsys.readouterr().out
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.usefixtures("quick_compilation")
def test_granularities_train_on_a_mesh_of_eight_and_are_compared(tmp_path, monkeypatch, capsys):
    # An untrained model gets no step right: reward what it can do, so that there is a signal.
    monkeypatch.setattr(steps, "_rewards", lambda problem, texts: [float(len(text) > 1) for text in texts])
    module = load(EXPERIMENTS / "step_level.py")
    config = module.Config(smoke=True, run_dir=tmp_path, mesh="data=2,fsdp=2,tensor=2")
    module.train(module.prepare(dataclasses.replace(config, stop_after=1)))  # in the midst of the first warm-up
    assert not list(tmp_path.rglob("summary.json"))
    module.train(module.prepare(config))
    found = {path: list(read_jsonl(path)) for path in sorted(tmp_path.rglob("metrics.jsonl"))}
    assert [path.parts[-3:-1] for path in found] == [(name, "seed_0") for name in ("step", "token")]
    for rows in found.values():
        rl = [row for row in rows if row["phase"] == "rl"]
        assert len(rl) == 2 and all(row["reward"] > 0 and row["grad_norm"] > 0 for row in rl), rl
        assert rl[0]["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"
    # The same warm-up and the same samples; what differs is what is learned from them.
    first = [next(row for row in rows if row["phase"] == "rl") for rows in found.values()]
    assert len({row["reward"] for row in first}) == 1 and len({row["grad_norm"] for row in first}) == 2
    assert (tmp_path / "curves.png").exists() and "right steps" in " ".join(capsys.readouterr().out.split())
    written = {path: path.stat().st_mtime_ns for path in found}
    module.train(module.prepare(config))
    assert written == {path: path.stat().st_mtime_ns for path in found}
    with pytest.raises(ValueError, match="--granularities=word: choose among token, step, response"):
        module.prepare(dataclasses.replace(config, granularities=("word",)))


# ---- Dynamic sampling ------------------------------------------------------------------------------------------------


def drawn(rewards, name):
    """Groups of two rows whose tokens say where they come from."""
    rewards = np.asarray(rewards, np.float32)
    rows = rewards.size
    tokens = jnp.asarray([[name, i] for i in range(rows)], jnp.int32)
    mask = jnp.ones((rows, 2), bool)
    rollout = Rollout(tokens, mask, mask, jnp.zeros((rows, 2)), jnp.zeros(rows, jnp.int32))
    scores = loop.Scores(rewards, np.ones(rewards.shape, bool), segments=np.asarray(tokens))
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
    np.testing.assert_array_equal(kept.scores.segments, kept.rollout.tokens)


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


def test_rewards_of_steps_are_a_signal_and_are_told_as_rewards():
    of_tokens = np.array([[0.5, 0.5], [0.5, 0.0], [0.0, 0.5], [0.5, 0.0]], np.float32)
    scores = loop.Scores(np.zeros((2, 2), np.float32), np.ones((2, 2), bool), token_rewards=of_tokens)
    np.testing.assert_array_equal(dynamic_sampling.has_signal(scores), [True, False])
    mask = jnp.ones((4, 2), bool)
    rollout = Rollout(mask.astype(jnp.int32), mask, mask, jnp.zeros((4, 2)), jnp.ones(4, jnp.int32))
    row = loop.describe(arithmetic.problems(0, 0, 2), rollout, scores)
    assert row["reward"] == 0.625 and row["zero_variance_groups"] == 0.5


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
    task = ladder.leveled_task((2, 3), spare=2)
    assert [p.level for p in task.problems(0, 4, 4)] == [2, 3, 2, 3]
    assert task.problems(0, 0, 8)[4:] == task.problems(0, 4, 4)
    held_out = task.held_out(7)
    assert len(held_out) == 7 and [p.level for p in held_out[:2]] == [2, 3]
    assert not {p.prompt for p in held_out} & {p.prompt for p in task.problems(0, 0, 500)}
    assert task.max_new_tokens == len("198") + 1 + 2


def test_a_family_of_problems_brings_its_own_alphabet_lengths_and_measures(tmp_path):
    config = ladder.Config(smoke=True, run_dir=tmp_path / "run", level=1)
    run = ladder.prepare(config, name="steps", family=steps, measures={"right_steps": steps.right_steps})
    assert run.prompt_length == len("9+9+9=") and run.max_new_tokens == len("18;27") + 1
    problems = [steps.Problem("2+3+4=", "5;9", 1, ("5", "9"))] * 4
    told = parts.measure(run, problems, ["5;9", "5;8", "6;9", "9"])
    assert told == {"accuracy": 0.25, "right_steps": 0.5}
    assert len(set(run.held_out)) == len(run.held_out) == 16
    assert not {p.prompt for p in run.held_out} & {p.prompt for p in run.task.problems(0, 0, 500)}


def test_curves_of_several_seeds_become_a_band_and_their_gains_are_told_apart(tmp_path):
    band = ladder.spread([([0, 10, 20], [0.0, 0.5, 1.0]), ([0, 10], [0.5, 1.0])])
    assert band.x == [0, 10] and band.middle.tolist() == [0.25, 0.75]
    assert band.low.tolist() == [0.0, 0.5] and band.high.tolist() == [0.5, 1.0]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, after in zip(folders, (0.5, 0.125), strict=True):
        folder.mkdir()
        assert not ladder.is_finished(folder)
        run_folder.write_json(folder / "summary.json", {"accuracy_before": 0.25, "accuracy_after": after})
        assert ladder.is_finished(folder)
        run_folder.write_json(folder / "config.json", {"held_out": 64})
    assert ladder.gains(folders, "accuracy") == ("0.250", "0.312", "+0.250 -0.125")
    variance = (3 / 16 + 1 / 4 + 3 / 16 + 7 / 64) / 64  # p·(1 − p) of 1/4, 1/2, 1/4 and 1/8
    assert ladder.standard_errors(folders) == pytest.approx(0.125 / variance**0.5)


def test_runs_of_a_comparison_read_what_one_of_them_compiled():
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with ladder.shared_programs():
            folder = Path(jax.config.jax_compilation_cache_dir)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            for _ in range(2):  # two functions to JAX
                assert jax.jit(lambda x: x * 3.5 + 7.25)(2.0) == 14.25
            assert len([path for path in folder.iterdir() if "lambda" in path.name and "atime" not in path.name]) == 1
        assert jax.config.jax_compilation_cache_dir is None and not folder.exists()
        jax.config.update("jax_compilation_cache_dir", "somewhere")  # a cache of one's own stays
        with ladder.shared_programs():
            assert jax.config.jax_compilation_cache_dir == "somewhere"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


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
