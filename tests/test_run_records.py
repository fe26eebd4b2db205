"""What a run leaves behind and goes by: metrics, sinks, its folder, its options; and evaluation."""

import dataclasses
import importlib.util
import itertools
import json
from typing import Annotated, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import run
from jaxpg.rollout import evaluate
from jaxpg.run import folder as run_folder
from jaxpg.run import metrics, ranges, sinks
from jaxpg.types import Weighted


def test_metrics_divide_once_and_an_empty_one_is_zero():
    total = {"a": Weighted(jnp.float32(4), jnp.float32(4)), "b": Weighted(*jnp.zeros(2))}
    total = metrics.add(total, {"a": Weighted(jnp.float32(5), jnp.float32(1)), "b": Weighted(*jnp.zeros(2))})
    assert metrics.to_floats(total) == {"a": pytest.approx(1.8), "b": 0.0}
    assert Weighted(*jnp.zeros(2)).mean == 0.0


def test_jsonl_is_cut_at_the_offset_and_has_no_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = metrics.JsonlWriter(path)
    writer.write({"step": 1, "loss": 0.5})
    offset = writer.offset
    writer.write({"step": 2, "loss": float("nan")})
    assert path.read_text().splitlines()[1] == '{"step": 2, "loss": null}'
    assert np.isnan(metrics.read_jsonl(path)[1]["loss"])
    writer.close()
    writer = metrics.JsonlWriter(path, offset=offset)
    writer.write({"step": 2, "loss": 0.25})
    assert metrics.read_jsonl(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_a_folder_never_holds_two_runs(tmp_path):
    run = tmp_path / "run"
    run_folder.open_run(run, {"seed": 0, "lr": 0.1}, resume=False)
    (run / "metrics.jsonl").write_text("kept")
    run_folder.open_run(run, {"seed": 0, "lr": 0.1}, resume=True)
    with pytest.raises(ValueError, match=r"another configuration \(lr is 0.1 there, 0.2 here\)"):
        run_folder.open_run(run, {"seed": 0, "lr": 0.2}, resume=True)
    with pytest.raises(ValueError, match="already holds this run: pass --resume"):
        run_folder.open_run(run, {"seed": 0, "lr": 0.1}, resume=False)
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").write_text("")
    with pytest.raises(ValueError, match="is not the folder of a run"):
        run_folder.open_run(other, {}, resume=True)
    assert (run / "metrics.jsonl").read_text() == "kept" and len(list(other.iterdir())) == 1
    with pytest.raises(ValueError, match=r"--run-dir: .* cannot be written \(Not a directory\), choose another folder"):
        run_folder.open_run(other / "cat.png" / "run", {}, resume=True)
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.partial").write_text('{"se')
    run_folder.open_run(killed, {"seed": 0}, resume=True)


# ---- Where metrics go besides ---------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """Opens a run whose state is one number."""
    return lambda **more: run.open(run.Options(run_dir=tmp_path / "run", compilation_cache=False, **more), name="small")


class Sink:
    """Notes what it is told, and fails where it is asked to."""

    def __init__(self, fails=None):
        self.fails, self.told, self.closed = fails, [], False

    def __call__(self, folder, name, config):
        self._fail("begin")
        self.about = name, config["keep"]
        return self

    def write(self, step, row):
        self._fail("write")
        self.told.append((step, row))

    def close(self):
        self._fail("close")
        self.closed = True

    def _fail(self, moment):
        if self.fails == moment:
            raise OSError(f"no network at {moment}")


def test_a_sink_gets_the_numbers_of_every_row(monkeypatch, small):
    sink = Sink()
    monkeypatch.setitem(sinks.FACTORIES, "mine", sink)
    with small(track=("mine",)) as r:
        for k, state in r.steps(jnp.float32(0), 2):
            r.commit(k, state, {"loss": Weighted(jnp.float32(k), jnp.float32(2)), "text": "no number"})
        r.log("mine", 7, {"accuracy": np.float32(0.5)})
    assert sink.closed and sink.about == ("small", 2)
    assert [(step, row.get("train/loss")) for step, row in sink.told] == [(1, 0.0), (2, 0.5), (7, None)]
    assert sink.told[2][1] == {"mine/accuracy": 0.5} and "train/text" not in sink.told[0][1]
    assert sink.told[0][1]["train/seconds"] > 0


@pytest.mark.parametrize("moment", ["begin", "write", "close"])
def test_a_sink_that_fails_is_left_out_with_a_warning(moment, monkeypatch, small, tmp_path):
    broken, other = Sink(moment), Sink()
    for name, sink in (("broken", broken), ("other", other)):
        monkeypatch.setitem(sinks.FACTORIES, name, sink)
    said = f"--track broken failed and is left out: OSError: no network at {moment}"
    with pytest.warns(UserWarning, match=said), small(track=("broken", "other")) as r:
        for k, state in r.steps(jnp.float32(0), 3):
            r.commit(k, state, {"loss": 0.5})
    assert len(metrics.read_jsonl(tmp_path / "run" / "metrics.jsonl")) == len(other.told) == 3 and other.closed
    assert len(broken.told) == (3 if moment == "close" else 0)


def test_a_sink_that_is_not_installed_is_one_error_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, package in sinks.PACKAGES.items():
        with pytest.raises(
            ValueError, match=rf"--track {name}: {package} is not installed, pip install 'jaxpg\[track\]'"
        ):
            run.check(run.Options(run_dir=tmp_path / "run", track=(name,)), name="tracked")
    assert not (tmp_path / "run").exists()


# ---- Options and the folder -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(run.Options):
    """Options of a run of one's own."""

    rate: ranges.PositiveFloat = 0.1
    rank: ranges.NonNegative | None = None
    shares: tuple[ranges.Share, ...] = ()
    pair: Annotated[float, ranges.Between(-1, 1)] | None = None
    cheap: bool = False
    NOT_IDENTITY: ClassVar[tuple[str, ...]] = ("cheap",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": 0.0}, r"--rate=0\.0: must be greater than 0"),
        ({"rate": float("inf")}, "--rate=inf: must be greater than 0"),
        ({"rate": float("nan")}, "--rate=nan: must be greater than 0"),
        ({"rank": -1}, "--rank=-1: must be at least 0"),
        ({"shares": (0.5, 1.5)}, r"--shares=1\.5: must be between 0 and 1"),
        ({"pair": -2.0}, r"--pair=-2\.0: must be between -1 and 1"),
        ({"keep": 0}, "--keep=0: must be at least 1"),
        ({"keep_best": -1}, "--keep-best=-1: must be at least 0"),
        ({"checkpoint_every": 0}, "--checkpoint-every=0: must be at least 1"),
        ({"max_nonfinite": -1}, "--max-nonfinite=-1: must be at least 0"),
        ({"stop_after": 0}, "--stop-after=0: must be at least 1"),
        ({"mesh": "data=3"}, "mesh='data=3' asks for 3 devices"),
    ],
)
def test_an_option_out_of_its_range_is_named_before_the_folder_is_made(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=message), run.open(Config(run_dir=tmp_path / "run", **wrong), name="mine"):
        raise AssertionError("reached")
    assert not (tmp_path / "run").exists()


