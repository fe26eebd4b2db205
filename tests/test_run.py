"""A run that stops at any moment and goes on ends as one that nobody disturbed; `commit` keeps what `steps` says."""

import dataclasses
import os
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import launch

from jaxpg import run
from jaxpg.parallel import sharding
from jaxpg.run import faults, fingerprint
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.metrics import read_jsonl
from jaxpg.types import Weighted

PHASES = (("warmup", 4), ("train", 7))


def first():
    """A least-squares fit with a key and a counter."""
    return {"w": jnp.zeros(3), "key": jax.random.key(1), "made": jnp.int32(0)}


@jax.jit
def step(state, k):
    x = jax.random.normal(jax.random.fold_in(state["key"], k), (4, 3))
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum((x @ w - x.sum(1)) ** 2))(state["w"])
    state = state | {"w": state["w"] - 0.05 * gradient, "made": state["made"] + 1}
    return state, {"loss": Weighted(loss, jnp.float32(4)), "norm": jnp.linalg.norm(gradient)}


def evaluate(state):
    return {"accuracy": float(-jnp.abs(state["w"] - 1).sum())}


def options(folder, **more):
    return run.Options(run_dir=folder, resume=True, checkpoint_every=3, compilation_cache=False, **more)


def loop(folder, *, step=step, phases=PHASES, before_commit=lambda phase, k: None, **more):
    """Two phases of a user's loop; returns the last state, None where --stop-after ended it."""
    with run.open(options(folder, **more), name="tiny") as r:
        state = first()
        for phase, count in phases:
            for k, state in r.steps(state, count, phase=phase, evaluate=evaluate, evaluate_every=2):
                state, row = step(state, k)
                before_commit(phase, k)
                r.commit(k, state, row | {"half": k / 2})
            state = r.state
        return state
    return None


def logged(folder):
    """What a run logged, less the clocks."""
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]


def rows_of(folder, phase):
    return [row for row in logged(folder) if row["phase"] == phase]


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    raw = map(fingerprint.without_key_types, (found, expected))
    jax.tree.map(np.testing.assert_array_equal, *raw)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, loop(folder)


# ---- Stopping and going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stops",
    [(1,), (2, 2, 1), (3,), (4,), (5,), (6, 2), (3, 3, 3)],
    ids=lambda stops: "-".join(map(str, stops)),
)
def test_a_run_that_stopped_ends_as_one_that_did_not(stops, undisturbed, tmp_path):
    """Before the first checkpoint, at one, after one; in the second phase before its first checkpoint, and after it."""
    folder, expected = undisturbed
    for stop_after in stops:
        assert loop(tmp_path / "run", stop_after=stop_after) is None
    assert_equal(loop(tmp_path / "run"), expected)
    assert logged(tmp_path / "run") == logged(folder)
    for phase, count in PHASES:
        records = [Checkpointer(f / "checkpoints" / phase, read_only=True) for f in (tmp_path / "run", folder)]
        assert [saves.latest for saves in records] == [count, count]


def test_a_finished_run_makes_no_step_and_shows_its_last_state(undisturbed):
    folder, expected = undisturbed
    before = (folder / "metrics.jsonl").read_bytes()

    def never(state, k):
        raise AssertionError("a step was made")

    assert_equal(loop(folder, step=never), expected)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("moment", [("warmup", 1), ("warmup", 3), ("train", 0)])
def test_sigterm_saves_what_was_done_and_the_run_goes_on_from_there(moment, undisturbed, tmp_path):
    """Where no checkpoint is due, at the last step of a phase, and at the first one of another."""
    folder, expected = undisturbed
    before = signal.getsignal(signal.SIGTERM)

    def terminate(phase, k):
        if (phase, k) == moment:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(faults.Preempted) as stopped:
        loop(tmp_path / "run", before_commit=terminate)
    phase, k = moment
    assert stopped.value.code == 143 and stopped.value.done == k + 1
    assert signal.getsignal(signal.SIGTERM) == before
    assert Checkpointer(tmp_path / "run" / "checkpoints" / phase, read_only=True).latest == k + 1

    made, every = [], [(name, i) for name, count in PHASES for i in range(count)]
    assert_equal(loop(tmp_path / "run", before_commit=lambda *at: made.append(at)), expected)
    assert made == every[every.index(moment) + 1 :]
    assert logged(tmp_path / "run") == logged(folder)


class Moments(NamedTuple):
    mean: jax.Array
    square: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Everything:
    params: dict
    moments: Moments
    keys: list
    nothing: None = None


