"""Whole curves compared: the mean ratio of two deployments over the loads at which both were measured.

For every repeat the mean logarithm of a figure over these loads is taken. A repeat is an independent start, so the
interval rests on the scatter of the repeats (Student's t after Welch, `pdlab.analysis.intervals.compare`). The
correlation of the levels of one start does not matter. Every load counts alike, and no bound has to be chosen. Another
curve changes only the share of the error that each comparison has.

Closed loops are compared with closed loops and open ones with open ones. Deployments of different sizes are compared at
equal load per GPU.

Many curves are compared in a matrix. It compares every two at the loads that both have, and also at equal latency:
their throughput within a latency bound, over all bounds that both meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdlab.analysis.bootstrap import MAX_UNREACHED, DrawnLine
from pdlab.analysis.comparable import COMPARED_LOADS, alike_at, groups, nature, one_model
from pdlab.analysis.curves import Curve, Point, Sample, rankable
from pdlab.analysis.intervals import Array, Comparison, Estimate, compare, of_repeats
from pdlab.analysis.power import single_repeat_sd
from pdlab.analysis.ranking import line_of
from pdlab.analysis.view import View
from pdlab.core.schema import Frozen
from pdlab.core.workload import LoadKind

Mask = NDArray[np.bool_]
Figure = Literal["throughput", "ttft", "tpot"]
FIGURES: tuple[Figure, ...] = ("throughput", "ttft", "tpot")
MOST_SPELLED = 6
"""Most curves of a group that are compared one by one; more are compared in a matrix."""
LATENCY_STEPS = 64
"""Latencies of a matrix, evenly spaced on a logarithmic axis, from the lowest to the highest of all its curves."""


class Ratio(Frozen):
    """One figure over that of the reference. ``comparison``: None if it is not known at every load. ``first`` and
    ``second``: geometric means over the compared loads."""

    figure: Figure
    comparison: Comparison | None
    first: Estimate | None = None
    second: Estimate | None = None


class Repeats(NamedTuple):
    """How often a deployment and the reference were measured."""

    deployment: int
    reference: int


class LeftOut(NamedTuple):
    """Numbers of loads of two deployments that are not compared. ``of_one``: valid in only one of the two. ``unlike``:
    valid in both, with requests that may not be compared. ``incomplete``: valid in both, but not in all compared
    repeats."""

    of_one: int = 0
    unlike: int = 0
    incomplete: int = 0


class PairComparison(Frozen):
    """One deployment against another, the ``reference``. ``loads``: those compared, of the whole deployment or
    ``per_gpu``. ``left_out``: the other loads of the two."""

    label: str
    reference: str
    loads: tuple[float, ...]
    per_gpu: bool
    left_out: LeftOut
    repeats: Repeats
    ratios: tuple[Ratio, ...]

    def ratio(self, figure: Figure) -> Comparison | None:
        return next(each.comparison for each in self.ratios if each.figure == figure)


class Headline(Frozen):
    """Deployments of one kind of load against ``reference``, most throughput first.

    They may be compared with it and share a load that is valid in all repeats of both. They share the error of a
    figure.
    """

    kind: LoadKind
    reference: str
    confidence: float
    comparisons: tuple[PairComparison, ...]


class OtherPairs(Frozen):
    """The other pairs of one kind of load: equal GPU counts, a shared load, neither the reference of the other.

    The one with more throughput is over the other. ``comparisons``: widest differences in throughput first. They share
    the error of a figure among themselves.
    """

    kind: LoadKind
    confidence: float
    comparisons: tuple[PairComparison, ...]


class EqualLatency(Frozen):
    """The throughput of one curve over another at equal latency.

    It is the geometric mean over the latencies from ``low`` to ``high``, in the view's unit, that both reach.
    """

    label: str
    reference: str
    low: float
    high: float
    comparison: Comparison


class Matrix(Frozen):
    """Every curve of a group over every other, of one kind of load. ``labels``: most throughput first.

    ``comparisons``: in either order, of those that share a load. ``equal_latency``: in either order, of those that
    reach a common latency. Each of the two sets shares the error of a figure. ``group``: distinguishes these curves
    from others that they may not be compared with.
    """

    kind: LoadKind
    group: str | None
    confidence: float
    labels: tuple[str, ...]
    comparisons: tuple[PairComparison, ...]
    equal_latency: tuple[EqualLatency, ...] = ()

    @property
    def one_repeat(self) -> bool:
        """Whether some curve has one repeat, whose scatter is assumed."""
        return any(1 in each.repeats for each in self.comparisons)

    def cells(self) -> dict[tuple[str, str], PairComparison]:
        """(label, reference) -> their comparison."""
        return {(each.label, each.reference): each for each in self.comparisons}

    def latency_cells(self) -> dict[tuple[str, str], EqualLatency]:
        """(label, reference) -> their comparison at equal latency."""
        return {(each.label, each.reference): each for each in self.equal_latency}


class Compared(Frozen):
    """All comparisons of whole curves. ``matrices``: of groups of more than `MOST_SPELLED` curves. ``apart``: labels
    without any comparison."""

    headlines: tuple[Headline, ...]
    pairs: tuple[OtherPairs, ...] = ()
    apart: tuple[str, ...] = ()
    matrices: tuple[Matrix, ...] = ()

    def spelled(self) -> Compared:
        """Without the comparisons that the matrices have."""
        within = {(each.kind, label) for each in self.matrices for label in each.labels}
        pairs = [
            found.model_copy(update={"comparisons": left})
            for found in self.pairs
            if (left := tuple(each for each in found.comparisons if (found.kind, each.label) not in within))
        ]
        headlines = tuple(each for each in self.headlines if (each.kind, each.reference) not in within)
        return self.model_copy(update={"headlines": headlines, "pairs": tuple(pairs)})


class _ValidLevels(Frozen):
    """One curve's valid levels of one kind of load."""

    curve: Curve
    points: tuple[Point, ...]

    def by_load(self, view: View, *, per_gpu: bool) -> dict[float, Point]:
        size = self.curve.gpus.counted(view.count) if per_gpu else 1
        return {float(f"{point.value / size:.6g}"): point for point in self.points}


