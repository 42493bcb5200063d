"""Crossovers, normalisation and cost against their definitions, for any curves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import curves as made
from support.curves import most

from pdlab.analysis.crossovers import crossovers
from pdlab.analysis.curves import Curve, Gpus, per_million_tokens
from pdlab.analysis.intervals import Estimate, of_repeats
from pdlab.analysis.ranking import lines_of
from pdlab.analysis.view import View

pytestmark = pytest.mark.property


GPUS = st.integers(1, 64)
RATE = st.floats(1, 1e5)
LEVELS = st.lists(st.tuples(st.floats(1, 1000), st.floats(1, 1e4)), min_size=1, max_size=6)


def curve(levels: list[tuple[float, float]], label: str = "a", gpus: Gpus | None = None) -> Curve:
    """(TPOT in ms, output tokens/s) per level, one repeat."""
    points = [made.point(i, made.sample(output, {"tpot": ms})) for i, (ms, output) in enumerate(levels, start=1)]
    return made.curve(label, *points, gpus=gpus or 8)


@given(GPUS, GPUS, RATE, st.integers(1, 16))
def test_normalised_by_role(prefill: int, decode: int, rate: float, per_node: int) -> None:
    gpus = Gpus(total=prefill + decode, prefill=prefill, decode=decode)
    one = curve([(10, rate)], gpus=gpus)
    shown = {
        role: one.throughput(one.points[0], View(role=role, gpus_per_node=per_node))
        for role in ("all", "prefill", "decode")
    }
    whole = one.throughput(one.points[0], View(normalized=False))
    assert whole == rate
    assert shown["all"] * gpus.total / per_node == pytest.approx(whole)
    assert shown["prefill"] * prefill / per_node == pytest.approx(whole)
    assert shown["decode"] * decode / per_node == pytest.approx(whole)
    # The parts of a deployment are its whole: the reciprocals add up.
    assert 1 / shown["prefill"] + 1 / shown["decode"] == pytest.approx(1 / shown["all"])
    per_gpu = one.throughput(one.points[0], View(gpus_per_node=1))
    assert shown["all"] == pytest.approx(per_gpu * per_node)


@given(GPUS, RATE, st.integers(2, 8))
def test_a_deployment_twice_as_large_with_twice_the_rate_is_the_same_per_node(
    gpus: int, rate: float, times: int
) -> None:
    small, large = (
        curve([(10, rate)], gpus=Gpus(total=gpus)),
        curve([(10, rate * times)], gpus=Gpus(total=gpus * times)),
    )
    view = View()
    assert small.throughput(small.points[0], view) == pytest.approx(large.throughput(large.points[0], view))


@given(st.floats(0.01, 100), GPUS, RATE, st.floats(1.01, 10))
def test_cost(price: float, gpus: int, rate: float, factor: float) -> None:
    cost = per_million_tokens(price, gpus, Estimate(value=rate))
    assert cost.value * rate * 3600 / 1e6 == pytest.approx(price * gpus)
    assert per_million_tokens(price, gpus, Estimate(value=rate * factor)).value == pytest.approx(cost.value / factor)
    assert per_million_tokens(price * factor, gpus, Estimate(value=rate)).value == pytest.approx(cost.value * factor)
    sure = of_repeats([rate, rate * 1.02])
    assert per_million_tokens(price, gpus, sure).relative_error == pytest.approx(sure.relative_error)


@settings(deadline=None)
@given(LEVELS, st.floats(0.5, 2000))
def test_throughput_at_a_bound_is_what_the_straight_lines_reach(
    levels: list[tuple[float, float]], bound: float
) -> None:
    estimate = most(curve(levels), bound, View(gpus_per_node=8))
    fine = levels + [
        (x0 + (x1 - x0) * t, y0 + (y1 - y0) * t)
        for (x0, y0), (x1, y1) in pairwise(levels)
        for t in np.linspace(0, 1, 201)
    ]
    reached = [y for x, y in fine if x <= bound]
    assert (estimate is None) == (not reached)
    if estimate is not None:
        steps = [abs(y1 - y0) / 200 for (_, y0), (_, y1) in pairwise(levels)]
        assert max(reached) <= estimate.value * (1 + 1e-9) <= (max(reached) + max(steps, default=0)) * (1 + 1e-6)


def offered(of: Curve, throughput: float) -> float | None:
    """The lowest latency at which the curve gives at least that, from its straight lines."""
    (line,) = lines_of(of, View())
    reached = -line.mirrored().reach(np.array([-throughput]))[0, 0]
    return None if np.isnan(reached) else float(reached)


@settings(deadline=None, max_examples=40)
@given(st.lists(LEVELS, min_size=2, max_size=4), st.data())
def test_the_best_by_throughput_is_the_lowest_offer(
    curves: list[list[tuple[float, float]]], data: st.DataObject
) -> None:
    labelled_curves = [curve(levels, str(i)) for i, levels in enumerate(curves)]
    crossed = crossovers(labelled_curves, View())
    assert crossed is not None
    lows, highs = [r.low for r in crossed.reigns], [r.high for r in crossed.reigns]
    assert all(low <= high for low, high in zip(lows, highs, strict=True))
    assert lows[1:] == highs[:-1], "no throughput between the first and the last without a best one"
    tops = [max(y for _, y in levels) for levels in curves]
    assert (lows[0], highs[-1]) == (min(min(y for _, y in levels) for levels in curves), max(tops))
    reign = data.draw(st.sampled_from(crossed.reigns))
    # Away from its ends, which are found to a step of the grid.
    at = (reign.low + reign.high) / 2
    if reign.high - reign.low > 0.05 * (highs[-1] - lows[0]):
        offers = {c.label: offer for c in labelled_curves if (offer := offered(c, at)) is not None}
        assert offers[reign.label] == pytest.approx(min(offers.values()), rel=0.25)


def test_the_storys_takeovers_are_found() -> None:
    """Four configurations, each best in its stretch, as planted: they cross at 100, 200 and 300."""
    slopes = [(5.0, 0.05), (7.0, 0.03), (9.0, 0.02), (12.0, 0.01)]
    curves = [
        curve([(a + b * y, y) for y in np.linspace(10, 400, 14).tolist()], label)
        for label, (a, b) in zip(("1:3", "1:2", "1:1", "collocated"), slopes, strict=True)
    ]
    crossed = crossovers(curves, View())
    assert crossed is not None
    assert [reign.label for reign in crossed.reigns] == ["1:3", "1:2", "1:1", "collocated"]
    assert [each.throughput for each in crossed.takeovers] == pytest.approx([100, 200, 300], rel=1e-3)
    assert all(each.kind == "crosses" for each in crossed.takeovers)
    # One repeat: clear where the two are more than 15 % apart on both sides, which the later ones are not.
    assert [each.clear for each in crossed.takeovers] == [True, False, False]


def test_a_crossing_beyond_the_noise_is_clear_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(3)

    def repeated(a: float, b: float, label: str) -> Curve:
        one = curve([(a + b * y, y) for y in (10.0, 100.0, 200.0, 300.0, 400.0)], label)
        points = []
        for point in one.points:
            noise = rng.normal(1, 0.01, 4)
            latency = point.latency_ms["tpot"]["p50"]
            samples = tuple(
                point.samples[0].model_copy(update={"repeat": r, "latency_ms": {"tpot": {"p50": latency * factor}}})
                for r, factor in enumerate(noise.tolist())
            )
            mean = {"tpot": {"p50": latency * float(noise.mean())}}
            points.append(point.model_copy(update={"samples": samples, "latency_ms": mean}))
        return one.model_copy(update={"points": tuple(points)})

    crossed = crossovers([repeated(5, 0.05, "steep"), repeated(10, 0.025, "flat")], View())
    assert crossed is not None
    (change,) = crossed.takeovers
    assert (change.before, change.after, change.kind, change.clear) == ("steep", "flat", "crosses", True)
    assert change.low is not None and change.high is not None
    assert change.low < 200 < change.high
    assert change.high - change.low < 100


def test_a_curve_that_ends_is_marked() -> None:
    crossed = crossovers([curve([(5, 10), (6, 100)], "small"), curve([(7, 10), (9, 300)], "large")], View())
    assert crossed is not None
    (change,) = crossed.takeovers
    assert (change.kind, change.throughput, change.after) == ("ends", 100, "large")


def test_one_curve_is_nothing_to_compare() -> None:
    assert crossovers([curve([(5, 10)])], View()) is None
