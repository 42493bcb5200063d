"""Errors of predictions: of each level, their medians, and the order of configurations. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.rendering import said
from pdlab.core.schema import Frozen
from pdlab.core.workload import Level, Load, Open, Workload
from pdlab.plan import TEMPLATES
from pdlab.plan.prediction_intervals import LevelError, error_parts, half_width
from pdlab.sim.hardware import ErrorParts, Hardware
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import Prompts, simulate

ACCURACY = TEMPLATES / "accuracy.txt"
NAMES = ("TPOT", "mean TTFT", "requests/s")


class LevelFigures(NamedTuple):
    """The figures by which a level is compared: the metrics of `NAMES`, then gaps between tokens; None: unknown."""

    tpot_s: float | None
    ttft_s: float
    requests_per_s: float
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


class MeasuredSweep(Frozen):
    """A measured experiment: its levels in the order of their runs, and their figures. ``trace``: the requests that
    each level replayed. ``warmed``: whether there was a warm-up before the first level."""

    name: str
    deployment: Deployment
    workload: Workload
    levels: tuple[Level, ...]
    values: tuple[LevelFigures, ...]
    prompts: Prompts
    trace: Trace | None = None
    warmed: bool = False

    def simulated(
        self, hardware: Hardware, shape: ModelShape, *, seed: int, scattered: bool | None = None
    ) -> list[SimulatedLevel]:
        """Simulate the levels as they were measured."""
        return simulate(
            self.deployment, self.levels, self.workload, hardware, shape,
            seed=seed, prompts=self.prompts, trace=self.trace, scattered=scattered,
        )  # fmt: skip


class PredictedPoint(Frozen):
    """A predicted and a measured figure. ``metric``: one of `NAMES`. ``scatter``: see
    `pdlab.plan.prediction_intervals`."""

    experiment: str
    load: str
    metric: str
    predicted: float
    measured: float
    scatter: float = 0.0

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def log_error(self) -> float:
        """Logarithm of the measured over the predicted figure."""
        return math.log(self.measured / self.predicted)


def name_of(load: Load) -> str:
    """``concurrency 8``; equal for the repeats of a level."""
    return f"{load.kind} {load.value:g}"


def median_errors(points: Sequence[PredictedPoint], skip_first: bool = True) -> dict[str, float]:
    """Median absolute percentage error of each metric, by default without the lowest load of each experiment."""
    compared = _compared(points) if skip_first else points
    return {
        name: statistics.median(abs(point.error_percent) for point in compared if point.metric == name)
        for name in NAMES
        if any(point.metric == name for point in compared)
    }


def _compared(points: Sequence[PredictedPoint]) -> list[PredictedPoint]:
    """The points without the lowest load of each experiment."""
    lowest_load = {point.experiment: point.load for point in reversed(points)}
    return [point for point in points if lowest_load[point.experiment] != point.load]


class IntervalCoverage(NamedTuple):
    """Share of measured values in 90 % intervals, and the median half-width of the intervals as a factor minus 1."""

    held: float
    half_width: float


def parts(points: Sequence[PredictedPoint], skip_first: bool = True) -> dict[str, ErrorParts]:
    """The parts of each metric's errors (`pdlab.plan.prediction_intervals.error_parts`), if known."""
    parts = {}
    for name in NAMES:
        errors = defaultdict[str, list[LevelError]](list)
        for point in _compared(points) if skip_first else points:
            if point.metric == name:
                errors[point.experiment].append(LevelError(point.log_error, point.scatter))
        if made := error_parts(list(errors.values())):
            parts[name] = made
    return parts


def coverage(
    points: Sequence[PredictedPoint], days_percent: Mapping[str, float] | None = None
) -> dict[str, IntervalCoverage]:
    """The coverage of each metric. The intervals of an experiment come from the errors of the others, without lowest
    loads.

    ``days_percent``: metric -> difference between days that the intervals include (None: none).
    """
    compared, days = _compared(points), days_percent or {}
    held: dict[str, list[bool]] = {name: [] for name in NAMES}
    widths: dict[str, list[float]] = {name: [] for name in NAMES}
    for experiment in dict.fromkeys(point.experiment for point in compared):
        others = parts([point for point in compared if point.experiment != experiment], skip_first=False)
        for point in compared:
            if point.experiment == experiment and point.metric in others:
                widths[point.metric].append(
                    half_width(others[point.metric], days.get(point.metric, 0.0), point.scatter)
                )
                held[point.metric].append(abs(point.log_error) <= widths[point.metric][-1])
    return {
        name: IntervalCoverage(statistics.fmean(held[name]), math.expm1(statistics.median(widths[name])))
        for name in NAMES
        if held[name]
    }


def parts_text(parts: Mapping[str, ErrorParts]) -> str:
    return "errors common to a configuration, and of a level beyond its known scatter: " + ", ".join(
        f"{name} {each.common_percent:.1f} and {each.level_percent:.1f} %" for name, each in parts.items()
    )


def coverage_text(coverages: Mapping[str, IntervalCoverage]) -> str:
    return "90 % intervals, each experiment's from the others' errors, hold " + ", ".join(
        f"{each.held:.0%} of {name} (half of them within {each.half_width:.1%})" for name, each in coverages.items()
    )


