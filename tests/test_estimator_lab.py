"""The estimator lab: its table says what test_exact.py proves, and bad options are one line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpg import algorithms
from jaxpg.algorithms import exact

EXPERIMENTS = Path(__file__).parents[1] / "experiments" / "studies"
sys.path.insert(0, str(EXPERIMENTS))
import estimator_lab  # noqa: E402


def test_the_table_and_the_picture(tmp_path, monkeypatch, capsys):
    # A few rungs: each costs a compilation, and all of them are measured in test_exact.py.
    whole, shown = estimator_lab.on_policy(2), ("RLOO", "GRPO", "Dr. GRPO", "TD(0), wrong V", "+ wrong V")
    assert set(shown) <= set(whole)
    few = {name: whole[name] for name in shown}
    moved = {name: estimator_lab.off_policy(2)[name] for name in ("RLOO, full ratio, no clip", "GRPO")}
    monkeypatch.setattr(estimator_lab, "on_policy", lambda horizon: few)
    monkeypatch.setattr(estimator_lab, "off_policy", lambda horizon: moved)
    config = estimator_lab.Config(group_size=2, horizon=2, run_dir=tmp_path / "lab")
    estimator_lab.run(estimator_lab.prepare(config))

    on, off = json.loads((config.run_dir / "moments.json").read_text()).values()
    for unbiased in (on["RLOO"], on["+ wrong V"], off["RLOO, full ratio, no clip"]):
        assert unbiased["scale"] == pytest.approx(1.0, abs=1e-9)
        assert unbiased["direction"] == pytest.approx(0.0, abs=1e-9)
    # (G−1)/G of the gradient over a budget of 2 tokens.
    assert on["Dr. GRPO"]["scale"] == pytest.approx(0.25, abs=1e-9)
    assert on["Dr. GRPO"]["snr"] == pytest.approx(on["RLOO"]["snr"], rel=1e-9)
    assert min(on["GRPO"]["direction"], on["TD(0), wrong V"]["direction"], off["GRPO"]["direction"]) > 0.01
    assert (config.run_dir / "bias_variance.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(name in printed for name in shown)


def test_critics_know_the_policy_that_sampled(tmp_path, monkeypatch):
    """In the second table too, where θ has moved away from it."""
    measured = []

    def record(mdp, params, algorithm, group_size, *, sampling_params, values, **_):
        measured.append((np.array_equal(params, sampling_params), values, exact.true_values(mdp, sampling_params)))
        ones = np.ones(mdp.table_shape).reshape(-1)
        return exact.Moments(ones, ones, ones)

    for ladder in ("on_policy", "off_policy"):
        monkeypatch.setattr(estimator_lab, ladder, lambda horizon: {"": (algorithms.trpo(), "true")})
    monkeypatch.setattr(estimator_lab.exact, "moments", record)
    estimator_lab.run(estimator_lab.prepare(estimator_lab.Config(group_size=2, horizon=2, run_dir=tmp_path / "lab")))
    assert [on_policy for on_policy, *_ in measured] == [True, False]
    for _, values, true in measured:
        np.testing.assert_array_equal(values, true)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "1"], "--group-size=1"),
        (["--group-size", "9"], "group_size=9"),
        (["--horizon", "1"], "--horizon=1: must be at least 2"),
        (["--drift", "-1"], "--drift=-1.0"),
        (["--drfit", "1"], "--drfit"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path):
    script = [sys.executable, str(EXPERIMENTS / "estimator_lab.py"), "--run-dir", str(tmp_path / "lab"), *options]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "lab").exists()