def _per_gpu(lines: Sequence[_ValidLevels], view: View) -> bool:
    """Whether loads of lines of one kind are compared per GPU: if sizes differ.

    A replay is one load, whatever the size of its deployment.
    """
    replays = any(point.kind == "replay" for line in lines for point in line.points)
    return not replays and len({line.curve.gpus.counted(view.count) for line in lines}) > 1


class _SharedLoads(NamedTuple):
    """The levels of two lines at the compared loads, and the compared repeats of each."""

    loads: tuple[float, ...]
    per_gpu: bool
    left_out: LeftOut
    levels: tuple[dict[float, Point], dict[float, Point]]
    repeats: tuple[set[int], set[int]]

    def turned(self) -> _SharedLoads:
        (one, other), (its, others) = self.levels, self.repeats
        return self._replace(levels=(other, one), repeats=(others, its))


def compared(curves: Sequence[Curve], view: View) -> Compared:
    """Every deployment against a reference, for each kind of load.

    The reference shares loads with as many others as possible. Of several candidates it is a collocated one; of several
    collocated ones that of most throughput over their common loads; else the first given. A deployment that shares no
    load with that reference is compared with another one by the same rule. A comparison of two curves depends only on
    these two.
    """
    headlines: list[Headline] = []
    pairs: list[OtherPairs] = []
    matrices: list[Matrix] = []
    of_groups = groups(curves, view)
    found: set[str] = set()
    measured: dict[str, None] = {}
    for kind in COMPARED_LOADS:
        every = [
            _ValidLevels(curve=curve, points=tuple(valid))
            for curve in rankable(curves)
            if (valid := [point for point in curve.lines().get(kind, []) if point.valid])
        ]
        measured |= dict.fromkeys(line.curve.label for line in every)
        shared = _all_shared(every, view)
        stars = _stars(every, shared, view)
        for reference, partners in stars:
            pairs_of_reference = [
                _pair_comparison(every[other], every[reference], shared[other, reference], view, len(partners))
                for other in partners
            ]
            headlines.append(
                Headline(
                    kind=kind,
                    reference=every[reference].curve.label,
                    confidence=view.confidence,
                    comparisons=tuple(sorted(pairs_of_reference, key=lambda each: -_throughput(each))),
                )
            )
        others = _other_pairs(every, shared, stars, view)
        if others:
            pairs.append(OtherPairs(kind=kind, confidence=view.confidence, comparisons=tuple(others)))
        for group in of_groups:
            within = {curve.label for curve in group.curves}
            numbers = [i for i, line in enumerate(every) if line.curve.label in within]
            matrices += _matrix(kind, group.name, every, numbers, shared, view)
        found |= {every[i].curve.label for pair in shared for i in pair}
    return Compared(
        headlines=tuple(headlines),
        pairs=tuple(pairs),
        apart=tuple(label for label in measured if label not in found),
        matrices=tuple(matrices),
    )


