"""What a run leaves behind: metrics, checkpoints, its folder; and evaluation."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.rollout import evaluate
from jaxpg.run import folder as run_folder
from jaxpg.run import metrics
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