def test_options_at_the_edge_of_their_range_pass_and_checking_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edge = Config(rate=1e-9, rank=0, shares=(0, 1, 0.5), pair=-1, keep=1, keep_best=0, stop_after=1)
    checked = run.check(edge, name="mine")
    assert checked == dataclasses.replace(edge, run_dir=checked.run_dir) and checked.run_dir.parts == ("runs", "mine")
    assert not list(tmp_path.iterdir())


def test_two_configurations_never_share_a_folder_and_how_a_run_is_done_is_no_configuration(tmp_path):
    folder, more = tmp_path / "run", {"compilation_cache": False}
    with run.open(Config(run_dir=folder, **more), name="mine"):
        pass
    before = sorted(folder.iterdir())
    for again, message in (
        ({}, "already holds this run: pass --resume"),
        ({"resume": True, "rate": 0.2}, r"another configuration \(rate is 0.1 there, 0.2 here\)"),
        ({"rate": 0.2}, "another configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            run.check(Config(run_dir=folder, **again, **more), name="mine")
        with pytest.raises(ValueError, match=message), run.open(Config(run_dir=folder, **again, **more), name="mine"):
            raise AssertionError("reached")
    assert sorted(folder.iterdir()) == before
    same = {"keep": 5, "mesh": "data=8", "checkpoint_every": 1, "cheap": True, "max_nonfinite": 0}
    with run.open(Config(run_dir=folder, resume=True, **same, **more), name="mine") as r:
        assert r.mesh.shape["data"] == 8
    assert json.loads((folder / "config.json").read_text()) == {"rate": 0.1, "rank": None, "shares": [], "pair": None}


# ---- Evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_fills_the_last_batch_and_keeps_the_order():
    sizes = []

    def generate(problems):
        sizes.append(len(problems))
        return [str(p) for p in problems]

    problems = list(range(10))
    texts = evaluate.complete(generate, problems, batch=4)
    assert texts == [str(p) for p in problems] and sizes == [4, 4, 4]
    assert evaluate.accuracy(lambda p, text: float(p < 5 and text == str(p)), problems, texts) == 0.5
    assert evaluate.complete(generate, [1], batch=4) == ["1"]
    with pytest.raises(ValueError, match="problems is empty"):
        evaluate.complete(generate, [], batch=4)


@pytest.mark.parametrize("n, c, k", [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (6, 1, 6)])
def test_pass_at_k_equals_the_average_over_all_subsets(n, c, k):
    subsets = list(itertools.combinations(range(n), k))
    exact = np.mean([any(i < c for i in chosen) for chosen in subsets])
    np.testing.assert_allclose(evaluate.pass_at_k(n, c, k=k), exact, rtol=1e-12)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="k=4 with num_samples as low as 3"):
        evaluate.pass_at_k(np.array([8, 3]), np.array([1, 1]), k=4)