def headlines(curves: Sequence[Curve], view: View) -> list[Headline]:
    """Those of `compared`."""
    return list(compared(curves, view).headlines)


def _throughput(each: PairComparison) -> float:
    comparison = each.ratio("throughput")
    return comparison.ratio if comparison else 0.0


def _all_shared(lines: Sequence[_ValidLevels], view: View) -> dict[tuple[int, int], _SharedLoads]:
    """The shared loads of every two lines, by their numbers in either order; without those that share nothing."""
    found: dict[tuple[int, int], _SharedLoads] = {}
    natures = [nature(line.curve, view) for line in lines]
    for i, j in combinations(range(len(lines)), 2):
        shared = None if natures[i].obstacles(natures[j]) else _shared(lines[i], lines[j], view)
        if shared is not None:
            found[i, j], found[j, i] = shared, shared.turned()
    return found


def _stars(
    lines: Sequence[_ValidLevels], shared: Mapping[tuple[int, int], _SharedLoads], view: View
) -> list[tuple[int, list[int]]]:
    """References with those that are compared with each, by number; no line is in two of them."""
    stars: list[tuple[int, list[int]]] = []
    left = list(range(len(lines)))
    while True:
        partners = {i: _of_one_model([j for j in left if (j, i) in shared], lines) for i in left}
        most = max(map(len, partners.values()), default=0)
        if not most:
            return stars
        reference = _reference([i for i in left if len(partners[i]) == most], lines, view)
        stars.append((reference, partners[reference]))
        left = [i for i in left if i != reference and i not in partners[reference]]


def _of_one_model(numbers: Sequence[int], lines: Sequence[_ValidLevels]) -> list[int]:
    """Those of which every two are of one model, the first given first.

    A name without an organisation may match the models of two organisations, which must not share a headline over it.
    """
    kept: list[int] = []
    for i in numbers:
        if all(one_model(lines[i].curve.model, lines[j].curve.model) for j in kept):
            kept.append(i)
    return kept


def _reference(candidates: Sequence[int], lines: Sequence[_ValidLevels], view: View) -> int:
    collocated = [i for i in candidates if (its := lines[i].curve.deployment) and its.mode == "collocated"]
    if not collocated:
        return candidates[0]
    per_gpu = _per_gpu([lines[i] for i in collocated], view)
    levels = {i: lines[i].by_load(view, per_gpu=per_gpu) for i in collocated}
    loads = set.intersection(*(set(each) for each in levels.values()))

    def throughput(i: int) -> float:
        rates = [lines[i].curve.throughput(levels[i][load], view) for load in loads]
        return math.fsum(math.log(rate) if rate > 0 else -math.inf for rate in rates)

    return max(collocated, key=throughput)


