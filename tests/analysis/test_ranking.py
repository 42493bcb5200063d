"""Figures read off a curve, and the verdict on them, over seeded trials with a known truth."""

from __future__ import annotations

import numpy as np
import pytest
from support import curves as made
from support.curves import most, read

from pdlab.analysis.curves import Curve, Point, in_one_study
from pdlab.analysis.intervals import Array, Estimate
from pdlab.analysis.ranking import LabelledEstimate, OpenEnd, frontier_points, frontiers, rank, throughput_within
from pdlab.analysis.shrinkage import moderate_all
from pdlab.analysis.view import View
from pdlab.core.bounds import parse_bounds

TRIALS = 200
LEAST = 183  # of 200 at 95 %: see test_statistics.py
LOADS = (4, 8, 16)
LATENCY_MS, OUTPUT_PER_S = np.array([10.0, 12.0, 18.0]), np.array([400.0, 700.0, 1000.0])


def curve(latency_ms: Array, output_per_s: Array, label: str = "a", gpus: int = 8) -> Curve:
    """(repeats, levels) of TPOT and of output tokens/s."""
    levels = zip(LOADS, latency_ms.T.tolist(), output_per_s.T.tolist(), strict=True)
    points = (
        made.point(load, *(made.sample(y, {"tpot": x}, r) for r, (x, y) in enumerate(zip(xs, ys, strict=True))))
        for load, xs, ys in levels
    )
    return made.curve(label, *points, gpus=gpus)


def measured(
    rng: np.random.Generator, repeats: int, better: float = 1.0, label: str = "a", noise: float = 1.0
) -> Curve:
    """Each repeat has a part in common over its levels (3 %) and a part of each level (2 %), on both axes."""
    common = rng.normal(0, 0.03, (repeats, 1, 2))
    own = rng.normal(0, 0.02, (repeats, 3, 2))
    factor = 1 + noise * (common + own)
    return curve(LATENCY_MS * factor[..., 0], OUTPUT_PER_S * better * factor[..., 1], label)


def test_throughput_at_a_bound_is_covered_at_the_stated_rate() -> None:
    rng = np.random.default_rng(21)
    covered = 0
    for _ in range(TRIALS):
        covered += _covers(measured(rng, 3))
    assert covered >= LEAST


@pytest.mark.parametrize(
    ("noise", "least"), [((1,) * 6, LEAST - 2), ((0.5, 0.7, 1, 1, 1.4, 2), 174)], ids=["alike", "unlike"]
)
def test_moderated_scatter_covers_too(noise: tuple[float, ...], least: int) -> None:
    """Six configurations of one study. Where their noise differs by up to four times the rate holds on
    average over them, and is a few per cent less for the noisiest."""
    rng = np.random.default_rng(27)
    covered = [0] * len(noise)
    for _ in range(TRIALS):
        curves = [measured(rng, 3, label=str(i), noise=factor) for i, factor in enumerate(noise)]
        for i, estimate in enumerate(moderate_all([most(curve, 15.0) for curve in curves])):
            covered[i] += _holds(estimate)
    assert sum(covered) / len(noise) >= LEAST, covered
    assert min(covered) >= least, covered


def test_few_configurations_are_not_moderated() -> None:
    rng = np.random.default_rng(30)
    few = [most(measured(rng, 3, label=str(i)), 15.0) for i in range(4)]
    assert moderate_all(few) == few


@pytest.mark.parametrize(("noise", "least"), [((1, 1, 1), LEAST), ((0.5, 1, 2), 174)], ids=["alike", "unlike"])
def test_moderated_scatter_of_a_level_covers_too(noise: tuple[float, ...], least: int) -> None:
    rng = np.random.default_rng(29)
    covered = [0, 0, 0]
    for _ in range(TRIALS):
        curves = in_one_study(measured(rng, 3, label=str(i), noise=factor) for i, factor in enumerate(noise))
        for i, curve in enumerate(curves):
            interval = curve.points[1].rate_estimate("output").interval(0.95)
            assert interval is not None
            covered[i] += interval.holds(700.0)
    assert sum(covered) / 3 >= LEAST, covered
    assert min(covered) >= least, covered


def _covers(of: Curve) -> bool:
    return _holds(most(of, 15.0))


def _holds(estimate: Estimate | None) -> bool:
    assert estimate is not None
    interval = estimate.interval(0.95)
    assert interval is not None
    return interval.holds(850.0)  # halfway between the levels at 12 and at 18 ms


