"""Whole curves compared: the mean ratio of two deployments over the loads that both were measured at.

Of every repeat the mean logarithm of a figure over these loads is taken; a repeat is a start of its own, so their
scatter is what the interval rests on (Student's t after Welch, `pdlab.analysis.intervals.compare`), and it does not
matter how alike the levels of one start are. Every load counts alike, and no bound has to be chosen: another curve
beside the two changes nothing but the share of the error that each comparison has.

Closed loops are compared with closed loops and open ones with open ones; between deployments of different sizes the
loads per GPU are held against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pdlab.analysis.curves import Curve, Point, Sample, View
from pdlab.analysis.intervals import Comparison, Estimate, compare
from pdlab.analysis.power import SINGLE_REPEAT_SD
from pdlab.analysis.ranking import own
from pdlab.core.schema import Frozen
from pdlab.core.workload import LoadKind

Figure = Literal["throughput", "ttft", "tpot"]
FIGURES: tuple[Figure, ...] = ("throughput", "ttft", "tpot")
KINDS: tuple[LoadKind, ...] = ("concurrency", "rate")  # a ramp is no level of one load


class Ratio(Frozen):
    """One figure over that of the reference; ``comparison`` is None where it is not known at every load. ``first`` and
    ``second`` are the geometric means over the loads that are compared."""

    figure: Figure
    comparison: Comparison | None
    first: Estimate | None = None
    second: Estimate | None = None


class Repeats(NamedTuple):
    """How often a deployment and the reference were measured."""

    deployment: int
    reference: int


class Against(Frozen):
    """One deployment against the reference. ``loads`` entered, each of the whole deployment or ``per_gpu``;
    ``left_out`` counts further loads of the two."""

    label: str
    loads: tuple[float, ...]
    per_gpu: bool
    left_out: int
    repeats: Repeats
    ratios: tuple[Ratio, ...]

    def ratio(self, figure: Figure) -> Comparison | None:
        return next(each.comparison for each in self.ratios if each.figure == figure)


class Headline(Frozen):
    """All deployments of one kind of load against ``reference``, most throughput first. ``apart`` share no load with it
    that is valid in all repeats of both."""

    kind: LoadKind
    reference: str
    confidence: float
    against: tuple[Against, ...]
    apart: tuple[str, ...] = ()


class _Line(Frozen):
    """One curve's valid levels of one kind of load."""

    curve: Curve
    points: tuple[Point, ...]

    def by_load(self, view: View, *, per_gpu: bool) -> dict[float, Point]:
        size = self.curve.gpus.counted(view.count) if per_gpu else 1
        return {float(f"{point.value / size:.6g}"): point for point in self.points}


def headlines(curves: Sequence[Curve], view: View) -> list[Headline]:
    """One for each kind of load that two deployments have. The reference is collocated where one is, the one of most
    throughput over the loads that all collocated ones share; else the first."""
    by_kind = []
    for kind in KINDS:
        every = [
            _Line(curve=curve, points=tuple(valid))
            for curve in own(curves)
            if (valid := [point for point in curve.lines().get(kind, []) if point.valid])
        ]
        if len(every) < 2:
            continue
        reference = _reference(every, view)
        others = [line for line in every if line is not reference]
        pairs = [(line.curve.label, _against(line, reference, view, len(others))) for line in others]
        against = [each for _, each in pairs if each is not None]
        by_kind.append(
            Headline(
                kind=kind,
                reference=reference.curve.label,
                confidence=view.confidence,
                against=tuple(sorted(against, key=lambda each: -_throughput(each))),
                apart=tuple(label for label, each in pairs if each is None),
            )
        )
    return by_kind


def _throughput(each: Against) -> float:
    comparison = each.ratio("throughput")
    return comparison.ratio if comparison else 0.0