def _other_pairs(
    lines: Sequence[_ValidLevels],
    shared: Mapping[tuple[int, int], _SharedLoads],
    stars: Sequence[tuple[int, list[int]]],
    view: View,
) -> list[PairComparison]:
    with_reference = {frozenset((reference, other)) for reference, partners in stars for other in partners}
    numbers = [
        (i, j)
        for (i, j), its in shared.items()
        if i < j and not its.per_gpu and frozenset((i, j)) not in with_reference
    ]
    found = []
    for i, j in numbers:
        each = _pair_comparison(lines[i], lines[j], shared[i, j], view, len(numbers))
        if 0 < _throughput(each) < 1:
            each = _pair_comparison(lines[j], lines[i], shared[j, i], view, len(numbers))
        found.append(each)
    return sorted(found, key=lambda each: -_throughput(each))


def _matrix(
    kind: LoadKind,
    group: str | None,
    lines: Sequence[_ValidLevels],
    numbers: Sequence[int],
    shared: Mapping[tuple[int, int], _SharedLoads],
    view: View,
) -> list[Matrix]:
    """One, or none if few curves of the group share loads."""
    partners = {i: [j for j in numbers if (i, j) in shared] for i in numbers}
    members = [i for i in numbers if partners[i]]
    if len(members) <= MOST_SPELLED:
        return []
    count = sum(map(len, partners.values())) // 2
    cells = {
        (i, j): _pair_comparison(lines[i], lines[j], shared[i, j], view, count) for i in members for j in partners[i]
    }

    def lead(i: int) -> float:
        ratios = [ratio for j in partners[i] if (ratio := _throughput(cells[i, j])) > 0]
        return math.fsum(map(math.log, ratios)) / len(ratios) if ratios else -math.inf

    labels = tuple(lines[i].curve.label for i in sorted(members, key=lead, reverse=True))
    return [
        Matrix(
            kind=kind,
            group=group,
            confidence=view.confidence,
            labels=labels,
            comparisons=tuple(cells.values()),
            equal_latency=tuple(_at_equal_latency([lines[i] for i in members], view)),
        )
    ]


def _at_equal_latency(lines: Sequence[_ValidLevels], view: View) -> list[EqualLatency]:
    """Of every two comparable curves that reach a common latency.

    Each curve is read once on a common grid and never extended beyond its levels.
    """
    known = [(line, [p for p in line.points if p.latency(view) is not None]) for line in lines]
    drawn = [(line, of) for line, points in known if (of := line_of(line.curve, points, view))]
    if len(drawn) < 2:
        return []
    ends = [(of.x[0].min(), of.x[0].max()) for _, of in drawn]
    grid = np.geomspace(min(low for low, _ in ends), max(high for _, high in ends), LATENCY_STEPS)
    reached = [_within_own(of, grid) for _, of in drawn]
    natures = [nature(line.curve, view) for line, _ in drawn]
    pairs = [
        (i, j, both)
        for i, j in combinations(range(len(drawn)), 2)
        if not natures[i].obstacles(natures[j]) and (both := reached[i].on & reached[j].on).any()
    ]
    found: list[EqualLatency] = []
    for i, j, both in pairs:
        estimates = [_mean_of(drawn[k][1], reached[k], both) for k in (i, j)]
        low, high = sorted(float(abs(grid[both][end])) for end in (0, -1))
        for (a, b), (first, second) in (((i, j), estimates), ((j, i), estimates[::-1])):
            comparison = compare(first, second, view.confidence, len(pairs)) if first and second else None
            if comparison is not None:
                label, reference = drawn[a][0].curve.label, drawn[b][0].curve.label
                found.append(EqualLatency(label=label, reference=reference, low=low, high=high, comparison=comparison))
    return found


class _ThroughputWithin(NamedTuple):
    """``logs`` (1 + draws, latencies): logarithm of the highest throughput within each latency. ``on``: latencies
    between the ends of the curve in nearly all of its draws."""

    logs: Array
    on: Mask


