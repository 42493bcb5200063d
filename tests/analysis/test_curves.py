"""Means over repeats, normalisation by role, latency modes, and what may be said of a comparison."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pdlab.analysis import ranking
from pdlab.analysis.curves import Curve, Gpus, View, curves, gpus_of, short_labels, values_at
from pdlab.core import text as core_text
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.lengths import Uniform
from pdlab.core.nodes import Placement
from pdlab.core.workload import Closed, Load, Open, RunKey, Workload
from pdlab.report import tables, verdicts
from pdlab.results.schema import Distribution, Experiment, Manifest, Run, Summary, Validity

WORKLOAD = Workload(input_tokens=100, output_tokens=10)


def summary(rps: float, tpot_ms: float | None, ttft_ms: float = 100.0) -> Summary:
    def dist(ms: float | None) -> Distribution | None:
        return None if ms is None else Distribution(mean_s=ms / 500, percentiles_s={"p50": ms / 1000, "p99": ms / 250})

    return Summary(
        duration_s=10,
        completed=int(rps * 10),
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
    return Run(
        origin="measured",
        label="x",
        key=RunKey(kind=load.kind, value=load.value, repeat=repeat),
        workload=WORKLOAD,
        load=load,
        num_requests=100,
        completed=100,
        failed=0,
        whole=summary(rps, tpot_ms, **more),
        steady=steady,
        validity=Validity(reasons=reasons),
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
    notes = tables.invalid_notes([curve])
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


def test_units_are_said() -> None:
    gpu = one(closed(4, 1, 10))
    cpu = gpu.model_copy(update={"gpus": Gpus(total=2, device="cpu")})
    assert tables.node_name([gpu], View()) == "node (8 GPUs)"
    assert tables.node_name([cpu], View()) == "8 engine ranks"
    assert tables.node_name([cpu], View(gpus_per_node=1)) == "1 engine rank"
    assert tables.node_name([gpu], View(normalized=False)) == "whole deployment"
    assert any("not comparable" in note for note in tables.notes([gpu, cpu]))


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
    assert "different workloads (100:10, 100:10 uniform 0.8-1.0" in (tables.incomparable(drawn) or "")


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
    found = ranking.frontier(curves([fast, slow]), View())
    assert [(spot.x, spot.y) for spot in found] == [(5, 10), (6, 15), (9, 20), (20, 25)]
    by_interactivity = ranking.frontier(curves([fast, slow]), View(use_interactivity=True))
    assert {id(s.point) for s in by_interactivity} and [s.y for s in by_interactivity] == [25, 20, 15, 10]


def test_throughput_at_a_bound_is_interpolated_never_extended() -> None:
    curve = one(closed(4, 1, 10), closed(8, 2, 20), label="collocated-8xtp1")

    def throughput_at(view: View, bound: float) -> float | None:
        estimate = ranking.estimate_at(curve, view, bound)
        return estimate and estimate.value

    view = View()
    assert throughput_at(view, 9) is None
    assert throughput_at(view, 10) == 10
    assert throughput_at(view, 15) == pytest.approx(15)
    assert throughput_at(view, 99) == 20
    interactive = View(use_interactivity=True)
    assert throughput_at(interactive, 101) is None
    assert throughput_at(interactive, 75) == pytest.approx(15)


def verdict(first: list[Run], second: list[Run]) -> str:
    pair = curves([experiment("collocated-8xtp1", *first), experiment("collocated-4xtp2", *second)])
    return verdicts.sentence(pair, View())


def test_a_clear_winner_is_named() -> None:
    text = verdict([closed(4, 1, 10), closed(8, 2, 20)], [closed(4, 2, 10), closed(8, 4, 20)])
    assert (
        "At median TPOT <= 14 ms the best is 4xTP2 collocated with about 28 output tokens/s per node (8 GPUs)" in text
    )
    assert "100 % above 8xTP1 collocated" in text
    assert "one repeat: differences below 21 % are not meaningful" in text


def test_no_winner_within_what_one_repeat_shows() -> None:
    text = verdict([closed(4, 1, 10), closed(8, 2, 20)], [closed(4, 1.05, 10), closed(8, 2.1, 20)])
    assert "no winner can be named" in text
    assert "the best is" not in text


def test_no_winner_within_what_repeats_show() -> None:
    def level(rps: float) -> list[Run]:
        return [closed(4, rps * (0.9 + 0.1 * r), 10, repeat=r) for r in range(3)]

    assert "no winner can be named" in verdict(level(1.0), level(1.2))
    text = verdict(level(1.0), level(2.0))
    assert "the best is 4xTP2" in text
    assert "100 % above 8xTP1 collocated (95 % interval of the lead over 8xTP1 collocated: 60 to 150 %)" in text


def test_one_experiment_and_none() -> None:
    alone = verdicts.sentence([one(closed(4, 1, 10))], View())
    assert alone == "At median TPOT <= 10 ms, 4xTP1 collocated gives about 20 output tokens/s per node (8 GPUs)."
    bad = verdicts.sentence([one(closed(4, 1, 10, reasons=("bad",)))], View())
    assert bad == "No valid level to compare."


def test_what_does_not_reach_the_bound_is_said() -> None:
    quick = experiment("collocated-8xtp1", closed(4, 1, 10), closed(8, 2, 12))
    slow = experiment("collocated-4xtp2", closed(4, 3, 30), closed(8, 4, 40))
    wide = experiment("collocated-2xtp4", closed(4, 0.5, 5), closed(8, 1.5, 50))
    found = ranking.reading(curves([quick, slow]), View())
    assert found is not None
    assert (found.bound, found.missed, found.capped) == (21, ("4xTP2 collocated",), ("8xTP1 collocated",))
    assert "it is the only one that is that fast" in verdicts.sentence(curves([quick, slow]), View())
    assert "; not reached by 4xTP2 collocated" in verdicts.sentence(curves([quick, slow, wide]), View())


def test_a_bound_within_the_noise_of_what_just_misses_it_names_no_winner() -> None:
    quick = experiment("collocated-8xtp1", closed(4, 1, 10))
    close = experiment("collocated-4xtp2", closed(4, 1, 10.4))
    slow = experiment("collocated-2xtp4", closed(4, 1, 30))
    found = ranking.reading(curves([quick, close, slow]), View())
    assert found is not None and (found.unsure, found.missed) == (("4xTP2 collocated",), ("2xTP4 collocated",))
    text = verdicts.sentence(curves([quick, close, slow]), View())
    assert "no winner can be named: 8xTP1 collocated (about" in text and "and 4xTP2 collocated are not" in text
    assert "the bound is within the noise of the lowest TPOT of 4xTP2 collocated" in text
    assert "; not reached by 2xTP4 collocated" in text


def test_different_things_have_no_winner() -> None:
    other = closed(4, 9, 10).model_copy(update={"workload": Workload(input_tokens=7, output_tokens=3)})
    assert "No winner can be named: the experiments have different workloads" in verdict([closed(4, 1, 10)], [other])
    pair = curves([experiment("collocated-8xtp1", closed(4, 1, 10)), experiment("collocated-1xtp1", closed(4, 1, 10))])
    assert "different sizes (1, 8 GPUs)" in verdicts.sentence(pair, View(normalized=False))


def test_a_latency_that_nobody_has_is_refused() -> None:
    prefill_only = one(closed(4, 1, None))
    with pytest.raises(UsageError, match="no level has the p50 of TPOT"):
        ranking.require_latency([prefill_only], View())
    ranking.require_latency([prefill_only], View(latency_mode="first_token"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0.000"), (0.956, "0.956"), (1.9, "1.90"), (73, "73.0"), (999.94, "999.9"), (74759.4, "74759")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert core_text.number(value) == text


def test_straight_lines_between_points() -> None:
    line = [(1.0, 10.0), (3.0, 30.0), (2.0, 50.0), (2.0, 60.0)]
    assert list(values_at(line, 2.0)) == [20.0, 50.0, 50.0, 60.0]
    assert list(values_at(line, 0.9)) == list(values_at(line, 3.1)) == []
    assert list(values_at([(1.0, 5.0)], 1.0)) == [], "one point is no line"