def rankings(
    experiments: Sequence[MeasuredSweep], points: Sequence[PredictedPoint], node_gpus: int
) -> dict[str, list[TargetCorrelation]]:
    """Input:output lengths -> rank correlation of the experiments of that workload by throughput per node at
    equal TPOT, targets 7 to 12 ms (`rank_correlations` says what is left out).

    Only closed loops are ranked: in an open loop throughput is the offered rate. Repeats count as
    their mean. A workload of fewer than three experiments has no entry.
    """
    rows = mean_rows(points)
    groups: dict[str, dict[str, tuple[Curve, Curve]]] = {}
    for experiment in experiments:
        if not any(isinstance(level.load, Open) for level in experiment.levels):
            workload = experiment.workload
            lengths = workload.label
            groups.setdefault(lengths, {})[experiment.name] = _curves(experiment, rows, node_gpus)
    by_lengths = {}
    for lengths, curve_pairs in groups.items():
        ours, theirs = ({name: curves[side] for name, curves in curve_pairs.items()} for side in (0, 1))
        if correlations := rank_correlations(ours, theirs):
            by_lengths[lengths] = correlations
    return by_lengths


Rows = dict[tuple[str, str], dict[str, PredictedPoint]]


def _curves(experiment: MeasuredSweep, rows: Rows, node_gpus: int) -> tuple[Curve, Curve]:
    """Predicted and measured, of levels that have both."""
    scale = node_gpus / experiment.deployment.gpus
    loads = sorted({level.load.value: name_of(level.load) for level in experiment.levels}.items())
    level_rows = [rows[experiment.name, name] for _, name in loads if (experiment.name, name) in rows]
    pairs = [(row["TPOT"], row["requests/s"]) for row in level_rows if {"TPOT", "requests/s"} <= row.keys()]
    return (
        [LevelPoint(tpot.predicted, scale * rate.predicted) for tpot, rate in pairs],
        [LevelPoint(tpot.measured, scale * rate.measured) for tpot, rate in pairs],
    )


def mean_rows(points: Sequence[PredictedPoint]) -> Rows:
    """(experiment, load) -> metric -> point, in order; repeats become their mean."""
    repeats: dict[tuple[str, str], dict[str, list[PredictedPoint]]] = {}
    for point in points:
        repeats.setdefault((point.experiment, point.load), {}).setdefault(point.metric, []).append(point)
    return {key: {metric: _mean(members) for metric, members in row.items()} for key, row in repeats.items()}


def _mean(points: Sequence[PredictedPoint]) -> PredictedPoint:
    means = {side: statistics.fmean(getattr(point, side) for point in points) for side in ("predicted", "measured")}
    return points[0].model_copy(update=means)


def table(points: Sequence[PredictedPoint]) -> str:
    """Markdown: per experiment and load, predicted / measured (means over repeats) and the error of each metric."""
    return said(ACCURACY, "table", mean_rows(points))


def errors_text(errors: dict[str, float]) -> str:
    return f"{said(ACCURACY, 'errors', errors)} (median absolute)"


def rankings_text(by_lengths: dict[str, list[TargetCorrelation]]) -> str:
    """One line per workload: the mean, and every target with the number of configurations that reach it."""
    return said(ACCURACY, "rankings", by_lengths)


TARGETS_S = (0.007, 0.008, 0.009, 0.010, 0.011, 0.012)
FEWEST = 3  # configurations: two are in order or in reverse, whatever the model


class LevelPoint(NamedTuple):
    tpot_s: float
    per_node_rps: float


Curve = Sequence[LevelPoint]  # by load


class TargetCorrelation(NamedTuple):
    """Rank correlation of the configurations that reach one TPOT target."""

    tpot_s: float
    configurations: tuple[str, ...]
    correlation: float


def throughput_at(curve: Curve, tpot_s: float) -> float | None:
    """Highest throughput at that TPOT, linear between neighbouring levels; None if the curve does not reach it."""
    values: list[float] = []
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 == x1 == tpot_s:
            values += [y0, y1]
        elif min(x0, x1) <= tpot_s <= max(x0, x1):
            values.append(y0 + (y1 - y0) * (tpot_s - x0) / (x1 - x0))
    return max(values, default=None)


def spearman(values_a: Sequence[float], values_b: Sequence[float]) -> float | None:
    """Rank correlation of two equally long sequences; None if one of them is all ties or has fewer than two values."""
    ranks_a, ranks_b = _ranks(values_a), _ranks(values_b)
    if len(ranks_a) < 2 or np.ptp(ranks_a) == 0 or np.ptp(ranks_b) == 0:
        return None
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0, equal values share the mean of theirs."""
    _, group, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts + 1) / 2
    return means[group]


def rank_correlations(predicted: Mapping[str, Curve], measured: Mapping[str, Curve]) -> list[TargetCorrelation]:
    """Spearman's rank correlation of the configurations by throughput per node at each of `TARGETS_S`.

    A configuration counts at a target where its predicted and its measured curve both pass through it: one
    that never reaches the target, or only beyond its lowest or highest level, is left out there, because
    curves are not extrapolated. A target with fewer than three configurations, or where all are equal, is left out.
    """
    reached_targets = []
    for tpot_s in TARGETS_S:
        rates = {
            name: (ours, theirs)
            for name in predicted
            if (ours := throughput_at(predicted[name], tpot_s)) is not None
            and (theirs := throughput_at(measured[name], tpot_s)) is not None
        }
        if len(rates) < FEWEST:
            continue
        correlation = spearman(*zip(*rates.values(), strict=True))
        if correlation is not None:
            reached_targets.append(TargetCorrelation(tpot_s, tuple(rates), correlation))
    return reached_targets