def test_a_state_may_be_any_pytree_on_any_devices(tmp_path):
    """Typed keys of two kinds, one of them an array of keys, dtypes without a NumPy name, a scalar of Python."""
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    spread = jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))

    def make(value):
        params = {
            "spread": spread + value,
            "half": jnp.full((3,), value, jnp.bfloat16),
            "flag": jnp.array([True, False]),
        }
        keys = [jax.random.key(value), jax.random.split(jax.random.key(value, impl="rbg"), 2)]
        return Everything(params, Moments(jnp.int8(value), np.arange(3) + value), keys)

    def go(value, **more):
        with run.open(options(tmp_path / "run", mesh="data=2,fsdp=2,tensor=2", **more), name="any") as r:
            for k, state in r.steps(make(value), 4):
                assert state.params["spread"].sharding == spread.sharding
                r.commit(k, make(k + 1), {})
            return r.state
        return None

    assert go(0, stop_after=4) is None
    found = go(9)
    assert_equal(jax.tree.map(jnp.asarray, found), jax.tree.map(jnp.asarray, make(4)))
    assert found.params["half"].dtype == jnp.bfloat16
    assert [str(jax.random.key_impl(key)) for key in found.keys] == ["threefry2x32", "rbg"]
    assert found.params["spread"].sharding == spread.sharding


def test_a_state_that_was_put_nowhere_meets_batches_of_the_mesh_also_after_it_was_restored(tmp_path):
    mesh = sharding.make_mesh("data=8")
    x = jax.device_put(jnp.arange(8.0), sharding.rows(mesh))
    add = jax.jit(lambda state, x: state + x.sum())

    def go(**more):
        with run.open(options(tmp_path / "run", mesh="data=8", **more), name="spread") as r:
            for k, state in r.steps(jnp.float32(0), 5):
                r.commit(k, add(state, x), {})
            return float(r.state)
        return None

    assert go(stop_after=4) is None
    assert go() == 5 * 28


def test_numbers_of_python_in_a_state_have_their_types_from_the_first_step_on(tmp_path):
    """Else bfloat16 · 0.5 would be bfloat16 in a new run and float32 in one that goes on."""

    def go(folder, **more):
        with run.open(options(tmp_path / folder, **more), name="weak") as r:
            for k, state in r.steps((jnp.ones(2, jnp.bfloat16), 0.5), 5):
                r.commit(k, (jnp.ones(2, jnp.bfloat16), state[1]), {"size": (state[0] * state[1]).dtype.itemsize})

    go("whole")
    go("parts", stop_after=4)
    go("parts")
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")


OWN_FILE = '''
import dataclasses
import jax
import jax.numpy as jnp
from jaxpg import run
from jaxpg.run import cli, ranges


@dataclasses.dataclass(frozen=True)
class Config(run.Options):
    """Options of a file of one's own."""

    rate: ranges.PositiveFloat = 0.1
    steps: ranges.Positive = 7


def train(c):
    update = jax.jit(lambda w, k: w - c.rate * jnp.cos(w + k))
    with run.open(c, name="own") as r:
        for k, w in r.steps(jnp.zeros(4), c.steps, evaluate=lambda w: {"accuracy": float(w.sum())}, evaluate_every=3):
            w = update(w, k)
            r.commit(k, w, {"loss": float(w[0])})
        print("total", float(r.state.sum()).hex())


cli.main(Config, lambda c: run.check(c, name="own"), train, description="")
'''


def test_a_loop_in_a_file_of_ones_own_stops_and_goes_on(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE)

    def start(folder, *more):
        return launch(file, "--run-dir", str(tmp_path / folder), "--checkpoint-every", "2", *more)

    refused = start("whole", "--rate", "0")
    assert refused.returncode == 2 and refused.stderr == "error: --rate=0.0: must be greater than 0\n"
    whole = start("whole")
    stopped = start("parts", "--stop-after", "5")
    refused = start("parts")
    assert refused.returncode == 2 and "already holds this run: pass --resume" in refused.stderr
    resumed = start("parts", "--resume")
    assert [result.returncode for result in (whole, stopped, resumed)] == [0, 0, 0], whole.stderr + resumed.stderr
    assert (
        "Stopped after 5 steps of this session, --resume goes on." in stopped.stdout and "total" not in stopped.stdout
    )
    totals = [[line for line in result.stdout.splitlines() if "total" in line] for result in (whole, resumed)]
    assert totals[0] == totals[1] and len(totals[0]) == 1
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")


# ---- What a commit does ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """Opens a run whose state is one number."""
    return lambda **more: run.open(options(tmp_path / "run", **more), name="small")


def test_a_step_without_its_commit_is_told(small):
    with small() as r, pytest.raises(RuntimeError, match=r"step 1 of 'train' ended without commit\(k, state, row\)"):
        for k, state in r.steps(jnp.float32(0), 3):
            if k == 0:
                r.commit(k, state, {})


def test_a_commit_of_another_step_is_told(small):
    with small() as r:
        with pytest.raises(RuntimeError, match=r"commit\(k=0\): no step is due"):
            r.commit(0, jnp.float32(0), {})
        for k, state in r.steps(jnp.float32(0), 3):
            with pytest.raises(RuntimeError, match=rf"commit\(k={k + 1}\): step {k} is due"):
                r.commit(k + 1, state, {})
            r.commit(k, state, {})
            with pytest.raises(RuntimeError, match=rf"commit\(k={k}\): "):
                r.commit(k, state, {})


