"""Means over repeats, normalisation by role, latency modes, and what may be macro of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError
from support import records as made
from support.curves import read, sentences, within
from support.validity import failing

from pdlab.analysis import ranking
from pdlab.analysis.comparable import incomparable
from pdlab.analysis.crossovers import group_crossovers
from pdlab.analysis.curves import Curve, Gpus, curves, gpus_of, level_costs, short_labels
from pdlab.analysis.view import View
from pdlab.core import text as core_text
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import StoreError
from pdlab.core.findings import Finding, found
from pdlab.core.lengths import Uniform
from pdlab.core.nodes import Placement
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.rendering import macro
from pdlab.core.workload import Closed, Load, Open, Ramp, Workload
from pdlab.report import sections, tables, verdicts
from pdlab.report.style import styles
from pdlab.results.schema import Distribution, Experiment, Manifest, Run, Summary, Validity

WORKLOAD = Workload(input_tokens=100, output_tokens=10)


def summary(rps: float, tpot_ms: float | None, ttft_ms: float = 100.0) -> Summary:
    def dist(ms: float | None) -> Distribution | None:
        return None if ms is None else Distribution(mean_s=ms / 500, percentiles_s={"p50": ms / 1000, "p99": ms / 250})

    return Summary(
        duration_s=10,
        completed=1000,
        requests_per_s=rps,
        input_tokens_per_s=rps * 100,
        output_tokens_per_s=rps * 10,
        ttft=dist(ttft_ms),
        tpot=dist(tpot_ms),
    )


def run(
    load: Load,
    rps: float,
    tpot_ms: float | None,
    *,
    repeat: int = 0,
    steady: Summary | None = None,
    reasons: tuple[str, ...] = (),
    **more: Any,
) -> Run:
    figures = summary(rps, tpot_ms, **more)
    return made.run(
        (), load, repeat=repeat, count=100, workload=WORKLOAD, whole=figures, steady=steady, validity=failing(*reasons)
    )


def closed(concurrency: int, rps: float, tpot_ms: float | None, **more: Any) -> Run:
    return run(Closed(concurrency=concurrency), rps, tpot_ms, **more)


def experiment(label: str, *runs: Run, name: str | None = None, **manifest: Any) -> Experiment:
    deployment = Deployment(topology=parse_label(label))
    return Experiment(
        name=name or label,
        manifest=Manifest(origin="measured", label=label, deployment=deployment, **manifest),
        runs=runs,
    )


def one(*runs: Run, label: str = "collocated-4xtp1") -> Curve:
    return curves([experiment(label, *runs)])[0]


def test_repeats_are_averaged_and_their_noise_is_kept() -> None:
    (point,) = one(closed(4, 1.0, 10), closed(4, 1.2, 12, repeat=1)).points
    assert (point.repeats, point.valid, point.window) == (2, True, "whole")
    assert point.requests_per_s == pytest.approx(1.1)
    assert point.ms("tpot", "p50") == pytest.approx(11)
    assert point.ms("tpot", "mean") == pytest.approx(22)
    assert point.ms("tpot", "p95") is None
    requests = point.rate_estimate("requests")
    assert (requests.value, requests.dof, requests.basis) == (pytest.approx(1.1), 1, "repeats")
    assert requests.standard_error == pytest.approx(0.1)  # s = 0.2 / sqrt 2, over sqrt 2
    tpot, ttft = point.ms_estimate("tpot", "p50"), point.ms_estimate("ttft", "p50")
    assert tpot and ttft and (tpot.standard_error, ttft.standard_error) == pytest.approx((1, 0))
    interactivity = point.latency_estimate(View(use_interactivity=True))
    assert interactivity and interactivity.value == pytest.approx(1000 / 11)
    assert interactivity.standard_error == pytest.approx((100 - 1000 / 12) / 2)


def test_invalid_repeats_are_left_out_and_invalid_levels_kept() -> None:
    curve = one(
        closed(4, 1.0, 10),
        closed(4, 9.0, 90, repeat=1, reasons=("one failed",)),
        closed(8, 2.0, 20, reasons=("client saturated",)),
    )
    mixed, bad = curve.points
    assert (mixed.valid, mixed.repeats, mixed.excluded, mixed.requests_per_s) == (True, 1, 1, 1.0)
    assert mixed.reasons == ("one failed",)
    assert (bad.valid, bad.requests_per_s, bad.reasons) == (False, 2.0, ("client saturated",))
    notes = macro(tables.TABLES, "invalid", [curve], True).splitlines()
    assert "1 of 2 repeats left out: one failed" in notes[0]
    assert "not valid: client saturated" in notes[1]


def test_a_level_uses_one_window_only() -> None:
    both = one(
        closed(4, 1, 10, steady=summary(3, 30)),
        closed(4, 1, 10, repeat=1, steady=summary(5, 30)),
    ).points[0]
    assert (both.window, both.requests_per_s) == ("steady", 4)
    half = one(closed(4, 1, 10, steady=summary(3, 30)), closed(4, 2, 10, repeat=1)).points[0]
    assert (half.window, half.requests_per_s) == ("whole", 1.5)


def test_latency_modes() -> None:
    point = one(closed(4, 1, 10, ttft_ms=200)).points[0]
    assert point.latency(View()) == pytest.approx(10)
    assert point.latency(View(latency_mode="first_token")) == pytest.approx(200)
    assert point.latency(View(latency_mode="chunk", chunk_size=16)) == pytest.approx(15 * 10 + 200)
    assert point.latency(View(latency_mode="chunk", chunk_size=1)) == pytest.approx(200)
    assert point.latency(View(use_interactivity=True)) == pytest.approx(100)
    assert point.latency(View(statistic="p99")) == pytest.approx(40)
    assert point.latency(View(statistic="p90")) is None
    with pytest.raises(ValidationError, match="interactivity is 1000/TPOT"):
        View(latency_mode="chunk", use_interactivity=True)


def test_throughput_metrics_and_normalisation() -> None:
    curve = one(closed(4, 2, 10), label="pd-pack-p1xtp1-d3xtp1")
    point = curve.points[0]
    assert curve.throughput(point, View(normalized=False)) == 20
    assert curve.throughput(point, View(normalized=False, throughput_metric="input")) == 200
    assert curve.throughput(point, View(normalized=False, throughput_metric="total")) == 220
    assert curve.throughput(point, View()) == 40
    assert curve.throughput(point, View(gpus_per_node=1)) == 5


def test_gpus_by_role() -> None:
    pd = gpus_of(experiment("pd-spread-p2xtp2-d1xtp4"))
    assert (pd.total, pd.prefill, pd.decode, pd.unit) == (8, 4, 4, "GPU")
    collocated = gpus_of(experiment("collocated-2xtp4pp2"))
    assert (collocated.total, collocated.prefill, collocated.decode) == (16, None, None)
    cpu = gpus_of(experiment("collocated-2xtp1", placement=Placement(device="cpu", replicas=())))
    assert cpu.unit == "engine rank"
    assert gpus_of(experiment("collocated-2xtp1", local=True)).unit == "engine rank"
    unknown = Experiment(name="x", manifest=Manifest(origin="imported", label="x"), runs=())
    with pytest.raises(StoreError, match="--gpus x=N"):
        gpus_of(unknown)


def test_units_are_printed() -> None:
    gpu = one(closed(4, 1, 10))
    cpu = gpu.model_copy(update={"gpus": Gpus(total=2, device="cpu")})
    assert tables.node_name([gpu], View()) == "node (8 GPUs)"
    assert tables.node_name([cpu], View()) == "8 engine ranks"
    assert tables.node_name([cpu], View(gpus_per_node=1)) == "1 engine rank"
    assert tables.node_name([gpu], View(normalized=False)) == "whole deployment"
    assert any("are not compared" in note for note in tables.notes([gpu, cpu], View()))


def test_labels_are_short_and_unique() -> None:
    same = "pd-spread-p1xtp4-d1xtp4"
    other = closed(4, 1, 10).model_copy(update={"workload": Workload(input_tokens=7, output_tokens=3)})
    assert short_labels([experiment(same), experiment("collocated-4xtp2")]) == [
        "P1xTP4 D1xTP4 spread",
        "4xTP2 collocated",
    ]
    by_name = [experiment(same, name="run-srd"), experiment(same, name="run-tcp")]
    assert short_labels(by_name) == ["P1xTP4 D1xTP4 spread (srd)", "P1xTP4 D1xTP4 spread (tcp)"]
    by_workload = [experiment(same, closed(4, 1, 10)), experiment(same, other)]
    assert short_labels(by_workload) == ["P1xTP4 D1xTP4 spread (100:10)", "P1xTP4 D1xTP4 spread (7:3)"]
    assert len(set(short_labels([experiment(same)] * 3))) == 3


def test_other_distributions_of_lengths_are_other_workloads() -> None:
    spread = Workload(input_tokens=100, output_tokens=10, lengths=Uniform(low=0.8, high=1))
    other = closed(4, 1, 10).model_copy(update={"workload": spread})
    label = "collocated-4xtp1"
    drawn = curves([experiment(label, closed(4, 1, 10), name="a"), experiment(label, other, name="b")])
    assert [curve.workload for curve in drawn] == ["100:10", "100:10 uniform 0.8-1.0"]
    assert "different workloads (100:10 and 100:10 uniform 0.8-1.0" in (incomparable(drawn, View()) or "")


def test_rehearsed_curves_are_marked_and_are_compared_with_no_others() -> None:
    label = "collocated-4xtp1"
    measured, other = experiment(label, closed(4, 1, 10), name="a"), experiment(label, closed(4, 1, 10), name="b")
    manifest = other.manifest.model_copy(update={"origin": "simulated", "rehearsal": Rehearsal(slow_down=4)})
    rehearsed = other.model_copy(update={"manifest": manifest})
    drawn = curves([measured, rehearsed])
    assert [curve.label for curve in drawn] == ["4xTP1 collocated", "4xTP1 collocated rehearsed"]
    assert "rehearsed with simulated engines and some were not" in (incomparable(drawn, View()) or "")
    assert any("Rehearsed, not measured" in line for line in tables.notes(drawn, View()))
    alone = curves([rehearsed])
    assert incomparable(alone, View()) is None
    assert [style.hollow for style in styles(drawn)] == [False, True]
    assert len({style.family for style in styles(drawn)}) == 2


def test_concurrency_and_rate_are_never_one_line() -> None:
    curve = one(run(Open(rate_rps=4), 4, 10), closed(4, 1, 10), closed(16, 3, 20))
    assert {kind: [p.value for p in line] for kind, line in curve.lines().items()} == {
        "concurrency": [4, 16],
        "rate": [4],
    }


def test_of_several_looks_in_one_start_the_longest_stands_for_it() -> None:
    short, long = run(Open(rate_rps=4), 4, 10), run(Open(rate_rps=4), 5, 12)
    long = long.model_copy(update={"key": long.key.model_copy(update={"look": 1}), "num_requests": 900})
    other = run(Open(rate_rps=4), 7, 10, repeat=1)
    for runs in ((short, long, other), (other, long, short)):
        (level,) = one(*runs).points
        assert level.repeats == 2 and level.requests_per_s == 6


def test_frontier_is_over_all_valid_points() -> None:
    fast = experiment("collocated-8xtp1", closed(4, 1, 5), closed(8, 2, 9))
    slow = experiment("collocated-4xtp2", closed(4, 1.5, 6), closed(8, 2.5, 20), closed(16, 9, 7, reasons=("bad",)))
    ((_, points),) = ranking.frontiers(curves([fast, slow]), View())
    assert [(drawn.x, drawn.y) for drawn in points] == [(5, 10), (6, 15), (9, 20), (20, 25)]
    ((_, by_interactivity),) = ranking.frontiers(curves([fast, slow]), View(use_interactivity=True))
    assert {id(s.point) for s in by_interactivity} and [s.y for s in by_interactivity] == [25, 20, 15, 10]


def test_every_bound_holds_between_levels_too() -> None:
    curve = one(closed(4, 1, 10, ttft_ms=100), closed(8, 2, 20, ttft_ms=500), label="collocated-8xtp1")

    def throughput_at(tpot_ms: float, ttft_ms: float) -> float | None:
        found = ranking.throughput_within(curve, curve.points, within(tpot_ms, ttft_ms), View())
        return found and found.estimate.value

    assert throughput_at(15, 1000) == pytest.approx(15)
    assert throughput_at(15, 200) == pytest.approx(12.5), "TTFT is met on the first quarter of the way"
    assert throughput_at(99, 99) is None
    assert throughput_at(9, 1000) is None


def sentence(pair: Sequence[Curve], tpot_ms: float = 14.0, ttft_ms: float | None = 1000.0) -> str:
    (text,) = sentences(pair, within(tpot_ms, ttft_ms), View())
    return text


def verdict(first: list[Run], second: list[Run]) -> str:
    return sentence(curves([experiment("collocated-8xtp1", *first), experiment("collocated-4xtp2", *second)]))


def test_a_clear_winner_is_named() -> None:
    text = verdict([closed(4, 1, 10), closed(8, 2, 20)], [closed(4, 2, 10), closed(8, 4, 20)])
    assert text.startswith(
        "At TPOT p50 <= 14 ms and TTFT p50 <= 1,000 ms the best is 4xTP2 collocated with about 28 output tokens/s per "
        "node (8 GPUs)"
    )
    assert "100 % above 8xTP1 collocated" in text
    assert "one repeat: differences below 19 % are not meaningful" in text


def test_no_winner_is_named_while_ttft_is_unbounded() -> None:
    pair = curves(
        [
            experiment("collocated-8xtp1", closed(4, 1, 10), closed(8, 2, 20)),
            experiment("collocated-4xtp2", closed(4, 2, 10), closed(8, 4, 20)),
        ]
    )
    text = sentence(pair, ttft_ms=None)
    assert (
        "no winner is named while TTFT is unbounded: bound it too, for example --at tpot_p50_ms=14,ttft_p95_ms" in text
    )
    assert "4xTP2 collocated 28 and 8xTP1 collocated 14" in text and "the best is" not in text


def test_no_winner_within_what_one_repeat_shows() -> None:
    text = verdict([closed(4, 1, 10), closed(8, 2, 20)], [closed(4, 1.05, 10), closed(8, 2.1, 20)])
    assert "no winner can be named" in text
    assert "the best is" not in text


def test_no_winner_within_what_repeats_show() -> None:
    def levels(rps: float) -> list[Run]:
        return [
            closed(load, rps * (0.9 + 0.1 * r), tpot_ms, repeat=r)
            for load, tpot_ms in ((4, 10), (8, 60))
            for r in range(3)
        ]

    assert "no winner can be named" in verdict(levels(1.0), levels(1.2))
    text = verdict(levels(1.0), levels(2.0))
    assert "the best is 4xTP2" in text
    assert "100 % above 8xTP1 collocated (95 % interval of the lead over 8xTP1 collocated: 60 to 150 %)" in text


QUICK = [closed(4, 4, 10, repeat=r) for r in range(3)] + [closed(16, 16, 60, repeat=r) for r in range(3)]
SLOW = [closed(4, 1 + 0.01 * r, 10, repeat=r) for r in range(3)]


@pytest.mark.parametrize(
    ("higher", "why"),
    [
        ([], "its higher loads were not measured"),
        ([closed(16, 9, 60, repeat=r, reasons=("bad",)) for r in range(3)], "its higher loads are not valid"),
        ([closed(16, 9, None, repeat=r) for r in range(3)], "its higher loads lack a bounded figure"),
    ],
)
def test_a_loser_whose_highest_valid_load_is_within_the_bounds_may_not_lose(higher: list[Run], why: str) -> None:
    text = verdict([*SLOW, *higher], QUICK)
    assert text.endswith(
        "no winner can be named: 4xTP2 collocated gives about 49.6 output tokens/s per node (8 GPUs); "
        f"8xTP1 collocated gives at least 10.1 ({why})."
    )
    (answer,) = ranking.bounds_rankings(
        curves([experiment("collocated-8xtp1", *SLOW, *higher), experiment("collocated-4xtp2", *QUICK)]),
        within(14.0, 1000.0),
        View(),
    )
    assert answer.tied == ("4xTP2 collocated", "8xTP1 collocated")


@pytest.mark.parametrize("known", [False, True])
def test_no_level_is_the_cheapest_where_another_deployment_might_cost_less(known: bool) -> None:
    slow = [*SLOW, *(closed(8, 1.1, 60, repeat=r) for r in range(3) if known)]
    pair = curves([experiment("collocated-8xtp1", *slow), experiment("collocated-4xtp2", *QUICK)])
    bounds = within(14.0, 1000.0)
    text = sections.cost_section(level_costs(pair, 2.0), pair, View(), 2.0, [bounds]).text
    stars = [line for line in text.splitlines() if line.endswith("*")]
    refused = f"No * at {bounds.label}: 8xTP1 collocated might cost less, its higher loads were not measured." in text
    assert (len(stars), refused) == ((1, False) if known else (0, True))


def test_each_kind_of_load_has_its_cheapest_level_and_a_ramp_has_none() -> None:
    """The open loop costs less than the closed one, and the ramp costs less than both."""
    sweeps = {
        "collocated-8xtp1": [run(Closed(concurrency=n), rps, ms) for n, rps, ms in ((4, 1, 10), (8, 2, 60))],
        "collocated-4xtp2": [run(Open(rate_rps=r), r, ms) for r, ms in ((3, 9), (4, 10), (9, 60))],
        "collocated-2xtp4": [run(Ramp(start_rps=1, end_rps=9), 5, 10)],
    }
    each = curves([experiment(label, *runs) for label, runs in sweeps.items()])
    text = sections.cost_section(level_costs(each, 2.0), each, View(), 2.0, [within(14.0, 1000.0)]).text
    stars = [line.split()[:3] for line in text.splitlines() if line.endswith("*")]
    assert stars == [["8xTP1", "collocated", "4"], ["4xTP2", "collocated", "4/s"]]
    assert "within the bounds, for each kind of load by itself)" in text and "to 9/s" in text


def test_a_deployment_that_might_cost_less_takes_the_mark_of_its_kind_of_load_alone() -> None:
    rates = [run(Open(rate_rps=r), r, ms) for r, ms in ((4, 10), (9, 60))]
    each = curves(
        [
            experiment("collocated-8xtp1", *SLOW),
            experiment("collocated-4xtp2", *QUICK),
            experiment("collocated-2xtp4", *rates),
        ]
    )
    bounds = within(14.0, 1000.0)
    text = sections.cost_section(level_costs(each, 2.0), each, View(), 2.0, [bounds]).text
    assert [line.split()[:3] for line in text.splitlines() if line.endswith("*")] == [["2xTP4", "collocated", "4/s"]]
    assert f"\nNo * at {bounds.label} (closed loop): 8xTP1 collocated might cost less, its higher loads" in text


def test_the_best_by_throughput_says_where_another_was_not_measured() -> None:
    pair = curves([experiment("collocated-8xtp1", *SLOW), experiment("collocated-4xtp2", *QUICK)])
    (found,) = group_crossovers(pair, View())
    assert [(each.label, each.throughput) for each in found.crossovers.ends] == [
        ("8xTP1 collocated", pytest.approx(10.1))
    ]
    assert sections.crossover_section(found, View()).text.endswith("No valid level above: 8xTP1 collocated 10.1")


def test_a_loser_that_misses_at_its_highest_load_only_by_the_noise_may_not_lose() -> None:
    def higher(*tpot_ms: float) -> list[Run]:
        return [closed(8, 1.1, each, repeat=r) for r, each in enumerate(tpot_ms)]

    assert "8xTP1 collocated gives at least" in verdict([*SLOW, *higher(10, 20, 14)], QUICK)
    assert "the best is 4xTP2 collocated" in verdict([*SLOW, *higher(19, 20, 21)], QUICK)


def test_a_winner_may_give_more_than_was_measured() -> None:
    text = verdict([*SLOW, *(closed(8, 1.1, 60, repeat=r) for r in range(3))], QUICK[:3])
    assert "the best is 4xTP2 collocated with about 40" in text
    assert text.endswith("; 4xTP2 collocated might give more: its higher loads were not measured.")


def test_a_rate_above_the_capacity_limits_what_a_loser_may_give() -> None:
    """Its queue grows, and the client is fine: no rate serves more than it."""

    def rates(label: str, served: float, last: Run | None = None) -> Experiment:
        lasts = (
            []
            if last is None
            else [last.model_copy(update={"key": last.key.model_copy(update={"repeat": r})}) for r in range(3)]
        )
        return experiment(label, *(run(Open(rate_rps=served), served, 10, repeat=r) for r in range(3)), *lasts)

    def over(served: float, *codes: Finding) -> Run:
        return run(Open(rate_rps=9), served, 60).model_copy(update={"validity": Validity(findings=codes)})

    grows = found("in_flight_grows", growth=20.0, arrivals=90)
    late = found("sent_late", late_ms=60.0, when="", limit="50 ms")
    best = rates("collocated-4xtp2", 4.0, over(4.5, grows))

    def text(loser: Experiment) -> str:
        return sentence(curves([loser, best]))

    assert "the best is 4xTP2 collocated" in text(rates("collocated-8xtp1", 1.0, over(1.5, grows)))
    assert "8xTP1 collocated gives at least 10" in text(rates("collocated-8xtp1", 1.0, over(5.0, grows)))
    assert "8xTP1 collocated gives at least 10" in text(rates("collocated-8xtp1", 1.0, over(1.5, grows, late)))
    assert "8xTP1 collocated gives at least 10" in text(rates("collocated-8xtp1", 1.0))


def test_one_experiment_and_none() -> None:
    alone = "At TPOT p50 <= 10 ms and TTFT p50 <= 1,000 ms 4xTP1 collocated gives about 20 output tokens/s per node"
    assert sentence([one(closed(4, 1, 10))], 10.0) == (
        f"{alone} (8 GPUs); 4xTP1 collocated might give more: its higher loads were not measured."
    )
    bad = [one(closed(4, 1, 10, reasons=("bad",)))]
    assert verdicts.headline(bad, View()) == "No valid level to compare."
    assert sentences(bad, within(10.0), View()) == []


def test_what_does_not_reach_the_bound_is_reported() -> None:
    quick = experiment("collocated-8xtp1", closed(4, 1, 10), closed(8, 2, 12))
    slow = experiment("collocated-4xtp2", closed(4, 3, 30), closed(8, 4, 40))
    wide = experiment("collocated-2xtp4", closed(4, 0.5, 5), closed(8, 1.5, 50))
    bounds_ranking = read(curves([quick, slow]), 21.0)
    assert bounds_ranking.missed == ("4xTP2 collocated",)
    assert [(each.label, each.end) for each in bounds_ranking.ranking] == [
        ("8xTP1 collocated", ranking.OpenEnd(beyond="unmeasured"))
    ]
    assert "no other configuration is within the bounds" in sentence(curves([quick, slow]), 21.0)
    assert "; not reached by 4xTP2 collocated" in sentence(curves([quick, slow, wide]), 21.0)
    nobody = sentence(curves([quick, slow]), 1.0)
    assert (
        "no configuration can be named: no measured level of 8xTP1 collocated and 4xTP2 collocated is within" in nobody
    )


def test_a_bound_within_the_noise_of_what_just_misses_it_names_no_winner() -> None:
    quick = experiment("collocated-8xtp1", closed(4, 1, 10))
    close = experiment("collocated-4xtp2", closed(4, 1, 10.4))
    slow = experiment("collocated-2xtp4", closed(4, 1, 30))
    bounds_ranking = read(curves([quick, close, slow]), 10.0)
    assert (bounds_ranking.unsure, bounds_ranking.missed) == (("4xTP2 collocated",), ("2xTP4 collocated",))
    text = sentence(curves([quick, close, slow]), 10.0)
    assert "no winner can be named: 8xTP1 collocated (about" in text and "and 4xTP2 collocated are not" in text
    assert "the bounds are within the noise of a level of 4xTP2 collocated" in text
    assert "; not reached by 2xTP4 collocated" in text


def test_closed_and_open_loops_are_read_apart() -> None:
    both = curves(
        [
            experiment("collocated-8xtp1", closed(4, 1, 10), closed(8, 1, 60), run(Open(rate_rps=3), 3, 10)),
            experiment("collocated-4xtp2", closed(4, 2, 10)),
        ]
    )
    texts = sentences(both, within(14.0, 1000.0), View())
    assert [text.split(" ms (")[1][:13] for text in texts] == ["closed loop) ", "open loop) 8x"]
    assert "the best is 4xTP2" in texts[0] and "8xTP1 collocated gives about 30" in texts[1]


def test_the_best_by_throughput_is_of_one_kind_of_load_too() -> None:
    """An open loop at the same throughput waits in queues that a closed one has not."""
    pair = [
        experiment("collocated-8xtp1", closed(4, 1, 10), closed(8, 2, 20), run(Open(rate_rps=1), 1, 50)),
        experiment("collocated-4xtp2", closed(4, 1, 12), closed(8, 2, 24)),
    ]
    (found,) = group_crossovers(curves(pair), View())
    assert found.kind == "concurrency" and found.group is None
    assert sections.crossover_section(found, View()).title.startswith("Best by throughput, closed loop:")
    opened = [*pair[:1], experiment("collocated-4xtp2", run(Open(rate_rps=1), 1, 5))]
    assert [each.kind for each in group_crossovers(curves(opened), View())] == ["rate"]
    apart = [experiment("collocated-8xtp1", closed(4, 1, 10)), opened[1]]
    assert group_crossovers(curves(apart), View()) == []


@pytest.mark.parametrize(("requests", "tails"), [(99, set()), (100, {"p95"}), (500, {"p95", "p99"})])
def test_a_tail_is_given_where_every_repeat_has_five_requests_beyond_it(requests: int, tails: set[str]) -> None:
    def level(repeat: int, completed: int) -> Run:
        percentiles = {"p50": 0.01, "p95": 0.02, "p99": 0.03}
        ttft = Distribution(mean_s=0.01, percentiles_s=percentiles)
        whole = summary(10, 10).model_copy(update={"ttft": ttft, "completed": completed})
        return closed(4, 10, 10, repeat=repeat).model_copy(update={"whole": whole})

    (point,) = one(level(0, requests), level(1, 1000), level(2, 1000)).points
    assert set(point.latency_ms["ttft"]) == {"mean", "p50", *tails}
    estimate = point.ms_estimate("ttft", "p95")
    assert estimate is None or estimate.standard_error is None or requests >= 400, "an interval takes more"
    (sure,) = one(*(level(repeat, 400) for repeat in range(3))).points
    estimate = sure.ms_estimate("ttft", "p95")
    assert estimate is not None and estimate.standard_error is not None


def test_different_things_have_no_winner() -> None:
    other = closed(4, 9, 10).model_copy(update={"workload": Workload(input_tokens=7, output_tokens=3)})
    things = curves([experiment("collocated-8xtp1", closed(4, 1, 10)), experiment("collocated-4xtp2", other)])
    texts = sentences(things, within(14, 1000), View())
    assert [each.partition(" gives ")[0].rpartition(", ")[2] for each in texts] == [
        "100:10 input:output tokens: 8xTP1 collocated",
        "7:3 input:output tokens: 4xTP2 collocated",
    ]
    pair = curves([experiment("collocated-8xtp1", closed(4, 1, 10)), experiment("collocated-1xtp1", closed(4, 1, 10))])
    assert "different sizes (8 GPUs and 1 GPU)" in verdicts.headline(pair, View(normalized=False))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0.000"),
        (0.00034, "0.0003"),
        (0.0006, "0.001"),
        (0.956, "0.956"),
        (1.9, "1.90"),
        (73, "73.0"),
        (999.94, "999.9"),
        (74759.4, "74759"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert core_text.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00"), (0.0004, "0.0004"), (0.004, "0.004"), (0.006, "0.01"), (2.5, "2.50")]
)
def test_a_ratio_is_0_only_if_it_is_none(value: float, text: str) -> None:
    assert verdicts.short_ratio(value) == text
