"""Which difference is seen how often, over seeded trials; how looks share the error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdlab.analysis.intervals import compare, of_repeats
from pdlab.analysis.power import POWER, LookSchedule, detectable, repeats_for


@pytest.mark.parametrize("repeats", [3, 5, 12])
@pytest.mark.parametrize("comparisons", [1, 4])
def test_a_detectable_difference_is_detected_that_often(repeats: int, comparisons: int) -> None:
    sd, trials = 0.05, 1000
    ratio = detectable(sd, repeats, 0.95, comparisons)
    rng = np.random.default_rng([51, repeats, comparisons])
    detected = 0
    for first, second in zip(
        ratio * np.exp(rng.normal(0, sd, (trials, repeats))), np.exp(rng.normal(0, sd, (trials, repeats))), strict=True
    ):
        comparison = compare(of_repeats(first.tolist()), of_repeats(second.tolist()), 0.95, comparisons)
        assert comparison
        detected += comparison.verdict == "better"
    assert POWER - 0.04 <= detected / trials <= POWER + 0.04


def test_more_repeats_see_less_and_more_comparisons_see_more() -> None:
    ratios = [detectable(0.05, n, 0.95) for n in (2, 3, 5, 12, 40)]
    assert ratios == sorted(ratios, reverse=True)
    assert detectable(0.05, 3, 0.95, 8) > detectable(0.05, 3, 0.95)
    # One repeat has an assumed scatter: (1.96 + 0.84) * 0.05 * sqrt(2).
    assert detectable(0.05, 1, 0.95) == pytest.approx(math.exp(2.8016 * 0.05 * math.sqrt(2)), rel=1e-4)


def test_the_repeats_for_a_difference_are_the_fewest_that_see_it() -> None:
    needed = repeats_for(1.05, 0.05, 0.95)
    assert needed is not None
    assert detectable(0.05, needed, 0.95) <= 1.05 < detectable(0.05, needed - 1, 0.95)
    assert repeats_for(1.0001, 0.15, 0.95) is None


def test_looks_share_the_error() -> None:
    looks = LookSchedule(first=3, cap=12)
    assert looks.count == 10 and looks.level(0.95) == pytest.approx(0.995)
    assert LookSchedule(first=3, cap=3).level(0.95) == pytest.approx(0.95)