def test_moderation_narrows_what_chance_made_wide() -> None:
    rng = np.random.default_rng(28)
    alone = [measured(rng, 3, label=str(i)) for i in range(5)]
    together = in_one_study(alone)

    def widths(curves: tuple[Curve, ...] | list[Curve]) -> Array:
        intervals = [p.rate_estimate("output").interval(0.95) for c in curves for p in c.points]
        return np.array([interval.high / interval.low - 1 for interval in intervals if interval])

    assert np.median(widths(together)) < 0.7 * np.median(widths(alone))
    assert np.std(widths(together)) < 0.5 * np.std(widths(alone))


@pytest.mark.parametrize("moderated", [False, True])
def test_no_winner_among_equals(moderated: bool) -> None:
    """Four times the same configuration: one is named best by chance in at most 5 % of the trials."""
    rng = np.random.default_rng(22)
    named = 0
    for _ in range(TRIALS):
        curves = [measured(rng, 3, label=str(i)) for i in range(4)]
        bounds_ranking = read(in_one_study(curves) if moderated else curves, 15.0)
        named += len(bounds_ranking.tied) == 1
    assert named <= TRIALS - LEAST


def test_a_winner_by_a_clear_margin_is_named() -> None:
    rng = np.random.default_rng(23)
    named = 0
    for _ in range(TRIALS):
        bounds_ranking = read(in_one_study([measured(rng, 3), measured(rng, 3, better=1.4, label="b")]), 15.0)
        named += bounds_ranking.tied == ("b",)
        assert not bounds_ranking.single_repeat
    assert named > 0.9 * TRIALS


def test_a_single_repeat_is_compared_on_an_assumed_scatter() -> None:
    one = curve(LATENCY_MS[None], OUTPUT_PER_S[None])
    close, far = (curve(LATENCY_MS[None], OUTPUT_PER_S[None] * factor, "b") for factor in (1.12, 1.5))
    near, apart = read([one, close], 13.0), read([one, far], 13.0)
    assert (near.single_repeat, near.tied, apart.tied) == (True, ("b", "a"), ("b",))


def test_a_bound_on_ttft_makes_a_single_repeat_less_certain_than_one_on_tpot() -> None:
    """The same steep curve, its latency once as TTFT and once as TPOT: 8.5 % of scatter against 5.0 %."""
    levels = list(zip(LOADS, (100.0, 130.0, 160.0), (200, 700, 1200), strict=True))
    errors = []
    for metric in ("ttft", "tpot"):
        one = made.curve("a", *(made.point(load, made.sample(y, {metric: x})) for load, x, y in levels))
        found = throughput_within(one, one.points, parse_bounds(f"{metric}_ms=130", "p50"), View())
        assert found and found.estimate.relative_error
        errors.append(found.estimate.relative_error)
    assert 1.4 < errors[0] / errors[1] < 1.8


def test_a_bound_at_the_edge_of_the_measurement_is_no_basis_for_a_verdict() -> None:
    """Half of the draws do not reach the lowest latency measured."""
    rng = np.random.default_rng(24)
    estimate = most(measured(rng, 3), 10.2)
    assert estimate is None or estimate.standard_error is not None
    low = measured(rng, 3)
    edge = most(low, low.points[0].ms("tpot", "p50") or 0.0)
    assert edge is not None and edge.edge
    sure = Estimate(value=edge.value / 2, standard_error=0.01 * edge.value, dof=2.0, basis="repeats")
    at_edge, slower, faster = (
        LabelledEstimate(label, estimate) for label, estimate in (("edge", edge), ("b", sure), ("b", sure.scaled(10)))
    )
    first, second = [at_edge, slower], [faster, at_edge]
    assert rank(first, 0.95)[1].tied, "another start of the first might not reach the bound"
    assert not rank(second, 0.95)[1].tied, "what may not reach the bound at all is no better for it"


def test_one_repeat_carries_the_scatter_of_latencies_into_what_is_read_at_a_latency() -> None:
    """Where a curve is steep, a start with other latencies gives another throughput at the same bound."""
    levels = np.linspace(0.0, 1.0, len(LOADS))[None]
    steep, flat = (curve(10 + levels * wide, 100 + 300 * levels) for wide in (2.0, 50.0))
    errors = []
    for each, bound in ((steep, 11.0), (flat, 35.0)):
        estimate = most(each, bound)
        assert estimate is not None and estimate.relative_error is not None
        errors.append(estimate.relative_error)
    assert errors[0] > 2 * errors[1] > 0.08


