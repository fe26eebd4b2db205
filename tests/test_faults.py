"""Runs that are interrupted, and numbers, scorers, disks and devices that fail: nothing is lost, nothing is silent."""

import dataclasses
import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launching import EXPERIMENTS, ROOT, launch, load

from jaxpg import algorithms, recipe, run
from jaxpg.recipe.recipe import SAMPLE_ADVICE
from jaxpg.run import faults
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.metrics import read_jsonl
from jaxpg.training import train_state, update
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


def test_the_means_of_a_step_are_those_of_the_updates_that_were_made():
    def told(loss, bad):
        return {"loss": Weighted(np.float32(loss), np.float32(1)), "critic/nonfinite": Weighted(float(bad), 1.0)}

    made, counts = faults.split_skipped([told(1.0, False), told(np.inf, True), told(3.0, False)])
    assert [m["loss"].total for m in made] == [1.0, 3.0]
    assert counts == {"nonfinite_updates": 1, "nonfinite/loss": 1}
    made, counts = faults.split_skipped([told(1.0, True)])
    assert len(made) == 1 and counts == {"nonfinite_updates": 1}


def test_the_coefficient_survives_a_kl_that_is_not_finite():
    adapt = update.make_kl_adaptation(policy, lambda coef, kl: coef * jnp.where(kl > 1, 2.0, 0.5))
    state = train_state.init({"w": jnp.full(6, jnp.nan)}, optax.sgd(1.0), jax.random.key(0), kl_coef=0.25)
    after, told = jax.jit(adapt)(state, batch_of([1.0, 1.0]))
    assert after.kl_coef == 0.25 and np.isnan(told["kl_measured"].total)


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
    with pytest.raises(RuntimeError) as raised, faults.memory_advice("sample", SAMPLE_ADVICE):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    said = "Out of memory while sample. What needs less: fewer completions a step (--batch-size)"
    assert raised.value.__notes__[0].startswith(said)
    with pytest.raises(RuntimeError) as raised, faults.memory_advice("sample", ""):
        raise RuntimeError("another")
    assert not hasattr(raised.value, "__notes__")


FAILS = {"raise": "raise OSError('no compiler')", "nan": "return float('nan')"}


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    """Writes a module with a scorer whose every n-th call fails, and returns the scorer's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(kind, every):
        module = f"scorer_{kind}_{every}"
        lines = ("import itertools", "calls = itertools.count(1)", "def score(problem, text):")
        lines += (
            f"    if next(calls) % {every} == 0:",
            f"        {FAILS[kind]}",
            "    return float(len(text) >= 2)",
            "",
        )
        (tmp_path / f"{module}.py").write_text("\n".join(lines))
        return f"{module}:score"

    return write


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", FAILS)
def test_a_scorer_that_fails_stops_the_run_or_is_counted(kind, scorer, tmp_path):
    module = load(EXPERIMENTS / "ladder" / "remax.py")
    options = {"smoke": True, "scorer_retries": 0, "max_nonfinite": 0, "scorers": (scorer(kind, 5),)}

    def train(**more):
        setup = recipe.prepare(module.Config(run_dir=tmp_path / "run", **options, **more), name="remax")
        recipe.execute(setup, train=module.train)

    said = rf"scorer 'scorer_{kind}_5:score' failed on sample .* of prompt .*(no compiler|returned nan)"
    with pytest.raises(RuntimeError, match=said):
        train()
    train(resume=True, scorer_failures="skip")  # the same run goes on
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rows) == 2
    assert all(row["scorer_failures"] > 0 and 0 < row["scored"] < 1 and np.isfinite(row["loss"]) for row in rows)
    assert 0 <= json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy_after"] <= 1


def test_retries_are_as_many_as_asked_for(tmp_path):
    tried = []

    def twice_in_vain(problem, text):
        tried.append(text)
        if len(tried) < 3:
            raise OSError("not yet")
        return 1.0

    setup = recipe.prepare(recipe.Config(smoke=True, scorer_retries=2, run_dir=tmp_path / "run"), name="retries")
    task = dataclasses.replace(setup.task, is_right=twice_in_vain, scorers={"mine": (twice_in_vain, 1.0)})
    with run.open(setup.config, name="retries") as opened:
        r = recipe.Recipe(dataclasses.replace(setup, task=task), opened)
        problems = r.setup.held_out[:1]
        assert r.evaluator.measure(problems, ["7"])["accuracy"] == 1.0 and len(tried) == 3
        tried.clear()
        assert r.judge(problems, ["7"]).rewards == 1.0 and len(tried) == 3


@pytest.mark.parametrize("option", ["keep", "checkpoint_every", "keep_best", "max_nonfinite", "scorer_retries"])
def test_too_small_an_option_is_named_before_the_folder_is_made(option, tmp_path):
    config = recipe.Config(smoke=True, run_dir=tmp_path / "run", **{option: -1})
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')}=-1: must be at least"):
        recipe.prepare(config, name="options")
    assert not (tmp_path / "run").exists()