def _reference(lines: Sequence[_Line], view: View) -> _Line:
    collocated = [line for line in lines if line.curve.deployment and line.curve.deployment.mode == "collocated"]
    if not collocated:
        return lines[0]
    per_gpu = len({line.curve.gpus.counted(view.count) for line in collocated}) > 1
    levels = [line.by_load(view, per_gpu=per_gpu) for line in collocated]
    shared = set.intersection(*(set(each) for each in levels))

    def most(number: int) -> float:
        rates = [collocated[number].curve.throughput(levels[number][load], view) for load in shared]
        return math.fsum(math.log(rate) if rate > 0 else -math.inf for rate in rates)

    return collocated[max(range(len(collocated)), key=most)]


def _against(line: _Line, reference: _Line, view: View, comparisons: int) -> Against | None:
    """None where no load is shared by complete repeats."""
    both = (line, reference)
    per_gpu = view.normalized and len({each.curve.gpus.counted(view.count) for each in both}) > 1
    levels = [each.by_load(view, per_gpu=per_gpu) for each in both]
    shared = sorted(levels[0].keys() & levels[1].keys())
    repeats = [_repeats([its[load] for load in shared]) for its in levels]
    loads = [
        load
        for load in shared
        if all(of <= {s.repeat for s in its[load].samples} for its, of in zip(levels, repeats, strict=True))
    ]
    if not loads:
        return None
    ratios = []
    for figure in FIGURES:
        first, second = (
            _over_loads(each.curve, [its[load] for load in loads], of, figure, view)
            for each, its, of in zip(both, levels, repeats, strict=True)
        )
        comparison = compare(first, second, view.confidence, comparisons) if first and second else None
        ratios.append(Ratio(figure=figure, comparison=comparison, first=first, second=second))
    return Against(
        label=line.curve.label,
        loads=tuple(loads),
        per_gpu=per_gpu,
        left_out=len(levels[0].keys() | levels[1].keys()) - len(loads),
        repeats=Repeats(len(repeats[0]), len(repeats[1])),
        ratios=tuple(ratios),
    )


def _repeats(points: Sequence[Point]) -> set[int]:
    """Those that are valid in at least half of the levels: one that has hardly begun would cost every other load."""
    counts: dict[int, int] = {}
    for point in points:
        for sample in point.samples:
            counts[sample.repeat] = counts.get(sample.repeat, 0) + 1
    return {repeat for repeat, count in counts.items() if 2 * count >= len(points)}


def _over_loads(
    curve: Curve, points: Sequence[Point], repeats: set[int], figure: Figure, view: View
) -> Estimate | None:
    """Geometric mean over the levels; None where the figure is not known, or 0, in one of them."""

    def of(sample: Sample) -> float | None:
        if figure == "throughput":
            return sample.tokens_per_s(view.throughput_metric) * curve.scale(view)
        return sample.ms(figure, view.statistic)

    if figure != "throughput" and any(point.ms(figure, view.statistic) is None for point in points):
        return None
    logs: dict[int, list[float]] = {repeat: [] for repeat in repeats}
    for point in points:
        for sample in point.samples:
            if sample.repeat in repeats:
                value = of(sample)
                if not value or value < 0:
                    return None
                logs[sample.repeat].append(math.log(value))
    means = [math.fsum(values) / len(values) for values in logs.values()]
    middle = math.fsum(means) / len(means)
    value = math.exp(middle)
    if len(means) > 1:
        variance = math.fsum((mean - middle) ** 2 for mean in means) / (len(means) - 1)
        return Estimate(value, math.sqrt(variance / len(means)) * value, len(means) - 1, "repeats")
    estimates = [
        point.rate_estimate(view.throughput_metric)
        if figure == "throughput"
        else point.ms_estimate(figure, view.statistic)
        for point in points
    ]
    within = math.hypot(*((each.relative_error or 0.0) if each else 0.0 for each in estimates)) / len(estimates)
    # Another start would shift all levels together.
    error = math.hypot(within, SINGLE_REPEAT_SD[curve.gpus.device])
    return Estimate(value, error * value, math.inf, "assumed")