def test_the_frontier_has_how_often_a_point_is_on_it() -> None:
    rng = np.random.default_rng(25)
    alone = frontier_points([measured(rng, 3)], View())
    assert all(each.on_it for each in alone)
    assert min(each.share or 0 for each in alone) > 0.9
    beaten = frontier_points([measured(rng, 3), measured(rng, 3, better=0.5, label="b")], View())
    assert {each.drawn.curve.label: each.on_it for each in beaten if each.drawn.point.value == 8} == {
        "a": True,
        "b": False,
    }
    assert (
        max(each.share or 0 for each in beaten if each.drawn.curve.label == "b" and each.drawn.point.value > 4) < 0.01
    )
    single = frontier_points([curve(LATENCY_MS[None], OUTPUT_PER_S[None])], View())
    assert [each.share for each in single] == [None] * 3


def test_closed_and_open_loops_have_frontiers_of_their_own() -> None:
    rng = np.random.default_rng(28)
    closed, worse = measured(rng, 3), measured(rng, 3, better=0.5, label="b")
    by_rate = worse.model_copy(
        update={"points": tuple(point.model_copy(update={"kind": "rate"}) for point in worse.points)}
    )
    best = {kind: [drawn.curve.label for drawn in points] for kind, points in frontiers([closed, by_rate], View())}
    assert best == {"concurrency": ["a"] * 3, "rate": ["b"] * 3}
    both = frontier_points([closed, by_rate], View())
    assert all(each.on_it and (each.share or 0) > 0.9 for each in both) and len(both) == 6


def test_a_curve_that_does_not_scatter_stands_beside_one_that_does() -> None:
    rng = np.random.default_rng(29)
    points = frontier_points([measured(rng, 3), measured(rng, 3, better=0.5, label="b", noise=0.0)], View())
    assert [each.on_it for each in points[:3]] == [True] * 3 and min(each.share or 0 for each in points[:3]) > 0.9
    assert [(each.on_it, each.share) for each in points[4:]] == [(False, 0.0)] * 2


def test_identical_points_are_both_on_the_frontier() -> None:
    rng = np.random.default_rng(26)
    twice = [measured(rng, 3)] * 2
    assert [each.on_it for each in frontier_points(twice, View())] == [True] * 6


def test_a_ceiling_below_what_was_measured_decides_nothing() -> None:
    """Their measured figures are not distinguishable, although the second serves far less at a higher rate."""
    noisy = Estimate(100.0, 15.0, 20.0, "repeats")
    ends = {"b": OpenEnd(beyond="invalid", ceiling=Estimate(30.0, 1.0, 20.0, "repeats"))}

    def second(value: float) -> bool:
        estimates = [LabelledEstimate("a", noisy), LabelledEstimate("b", noisy._replace(value=value))]
        return rank(estimates, 0.95, ends=ends)[1].tied

    assert second(99.0)
    assert not second(30.0), "both are far below the first"


def test_the_ceiling_is_the_most_that_a_queue_was_served_at() -> None:
    def level(rate: float, output_per_s: float, **more: bool) -> Point:
        return made.point(rate, made.sample(output_per_s, {"tpot": 5.0}), kind="rate", **more)

    over = [
        level(rate, served, valid=False, above_capacity=True) for rate, served in ((2, 60.0), (4, 130.0), (8, 90.0))
    ]
    one = made.curve("a", level(1, 100.0), *over)
    found = throughput_within(one, one.points, made.within(10.0), View(normalized=False))
    assert found and found.end and found.end.ceiling and found.end.ceiling.value == 130.0


def test_a_curve_without_a_valid_level_is_named() -> None:
    rng = np.random.default_rng(31)
    invalid = measured(rng, 3, label="c")
    points = tuple(point.model_copy(update={"valid": False}) for point in invalid.points)
    curves = [measured(rng, 3), measured(rng, 3, better=0.5, label="b"), invalid.model_copy(update={"points": points})]
    bounds_ranking = read(curves, 15.0)
    assert (bounds_ranking.tied, bounds_ranking.unknown, bounds_ranking.invalid) == (("a",), (), ("c",))
    (sentence,) = made.sentences(curves, made.within(15.0), View())
    assert "not known for c (no valid level)" in sentence


@pytest.mark.parametrize(("kind", "named"), [("replay", True), ("rate", False)])
def test_a_replay_has_no_higher_load(kind: str, named: bool) -> None:
    """Both are within the bounds at their only load."""
    curves = [
        made.curve(
            label,
            made.point(1, *(made.sample(rate + repeat, {"tpot": 5.0}, repeat) for repeat in range(3)), kind=kind),
        )
        for label, rate in (("a", 100.0), ("b", 200.0))
    ]
    bounds_ranking = read(curves, 10.0)
    assert (bounds_ranking.tied == ("b",)) is named
    assert [ranked.end is None for ranked in bounds_ranking.ranking] == [named] * 2
