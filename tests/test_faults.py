"""Runs that are interrupted, and numbers, scorers, disks and devices that fail: nothing is lost, nothing is silent."""

import dataclasses
import json
import os
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launching import EXPERIMENTS, ROOT, launch, load

from jaxpg import algorithms, ladder
from jaxpg.run import faults, metrics
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.metrics import read_jsonl
from jaxpg.tasks import arithmetic
from jaxpg.training import loop, train_state, update
from jaxpg.types import Batch, Weighted


def policy(params, batch):
    log_probs = jax.nn.log_softmax(params["w"])[batch.tokens]
    return log_probs, -log_probs


def batch_of(advantages):
    ones = jnp.ones((2, 3), bool)
    advantages = jnp.broadcast_to(jnp.asarray(advantages, jnp.float32)[:, None], (2, 3))
    return Batch(jnp.arange(6).reshape(2, 3), ones, ones, advantages=advantages, log_probs=jnp.full((2, 3), -1.8))


@pytest.fixture
def state_and_update():
    optimizer = update.adamw(0.1)
    state = train_state.init({"w": jnp.arange(6.0) / 10}, optimizer, jax.random.key(0))
    return state, jax.jit(update.make_update(algorithms.make_loss_fn(algorithms.reinforce(), policy), optimizer))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_changes_not_a_bit_and_the_next_goes_on(bad, state_and_update):
    state, step = state_and_update
    state, _ = step(state, batch_of([1.0, -0.5]))
    skipped, told = step(state, batch_of([1.0, bad]))
    jax.tree.map(np.testing.assert_array_equal, *(dataclasses.replace(s, key=0) for s in (skipped, state)))
    assert told["nonfinite"].total == 1 and not np.isfinite(told["loss"].total)
    after, told = step(skipped, batch_of([1.0, -0.5]))
    expected, _ = step(state, batch_of([1.0, -0.5]))
    jax.tree.map(np.testing.assert_array_equal, *(dataclasses.replace(s, key=0) for s in (after, expected)))
    assert told["nonfinite"].total == 0 and after.step == state.step + 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is_finite(bad):
    """√x at 0: the value is fine, the slope infinite."""
    optimizer = optax.sgd(0.1)
    step = update.make_update(lambda p, b: (Weighted(jnp.sum(jnp.sqrt(p["w"])), jnp.float32(1)), {}), optimizer)
    state = train_state.init({"w": jnp.ones(3).at[bad].set(0.0)}, optimizer, jax.random.key(0))
    after, told = jax.jit(step)(state, batch_of([1.0, 1.0]))
    np.testing.assert_array_equal(after.params["w"], state.params["w"])
    assert told["nonfinite"].total == 1 and np.isfinite(told["loss"].total)


def journal_of(folder, **options):
    saves = Checkpointer(folder / "saves")
    return loop.Journal("rl", metrics.JsonlWriter(folder / "m.jsonl"), saves, checkpoint_every=2, **options)


def test_a_run_counts_what_it_skips_and_stops_after_some_in_a_row(state_and_update, tmp_path):
    state, step = state_and_update
    journal = journal_of(tmp_path)
    bad = {1, 4, 5, 6}
    supervised = loop.supervised_step(lambda k: batch_of([1.0, np.nan if k in bad else -0.5]), step)
    with pytest.raises(
        faults.NonFiniteError, match=r"3 steps in a row .*max_nonfinite=2.* in the last one grad_norm, loss"
    ):
        loop.run(supervised, state, journal, steps=20, max_nonfinite=2)
    rows = read_jsonl(tmp_path / "m.jsonl")
    assert [row["nonfinite_updates"] for row in rows] == [0, 1, 0, 0, 1, 1, 1]
    assert rows[1]["nonfinite/loss"] == 1 and np.isnan(rows[1]["loss"])
    journal.checkpointer.wait()
    assert journal.checkpointer.latest == 6
    with pytest.raises(ValueError, match="max_nonfinite=-1: must be at least 0"):
        loop.run(supervised, state, journal, steps=20, max_nonfinite=-1)


def test_the_means_of_a_step_are_those_of_the_updates_that_were_made():
    def told(loss, bad):
        return {"loss": Weighted(np.float32(loss), np.float32(1)), "critic/nonfinite": Weighted(float(bad), 1.0)}

    made, counts = faults.sift([told(1.0, False), told(np.inf, True), told(3.0, False)])
    assert [m["loss"].total for m in made] == [1.0, 3.0]
    assert counts == {"nonfinite_updates": 1, "nonfinite/loss": 1}
    made, counts = faults.sift([told(1.0, True)])
    assert len(made) == 1 and counts == {"nonfinite_updates": 1}


def test_the_coefficient_survives_a_kl_that_is_not_finite():
    adapt = update.make_kl_adaptation(policy, lambda coef, kl: coef * jnp.where(kl > 1, 2.0, 0.5))
    state = train_state.init({"w": jnp.full(6, jnp.nan)}, optax.sgd(1.0), jax.random.key(0), kl_coef=0.25)
    after, told = jax.jit(adapt)(state, batch_of([1.0, 1.0]))
    assert after.kl_coef == 0.25 and np.isnan(told["kl_measured"].total)


