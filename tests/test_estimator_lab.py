"""The estimator lab: its table says what test_exact.py proves, and bad options are one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
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
    for exact in (on["RLOO"], on["+ wrong V"], off["RLOO, full ratio, no clip"]):
        assert exact["scale"] == pytest.approx(1.0, abs=1e-9)
        assert exact["direction"] == pytest.approx(0.0, abs=1e-9)
    # (G−1)/G of the gradient over a budget of 2 tokens.
    assert on["Dr. GRPO"]["scale"] == pytest.approx(0.25, abs=1e-9)
    assert on["Dr. GRPO"]["snr"] == pytest.approx(on["RLOO"]["snr"], rel=1e-9)
    assert min(on["GRPO"]["direction"], on["TD(0), wrong V"]["direction"], off["GRPO"]["direction"]) > 0.01
    assert (config.run_dir / "bias_variance.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(name in printed for name in shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "1"], "--group-size=1"),
        (["--group-size", "9"], "group_size=9"),
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