def _within_own(line: DrawnLine, grid: Array) -> _ThroughputWithin:
    reached = line.reach(grid)
    unreached = np.isnan(reached).mean(axis=0)
    on = ~np.isnan(reached[0]) & (unreached <= MAX_UNREACHED) & (grid <= line.x[0].max() + 1e-9 * abs(grid))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(reached)
    return _ThroughputWithin(logs, on & np.isfinite(logs[0]))


def _mean_of(line: DrawnLine, reached: _ThroughputWithin, on: Mask) -> Estimate | None:
    with np.errstate(invalid="ignore"):
        means = np.exp(reached.logs[:, on].mean(axis=1))
    return line.estimates(means[:, None])[0]


def _shared(first: _ValidLevels, second: _ValidLevels, view: View) -> _SharedLoads | None:
    """The shared loads of two comparable lines; None if complete repeats share no load."""
    both = (first, second)
    per_gpu = view.normalized and _per_gpu(both, view)
    levels = first.by_load(view, per_gpu=per_gpu), second.by_load(view, per_gpu=per_gpu)
    in_both = levels[0].keys() & levels[1].keys()
    common = sorted(load for load in in_both if alike_at(levels[0][load], levels[1][load]))
    repeats = _repeats([levels[0][load] for load in common]), _repeats([levels[1][load] for load in common])
    loads = tuple(
        load
        for load in common
        if all(of <= {s.repeat for s in its[load].samples} for its, of in zip(levels, repeats, strict=True))
    )
    if not loads:
        return None
    left_out = LeftOut(
        of_one=len(levels[0].keys() ^ levels[1].keys()),
        unlike=len(in_both) - len(common),
        incomplete=len(common) - len(loads),
    )
    return _SharedLoads(loads, per_gpu, left_out, levels, repeats)


def _pair_comparison(
    line: _ValidLevels, reference: _ValidLevels, shared: _SharedLoads, view: View, comparisons: int
) -> PairComparison:
    ratios = []
    for figure in FIGURES:
        first, second = (
            _over_loads(each.curve, [its[load] for load in shared.loads], of, figure, view)
            for each, its, of in zip((line, reference), shared.levels, shared.repeats, strict=True)
        )
        comparison = compare(first, second, view.confidence, comparisons) if first and second else None
        ratios.append(Ratio(figure=figure, comparison=comparison, first=first, second=second))
    return PairComparison(
        label=line.curve.label,
        reference=reference.curve.label,
        loads=shared.loads,
        per_gpu=shared.per_gpu,
        left_out=shared.left_out,
        repeats=Repeats(len(shared.repeats[0]), len(shared.repeats[1])),
        ratios=tuple(ratios),
    )


def _repeats(points: Sequence[Point]) -> set[int]:
    """Those that are valid in at least half of the levels: a repeat that has hardly begun would exclude every other
    load."""
    counts: dict[int, int] = {}
    for point in points:
        for sample in point.samples:
            counts[sample.repeat] = counts.get(sample.repeat, 0) + 1
    return {repeat for repeat, count in counts.items() if 2 * count >= len(points)}


def _over_loads(
    curve: Curve, points: Sequence[Point], repeats: set[int], figure: Figure, view: View
) -> Estimate | None:
    """Geometric mean over the levels; None if the figure is unknown, or 0, in one of them."""

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
    of_logs = of_repeats([math.fsum(values) / len(values) for values in logs.values()])
    value = math.exp(of_logs.value)
    if of_logs.standard_error is not None:
        return of_logs._replace(value=value, standard_error=of_logs.standard_error * value)
    estimates = [
        point.rate_estimate(view.throughput_metric)
        if figure == "throughput"
        else point.ms_estimate(figure, view.statistic)
        for point in points
    ]
    within = math.hypot(*((each.relative_error or 0.0) if each else 0.0 for each in estimates)) / len(estimates)
    # Another start would shift all levels together.
    error = math.hypot(within, single_repeat_sd(curve.gpus.device, figure))
    return Estimate(value, error * value, math.inf, "assumed")