def test_sigterm_saves_what_was_done_and_the_run_goes_on_from_there(state_and_update, tmp_path):
    state, step = state_and_update
    supervised = loop.supervised_step(lambda k: batch_of([1.0, -0.1 * k]), step)

    def on_step(_, done, __):
        if done == 3:  # no checkpoint would be due
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(faults.Preempted) as stopped:
        loop.run(supervised, state, journal_of(tmp_path), steps=7, on_step=on_step)
    assert stopped.value.code == 143 and stopped.value.done == 3
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = journal_of(tmp_path)
    assert resumed.checkpointer.latest == 3
    found = loop.run(supervised, state, resumed, steps=7)
    (tmp_path / "other").mkdir()
    expected = loop.run(supervised, state, journal_of(tmp_path / "other"), steps=7)
    jax.tree.map(np.testing.assert_array_equal, *(dataclasses.replace(s, key=0) for s in (found, expected)))


def test_a_run_does_not_go_on_with_another_reference(state_and_update, tmp_path):
    state, step = state_and_update
    supervised = loop.supervised_step(lambda k: batch_of([1.0, -0.5]), step)
    journal = journal_of(tmp_path, identity={"reference": "aa"})
    loop.run(supervised, state, journal, steps=2)
    journal.checkpointer.close()
    with pytest.raises(ValueError, match="rl: reference is aa in the checkpoint and bb here"):
        loop.run(supervised, state, journal_of(tmp_path, identity={"reference": "bb"}), steps=4)


@pytest.mark.parametrize("number", ["KILL", "TERM"])
def test_a_run_that_is_killed_ends_as_one_that_is_not(number, tmp_path):
    """The tool does this thirty times and more."""
    result = launch(ROOT / "tools" / "kill_test.py", "--kills", "2", "--signal", number, "--run-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "each ended as the undisturbed one, to the bit" in result.stdout


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_told_and_the_checkpoint_before_stays(tmp_path):
    """Files may not grow beyond a limit, which to a writer is the same."""
    optimizer = optax.sgd(1.0)

    def state_of(seed):
        params = {"w": jax.random.normal(jax.random.key(seed), (1 << 19,))}
        return train_state.init(params, optimizer, jax.random.key(0))

    saves = Checkpointer(tmp_path)
    saves.save(1, state_of(1), {"steps": 1})
    saves.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            RuntimeError, match=r"could not be written to .*File too large.*newest whole one is 1: make room"
        ):
            saves.save(2, state_of(2), {"steps": 2})
            saves.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = Checkpointer(tmp_path)
    assert again.latest == 1
    np.testing.assert_array_equal(again.restore(state_of(0))[0].params["w"], state_of(1).params["w"])
    again.save(2, state_of(2), {"steps": 2})
    again.close()
    assert Checkpointer(tmp_path).record() == {"steps": 2}


def test_out_of_memory_says_what_needs_less():
    with pytest.raises(RuntimeError) as raised, faults.memory_advice("sampling", loop.SAMPLE_KNOBS):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    assert (
        "Out of memory while sampling. What needs less: fewer completions a step (--batch" in raised.value.__notes__[0]
    )
    with pytest.raises(RuntimeError) as raised, faults.memory_advice("sampling", ""):
        raise RuntimeError("another")
    assert not hasattr(raised.value, "__notes__")


def failing(kind):
    calls = {"n": 0}

    def score(problem, text):
        calls["n"] += 1
        if calls["n"] % 5 == 0:
            if kind == "raise":
                raise OSError("no compiler")
            return float("nan")
        return float(len(text) >= 2)

    return score


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_scorer_that_fails_stops_the_run_or_is_counted(kind, tmp_path, monkeypatch):
    module = load(EXPERIMENTS / "remax.py")
    options = {"smoke": True, "scorer_retries": 0, "max_nonfinite": 0}
    monkeypatch.setattr(arithmetic, "score", failing(kind))
    with pytest.raises(RuntimeError, match=r"scorer 'task' failed on sample .* of prompt .*(no compiler|returned nan)"):
        module.train(module.prepare(module.Config(run_dir=tmp_path, **options)))
    config = module.Config(run_dir=tmp_path, resume=True, scorer_failures="skip", **options)
    module.train(module.prepare(config))  # the same run goes on
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rows) == 2
    assert all(row["scorer_failures"] > 0 and 0 < row["scored"] < 1 and np.isfinite(row["loss"]) for row in rows)
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy_after"] <= 1


def test_retries_are_as_many_as_asked_for(tmp_path, monkeypatch):
    tried = []

    def score(problem, text):
        tried.append(text)
        if len(tried) < 3:
            raise OSError("not yet")
        return 1.0

    monkeypatch.setattr(arithmetic, "score", score)
    config = ladder.Config(smoke=True, scorer_retries=2, run_dir=tmp_path)
    run = ladder.prepare(config, name="retries")
    assert ladder.measure(run, run.held_out[:1], ["7"]) == {"accuracy": 1.0} and len(tried) == 3


LEAST = {"keep": 1, "checkpoint_every": 1, "keep_best": 0, "max_nonfinite": 0, "scorer_retries": 0}


@pytest.mark.parametrize(("option", "least"), LEAST.items())
def test_too_small_an_option_is_named_before_the_folder_is_made(option, least, tmp_path):
    config = ladder.Config(smoke=True, run_dir=tmp_path / "run", **{option: least - 1})
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')}={least - 1}: must be at least {least}"):
        ladder.prepare(config, name="options")
    assert not (tmp_path / "run").exists()
