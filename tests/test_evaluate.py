"""The interval of a measured accuracy."""

import math

import numpy as np
import pytest

from jaxpg.rollout import evaluate


@pytest.mark.parametrize(
    ("mean", "n", "low", "high"),
    [  # Newcombe 1998, table I, method 3
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0 / 20, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(mean, n, low, high):
    assert evaluate.interval(mean, n) == pytest.approx((low, high), abs=6e-5)


def test_the_interval_is_symmetric_lies_in_0_and_1_and_shrinks():
    for mean in np.linspace(0, 1, 11):
        low, high = evaluate.interval(mean, 50)
        mirrored_high, mirrored_low = (1 - bound for bound in evaluate.interval(1 - mean, 50))
        assert (mirrored_low, mirrored_high) == pytest.approx((low, high))
        assert 0 <= low <= mean <= high <= 1
        narrow = evaluate.interval(mean, 5000)
        assert narrow[1] - narrow[0] < high - low


def test_the_interval_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(0)
    for p in (0.1, 0.5):
        bounds = [evaluate.interval(x / 128, 128) for x in rng.binomial(128, p, size=4000)]
        assert 0.93 < np.mean([low <= p <= high for low, high in bounds]) < 0.97


@pytest.mark.parametrize(("mean", "n"), [(0.5, 0), (math.nan, 0), (math.nan, 5), (1.5, 5), (-0.1, 5)])
def test_there_is_no_interval_of_nothing_or_of_what_is_no_share(mean, n):
    assert all(math.isnan(bound) for bound in evaluate.interval(mean, n))