def test_the_last_step_may_come_early_and_stays_the_last(small, tmp_path):
    for _ in range(2):  # the second time nothing is left to do
        made = 0
        with small() as r:
            for k, state in r.steps(jnp.float32(0), 9, evaluate=lambda x: {"accuracy": x}, evaluate_every=5):
                r.commit(k, state + 1, {}, last=k == 3)
                made += 1
            assert float(r.state) == 4 and made == r.commits
    assert made == 0
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluation")] == [0, 4]
    assert [row["step"] for row in rows_of(tmp_path / "run", "train")] == [1, 2, 3, 4]


def test_the_state_is_evaluated_before_the_first_step_every_n_and_after_the_last(undisturbed):
    folder, _ = undisturbed
    rows = rows_of(folder, "evaluation")
    assert [row["step"] for row in rows] == [0, 2, 4, 0, 2, 4, 6, 7]
    assert rows[0] == {"phase": "evaluation", "step": 0, "accuracy": -3.0}
    assert rows[2]["accuracy"] == rows[3]["accuracy"]  # the second phase begins where the first one ended


def test_a_row_may_have_any_names_and_mixes_sums_numbers_and_arrays(small, tmp_path):
    with small() as r:
        for k, state in r.steps(jnp.float32(0), 2):
            mine = {
                "loss": Weighted(jnp.float32(6), jnp.float32(4)),
                "lr": jnp.float32(0.5),
                "n": np.int64(3),
                "text": "a",
            }
            r.commit(k, state, mine | {"diverged": float("inf")})
        with pytest.raises(ValueError, match=r"row\['lengths'\] has shape \(3,\): must be a number"):
            r.log("mine", 1, {"lengths": np.zeros(3)})
    row = rows_of(tmp_path / "run", "train")[1]
    assert np.isnan(row.pop("diverged"))
    assert row == {"phase": "train", "step": 2, "loss": 1.5, "nonfinite_updates": 0, "lr": 0.5, "n": 3, "text": "a"}


def test_skipped_updates_are_counted_and_some_in_a_row_end_the_run(small, tmp_path):
    bad = {1, 4, 5, 6}
    message = (
        r"3 steps in a row .*max_nonfinite=2.* in the last one loss, nonfinite|3 steps in a row .*in the last one loss"
    )
    with pytest.raises(faults.NonFiniteError, match=message), small(max_nonfinite=2) as r:
        for k, state in r.steps(jnp.float32(0), 20):
            one, skipped = jnp.float32(1), k in bad
            loss = Weighted(jnp.float32(np.nan if skipped else 0.5), one)
            r.commit(k, state + 1, {"loss": loss, "nonfinite": Weighted(jnp.float32(skipped), one)})
    rows = rows_of(tmp_path / "run", "train")
    assert [row["nonfinite_updates"] for row in rows] == [0, 1, 0, 0, 1, 1, 1]
    assert rows[1]["nonfinite/loss"] == 1 and np.isnan(rows[1]["loss"])
    assert Checkpointer(tmp_path / "run" / "checkpoints" / "train", read_only=True).latest == 6


def test_the_checkpoint_of_the_best_accuracy_stays_beside_the_newest(tmp_path):
    accuracy = [0.0, 0.1, 0.9, 0.3, 0.9, 0.2, float("nan")]
    with run.open(run.Options(run_dir=tmp_path / "run", checkpoint_every=1, keep=1, keep_best=1), name="best") as r:
        for k, state in r.steps(jnp.int32(0), 6, evaluate=lambda n: {"accuracy": accuracy[int(n)]}, evaluate_every=1):
            r.commit(k, state + 1, {})
        saves = r.checkpointer("train")
        saves.wait()
        assert saves.best == 4 and saves.all == [4, 6]  # of equal ones the newest
        assert int(saves.restore(r.state, saves.best)[0]) == 4


def test_a_run_does_not_go_on_with_another_reference(small):
    def go(reference, **more):
        with small(**more) as r:
            for k, state in r.steps(jnp.float32(0), 5, identity={"reference": reference}):
                r.commit(k, state, {})

    go("aa", stop_after=4)
    with pytest.raises(ValueError, match="train: reference is aa in the checkpoint and bb here: go on with the one"):
        go("bb")
    go("aa")


def test_seconds_are_told_by_part_and_memory_with_its_remedy(small, tmp_path):
    def work(fail):
        if fail:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return jnp.float32(1)

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised, small() as r:
        timed = r.timed("work", work, advice="a smaller --batch-size")
        for k, state in r.steps(jnp.float32(0), 3):
            r.commit(k, state + timed(k == 2), {})
    assert raised.value.__notes__ == ["Out of memory while work. What needs less: a smaller --batch-size"]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all(0 < row["seconds_work"] <= row["seconds"] for row in rows)
