"""Whole curves compared, over seeded trials with a known ratio; which loads and repeats enter."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from support import curves as made

from pdlab.analysis.crossovers import group_crossovers
from pdlab.analysis.curves import Curve, Point, Sample
from pdlab.analysis.headline import MOST_SPELLED, Headline, LeftOut, PairComparison, compared, headlines
from pdlab.analysis.ranking import bounds_rankings
from pdlab.analysis.view import View
from pdlab.core.bounds import parse_bounds
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import LoadKind, Workload
from pdlab.report import verdicts

TRIALS = 400
# At a true rate of 95 % 371 or more of 400 trials cover with a probability of 98.4 %.
LEAST = 371
LOADS = (1, 2, 4, 8)
FACTORS = {"throughput": 0.97, "ttft": 2.9, "tpot": 0.8}


def sample(repeat: int, throughput: float, ttft: float, tpot: float) -> Sample:
    return made.sample(throughput, {"ttft": ttft, "tpot": tpot}, repeat, input_tokens_per_s=throughput)


def curve(
    label: str, levels: Mapping[float, list[Sample]], gpus: int = 2, kind: LoadKind = "concurrency", valid: bool = True
) -> Curve:
    points = [made.point(load, *samples, kind=kind, valid=valid) for load, samples in levels.items()]
    deployment = Deployment(topology=parse_label(label.split(" ")[0]))
    return made.curve(label, *points, gpus=gpus, deployment=deployment, workload="1:1")


def drawn(label: str, rng: np.random.Generator, factors: Mapping[str, float], repeats: int = 3) -> Curve:
    """Levels of one start share 6 % of scatter, each has 3 % of its own; TTFT and TPOT rise with the load."""
    starts, own = rng.normal(0, 0.06, (repeats, 3)), rng.normal(0, 0.03, (repeats, len(LOADS), 3))
    noise = np.exp(starts[:, None] + own)
    return curve(
        label,
        {
            load: [
                sample(
                    r,
                    300 * load**0.5 * factors.get("throughput", 1) * noise[r, i, 0],
                    30 * load**0.3 * factors.get("ttft", 1) * noise[r, i, 1],
                    3 * load**0.4 * factors.get("tpot", 1) * noise[r, i, 2],
                )
                for r in range(repeats)
            ]
            for i, load in enumerate(LOADS)
        },
    )


def headline(*curves: Curve, view: View | None = None) -> Headline:
    (block,) = headlines(curves, view or View())
    return block


def only(block: Headline) -> PairComparison:
    (each,) = block.comparisons
    return each


@pytest.mark.parametrize("repeats", [2, 3, 6])
def test_the_true_ratio_is_covered_at_the_stated_rate(repeats: int) -> None:
    rng = np.random.default_rng([41, repeats])
    covered = dict.fromkeys(FACTORS, 0)
    for _ in range(TRIALS):
        base = drawn("collocated-2xtp1", rng, {}, repeats)
        each = only(headline(base, drawn("pd-pack-p1xtp1-d1xtp1", rng, FACTORS, repeats)))
        for ratio in each.ratios:
            assert ratio.comparison
            covered[ratio.figure] += ratio.comparison.low <= FACTORS[ratio.figure] <= ratio.comparison.high
    assert min(covered.values()) >= LEAST, covered


def test_equals_are_distinguished_no_more_often_than_stated_however_many_there_are() -> None:
    rng = np.random.default_rng(42)
    wrong = 0
    for _ in range(TRIALS):
        others = [drawn(f"pd-pack-p1xtp1-d1xtp1 {i}", rng, {}) for i in range(4)]
        compared = headline(drawn("collocated-2xtp1", rng, {}), *others)
        verdicts_ = [each.ratio("throughput") for each in compared.comparisons]
        wrong += any(each and each.verdict != "not distinguishable" for each in verdicts_)
    assert wrong <= TRIALS - LEAST


def test_levels_of_one_start_are_not_taken_for_independent_witnesses() -> None:
    """A start that is 20 % faster at all of eight loads is one start: with two of them nothing is resolved."""
    levels = {float(load): [sample(0, 100, 10, 1), sample(1, 120, 10, 1)] for load in range(1, 9)}
    slower = {load: [sample(r, 90, 10, 1) for r in range(2)] for load in levels}
    against = only(headline(curve("collocated-2xtp1", levels), curve("pd-pack-p1xtp1-d1xtp1", slower)))
    throughput = against.ratio("throughput")
    assert throughput and throughput.verdict == "not distinguishable"


def test_the_ratio_is_the_geometric_mean_over_the_shared_loads_alone() -> None:
    base = curve("collocated-2xtp1", {1: [sample(0, 100, 10, 1)], 2: [sample(0, 100, 10, 1)], 9: [sample(0, 1, 1, 1)]})
    other = curve("pd-pack-p1xtp1-d1xtp1", {1: [sample(0, 200, 40, 1)], 2: [sample(0, 50, 10, 1)]})
    each = only(headline(base, other))
    assert (each.loads, each.left_out, each.per_gpu, each.repeats) == ((1, 2), LeftOut(of_one=1), False, (1, 1))
    assert [round(ratio.comparison.ratio, 6) for ratio in each.ratios if ratio.comparison] == [1.0, 2.0, 1.0]
    assert {ratio.comparison.basis for ratio in each.ratios if ratio.comparison} == {"assumed"}


def test_of_one_repeat_each_figure_has_the_scatter_of_its_own() -> None:
    """A fifth less: as large a difference of TTFT is more often chance than one of TPOT or of the rate.

    1.96 * sqrt(2) standard deviations of 8.5 %, 5.0 % and 4.3 %.
    """
    base = curve("collocated-2xtp1", {1: [sample(0, 100, 100, 10)]}, gpus=2)
    each = only(headline(base, curve("pd-pack-p1xtp1-d1xtp1", {1: [sample(0, 80, 80, 8)]}, gpus=2)))
    highest = {ratio.figure: ratio.comparison.high for ratio in each.ratios if ratio.comparison}
    assert highest == pytest.approx({"throughput": 0.901, "ttft": 1.012, "tpot": 0.920}, abs=2e-3)
    found = {ratio.figure: ratio.comparison.verdict for ratio in each.ratios if ratio.comparison}
    assert found == {"throughput": "worse", "ttft": "not distinguishable", "tpot": "worse"}


def test_deployments_of_different_sizes_are_compared_at_equal_loads_per_gpu() -> None:
    small = curve("collocated-2xtp1", {2: [sample(0, 100, 10, 1)], 8: [sample(0, 300, 30, 3)]}, gpus=2)
    large = curve("collocated-4xtp1", {4: [sample(0, 200, 10, 1)], 8: [sample(0, 250, 10, 1)]}, gpus=4)
    each = only(headline(small, large))
    throughput = each.ratio("throughput")
    assert each.per_gpu and each.loads == (1.0,) and each.left_out == LeftOut(of_one=2)
    assert throughput and throughput.ratio == pytest.approx(1)
    assert headlines([small, large], View(normalized=False)) == []


def test_a_repeat_that_has_hardly_begun_costs_no_load_and_a_load_without_all_repeats_does_not_enter() -> None:
    def level(*repeats: int) -> list[Sample]:
        return [sample(r, 100, 10, 1) for r in repeats]

    whole = curve("collocated-2xtp1", {load: level(0, 1, 2) for load in (1, 2, 4)})
    begun = curve("pd-pack-p1xtp1-d1xtp1", {1: level(0, 1, 2), 2: level(0, 1), 4: level(0, 1)})
    each = only(headline(whole, begun))
    assert (each.loads, each.repeats) == ((1, 2, 4), (2, 3))
    lost = curve("pd-pack-p1xtp1-d1xtp1", {1: level(0, 1, 2), 2: level(0, 2), 4: level(0, 1, 2)})
    each = only(headline(whole, lost))
    assert (each.loads, each.left_out, each.repeats) == ((1, 4), LeftOut(incomplete=1), (3, 3))
    text = verdicts.headline([whole, lost], View())
    assert "(left out: 1 load valid in both, but not in all repeats), 3 repeats each" in text


def test_a_load_whose_requests_differ_is_left_out_as_such() -> None:
    def levels(*inputs: int) -> list[Point]:
        return [
            made.point(load, sample(0, 100, 10, 1), workloads=(Workload(input_tokens=tokens, output_tokens=100),))
            for load, tokens in zip((1, 2, 4), inputs, strict=False)
        ]

    base = made.curve("collocated-2xtp1", *levels(1000, 1000, 1400), gpus=2)
    other = made.curve("pd-pack-p1xtp1-d1xtp1", *levels(1000, 1400), gpus=2)
    each = only(headline(base, other))
    assert (each.loads, each.left_out) == ((1,), LeftOut(of_one=1, unlike=1))
    text = verdicts.headline([base, other], View())
    assert "(left out: 1 load valid in only one of the two; 1 load with unlike requests)" in text


def test_closed_loops_never_meet_open_ones_and_invalid_levels_do_not_enter() -> None:
    levels = {4.0: [sample(0, 100, 10, 1)]}
    closed, opened = curve("collocated-2xtp1", levels), curve("pd-pack-p1xtp1-d1xtp1", levels, kind="rate")
    assert headlines([closed, opened], View()) == []
    assert "no two deployments share a load of one kind" in verdicts.headline([closed, opened], View())
    bad = curve("pd-pack-p1xtp1-d1xtp1", levels, valid=False)
    assert headlines([closed, bad], View()) == []
    both = [curve(label, levels, kind="rate") for label in ("collocated-2xtp1", "pd-pack-p1xtp1-d1xtp1")]
    assert "mean ratio over 4 requests/s," in verdicts.headline(both, View())


def test_ramps_are_shown_and_never_compared() -> None:
    curves = [
        curve(label, {40.0: [sample(0, throughput, 10, tpot)]}, kind="ramp")
        for label, throughput, tpot in (("collocated-2xtp1", 100, 1), ("pd-pack-p1xtp1-d1xtp1", 200, 2))
    ]
    assert headlines(curves, View()) == [] and group_crossovers(curves, View()) == []
    assert bounds_rankings(curves, parse_bounds("tpot_ms=5,ttft_ms=50", "p50"), View()) == []
    assert "No comparison: a ramp has many loads" in verdicts.headline(curves, View())
    held = [each.model_copy(update={"points": tuple(p.model_copy(update={"kind": "rate"}) for p in each.points)})
            for each in curves]  # fmt: skip
    assert headlines(held, View()) and group_crossovers(held, View()), "the same levels at a rate are"


def test_the_reference_is_the_collocated_one_that_gives_most() -> None:
    def level(rate: float) -> dict[float, list[Sample]]:
        return {4.0: [sample(0, rate, 10, 1)]}

    curves = [
        curve("pd-pack-p1xtp1-d1xtp1", level(300)),
        curve("collocated-2xtp1", level(100)),
        curve("collocated-1xtp2", level(110)),
    ]
    whole = headline(*curves)
    assert whole.reference == "collocated-1xtp2"
    assert [each.label for each in whole.comparisons] == ["pd-pack-p1xtp1-d1xtp1", "collocated-2xtp1"]
    apart = curve("pd-pack-p1xtp1-d1xtp1 far", {64.0: [sample(0, 1, 1, 1)]})
    assert compared([*curves, apart], View()).apart == ("pd-pack-p1xtp1-d1xtp1 far",)
    assert headline(*curves, apart) == whole


def test_three_lines_summarise_it() -> None:
    rng = np.random.default_rng(43)
    text = verdicts.headline(
        [drawn("collocated-2xtp1", rng, {}, 6), drawn("pd-pack-p1xtp1-d1xtp1", rng, FACTORS, 6)], View(gpus_per_node=2)
    )
    name, *lines, basis, baseline = text.splitlines()
    assert name == "pd-pack-p1xtp1-d1xtp1 over collocated-2xtp1"
    assert baseline.startswith("Baseline collocated-2xtp1: not tuned, ")
    assert basis == "  (mean ratio over 1, 2, 4 and 8 in flight, 6 repeats each, 95 % intervals)"
    assert [line[2:37].strip() for line in lines] == ["output tokens/s per node (2 GPUs)", "TTFT p50", "TPOT p50"]
    assert [line.rpartition(": ")[2] for line in lines] == ["no difference resolved", "longer", "shorter"]
    assert all(re.search(r" \d\.\d+ \(\d\.\d+-\d\.\d+\):", line) for line in lines)


TURNED = {"better": "worse", "worse": "better", "not distinguishable": "not distinguishable"}


def many(count: int) -> list[Curve]:
    """Curves of which each gives 1.5 times as much as the one before."""
    rng = np.random.default_rng(1)
    factors = [{"throughput": 1.5**i, "ttft": 1.0, "tpot": 1.0} for i in range(count)]
    return [drawn(f"collocated-1xtp2 {i}", rng, each) for i, each in enumerate(factors)]


def test_a_matrix_has_every_pair_both_ways_and_the_figures_of_the_paragraphs() -> None:
    curves = many(MOST_SPELLED + 1)
    found = compared(curves, View())
    (matrix,) = found.matrices
    assert matrix.labels == tuple(each.label for each in reversed(curves))
    cells = matrix.cells()
    assert len(cells) == len(curves) * (len(curves) - 1)
    for (label, reference), each in cells.items():
        one, other = each.ratio("throughput"), cells[reference, label].ratio("throughput")
        assert one is not None and other is not None
        assert one.ratio * other.ratio == pytest.approx(1)
        assert TURNED[one.verdict] == other.verdict
        steps = int(label.split()[1]) - int(reference.split()[1])
        assert one.ratio == pytest.approx(1.5**steps, rel=0.3)
    # The same pair by the same machinery, but for the number of comparisons that share the error.
    for spelled in (each for block in found.headlines for each in block.comparisons):
        assert spelled.loads == cells[spelled.label, spelled.reference].loads


def test_few_curves_are_compared_one_by_one() -> None:
    found = compared(many(MOST_SPELLED), View())
    assert not found.matrices and found.spelled() == found and found.headlines


def test_curves_without_a_shared_load_have_an_empty_cell() -> None:
    curves = [
        *many(MOST_SPELLED),
        curve("collocated-1xtp2 far", {load: [sample(i, 10.0, 1.0, 1.0) for i in range(3)] for load in (8, 99)}),
        curve("collocated-1xtp2 farther", {load: [sample(i, 10.0, 1.0, 1.0) for i in range(3)] for load in (99, 100)}),
        curve("collocated-1xtp2 alone", {77: [sample(i, 10.0, 1.0, 1.0) for i in range(3)]}),
    ]
    found = compared(curves, View())
    (matrix,) = found.matrices
    assert "collocated-1xtp2 alone" not in matrix.labels and found.apart == ("collocated-1xtp2 alone",)
    rows = dict(zip(matrix.labels, verdicts.matrix_tables(matrix, View())[0].rows, strict=True))
    shown = {
        label: cell.mark
        for label, cell in zip(matrix.labels, rows["collocated-1xtp2 farther"], strict=True)
        if cell.ratio
    }
    assert shown == {"collocated-1xtp2 far": "~"}


def test_the_matrix_takes_the_place_of_its_paragraphs_and_keeps_those_of_other_groups() -> None:
    few = [each.model_copy(update={"model": "other", "label": f"other {each.label}"}) for each in many(2)]
    found = compared([*many(MOST_SPELLED + 1), *few], View())
    spelled = found.spelled()
    assert [len(each.labels) for each in found.matrices] == [MOST_SPELLED + 1]
    assert [block.reference.startswith("other") for block in spelled.headlines] == [True]
    assert not spelled.pairs


def straight(label: str, per_ms: float, tpots_ms: Mapping[float, float]) -> Curve:
    """Serves ``per_ms`` tokens/s for each ms of TPOT; load -> TPOT."""
    levels = {load: [sample(i, per_ms * ms, 10.0, ms) for i in range(3)] for load, ms in tpots_ms.items()}
    return curve(label, levels)


def test_equal_latency_is_read_off_the_curves_and_not_at_their_loads() -> None:
    """At one load the second is as fast and has half the TPOT; at one TPOT it serves 1.5 times as much."""
    curves = [
        straight(f"collocated-1xtp2 {i}", 100 * 1.5**i, {load: load * 10 / 1.5**i for load in LOADS})
        for i in range(MOST_SPELLED + 1)
    ]
    (matrix,) = compared(curves, View(normalized=False)).matrices
    for (label, reference), cell in matrix.latency_cells().items():
        steps = int(label.split()[1]) - int(reference.split()[1])
        assert cell.comparison.ratio == pytest.approx(1.5**steps, rel=1e-6)
        lower, higher = sorted((int(label.split()[1]), int(reference.split()[1])))
        assert 10 / 1.5**lower <= cell.low <= cell.high <= 80 / 1.5**higher * (1 + 1e-9)
    at_load = matrix.cells()[curves[1].label, curves[0].label].ratio("throughput")
    assert at_load is not None and at_load.ratio == pytest.approx(1)
    # The last curve ends, at 80 / 1.5^6 ms, before the first begins, at 10 ms.
    assert (curves[6].label, curves[0].label) not in matrix.latency_cells()


def test_cells_at_equal_latency_of_one_matrix_hold_together() -> None:
    trials, held = 40, 0
    for seed in range(trials):
        rng = np.random.default_rng(1000 + seed)
        factors = [1.2**i for i in range(MOST_SPELLED + 1)]
        curves = [drawn(f"collocated-1xtp2 {i}", rng, {"throughput": f}, 4) for i, f in enumerate(factors)]
        (matrix,) = compared(curves, View()).matrices
        cells = matrix.latency_cells()
        assert len(cells) == len(curves) * (len(curves) - 1)
        held += all(
            cell.comparison.low <= 1.2 ** (int(label.split()[1]) - int(reference.split()[1])) <= cell.comparison.high
            for (label, reference), cell in cells.items()
        )
    assert held >= 36, held  # of which 95 % are 38; 36 or more have a probability of 95 %


def test_a_matrix_is_two_tables() -> None:
    (matrix,) = compared(many(MOST_SPELLED + 1), View()).matrices
    load, latency = verdicts.matrix_tables(matrix, View())
    assert (load.at_latency, latency.at_latency) == (False, True)
    assert "at equal load" in load.title and "at equal p50 TPOT" in latency.title
    text = verdicts.matrix_text(matrix, View())
    assert "empty: no shared load" in text and "empty: no common latency" in text
    (unknown,) = [
        each.model_copy(update={"equal_latency": ()}) for each in compared(many(MOST_SPELLED + 1), View()).matrices
    ]
    assert len(verdicts.matrix_tables(unknown, View())) == 1
