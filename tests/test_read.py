"""Several runs become one curve with its spread, and a gain with its error."""

import pytest

from jaxpg.run import folder as run_folder
from jaxpg.run import read


def test_curves_of_several_seeds_become_a_band():
    band = read.spread([([0, 10, 20], [0.0, 0.5, 1.0]), ([0, 10], [0.5, 1.0])])
    assert band.x == [0, 10] and band.middle.tolist() == [0.25, 0.75]
    assert band.low.tolist() == [0.0, 0.5] and band.high.tolist() == [0.5, 1.0]


def test_gains_are_told_by_seed_and_in_standard_errors(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, after in zip(folders, (0.5, 0.125), strict=True):
        folder.mkdir()
        assert not read.is_finished(folder)
        run_folder.write_json(folder / "summary.json", {"accuracy_before": 0.25, "accuracy_after": after})
        assert read.is_finished(folder)
        run_folder.write_json(folder / "config.json", {"held_out": 64})
    assert read.gains(folders, "accuracy") == ("0.250", "0.312", "+0.250 -0.125")
    variance = (3 / 16 + 1 / 4 + 3 / 16 + 7 / 64) / 64  # p·(1 − p) of 1/4, 1/2, 1/4 and 1/8
    assert read.standard_errors(folders) == pytest.approx(0.125 / variance**0.5)
