"""Errors of predictions: of each level, their medians, their intervals, and the ranks of configurations. Pure."""

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
from pdlab.core.nodes import ClusterNode
from pdlab.core.rendering import macro
from pdlab.core.schema import Frozen
from pdlab.core.workload import Level, Load, Open, Workload
from pdlab.plan import TEMPLATES
from pdlab.plan.prediction_intervals import LevelError, error_parts, half_width
from pdlab.sim.hardware import ErrorParts, Hardware, Speculation
from pdlab.sim.kv_transfer import on_nodes
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import Prompts, simulate

ACCURACY = TEMPLATES / "accuracy.txt"
METRICS = ("TPOT", "mean TTFT", "requests/s")
TARGETS_S = (0.007, 0.008, 0.009, 0.010, 0.011, 0.012)  # of TPOT, for ranks
FEWEST_RANKED = 3  # configurations: two are in order or in reverse, whatever the model


class LevelFigures(NamedTuple):
    """The figures of a level that are compared: those of `METRICS`, then gaps between tokens. None: unknown."""

    tpot_s: float | None
    ttft_s: float
    requests_per_s: float
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


class MeasuredSweep(Frozen):
    """A measured experiment: its levels in the order of their runs, with their figures. ``values``: the figures, one
    for each level. ``prompts``: whether levels repeat the prompts of earlier levels. ``trace``: the requests that each
    level replayed (None: no replay). ``warmed``: a warm-up ran before the first level. ``launched``: a
    launch of pdlab started its engines, or simulated ones. ``nodes``: of its cluster, whose
    network its KV cache crossed (none: unknown, or this machine). ``ray_version``: of its Ray Serve (None: unknown, or
    without Ray). ``speculation``: the measured speculative decoding, as a mean over the levels (None: none, or
    unknown). ``doubts``: the levels that are left out or have impossible figures, and why, as sentences. ``assumed``:
    whether ``prompts`` are assumed."""

    name: str
    deployment: Deployment
    workload: Workload
    levels: tuple[Level, ...]
    values: tuple[LevelFigures, ...]
    prompts: Prompts
    trace: Trace | None = None
    warmed: bool = False
    launched: bool = False
    nodes: tuple[ClusterNode, ...] = ()
    ray_version: str | None = None
    speculation: Speculation | None = None
    doubts: tuple[str, ...] = ()
    assumed: bool = False

    def on_its_nodes(self, hardware: Hardware) -> Hardware:
        """The hardware with the network and the memory of the experiment's nodes, if they are known."""
        return on_nodes(hardware, self.nodes) if self.nodes and not hardware.cpu else hardware

    def as_measured(self, hardware: Hardware) -> Hardware:
        """The hardware of the experiment's nodes, with the routing of its Ray and its speculative decoding, if these
        are known. Speculative decoding that the hardware has is kept."""
        on_them = self.on_its_nodes(hardware).with_ray(self.ray_version)
        if self.speculation is None or on_them.speculation is not None:
            return on_them
        return on_them.with_speculation(self.speculation)

    def simulated(
        self, hardware: Hardware, shape: ModelShape, *, seed: int, scattered: bool | None = None
    ) -> list[SimulatedLevel]:
        """Simulate the levels as they were measured. Raises UsageError if the deployment cannot run. ``scattered``: see
        `pdlab.sim.simulator.simulate`."""
        return simulate(
            self.deployment, self.levels, self.workload, self.as_measured(hardware), shape,
            seed=seed, prompts=self.prompts, trace=self.trace, scattered=scattered,
        )  # fmt: skip


class PredictedPoint(Frozen):
    """A predicted and a measured figure of a level. ``metric``: one of `METRICS`. ``scatter``: see
    `pdlab.plan.prediction_intervals.scatter`."""

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
        """The logarithm of the measured over the predicted figure."""
        return math.log(self.measured / self.predicted)


def name_of(load: Load) -> str:
    """The name of a load, such as ``concurrency 8``. The repeats of a level have the same name."""
    return f"{load.kind} {load.value:g}"


def median_errors(points: Sequence[PredictedPoint], skip_first: bool = True) -> dict[str, float]:
    """Metric -> median absolute percentage error. ``skip_first``: without the lowest load of each experiment."""
    errors = defaultdict[str, list[float]](list)
    for point in without_lowest(points) if skip_first else points:
        errors[point.metric].append(abs(point.error_percent))
    return {metric: statistics.median(errors[metric]) for metric in METRICS if metric in errors}


def without_lowest(points: Sequence[PredictedPoint]) -> list[PredictedPoint]:
    """The points without the lowest load of each experiment."""
    lowest_load = {point.experiment: point.load for point in reversed(points)}
    return [point for point in points if lowest_load[point.experiment] != point.load]


class IntervalCoverage(NamedTuple):
    """The share of measured values in 90 % intervals. ``half_width``: the median half-width of the intervals, as a
    factor minus 1."""

    held: float
    half_width: float


def parts_by_metric(points: Sequence[PredictedPoint], skip_first: bool = True) -> dict[str, ErrorParts]:
    """Metric -> the parts of its errors (`pdlab.plan.prediction_intervals.error_parts`), where they are known.
    ``skip_first``: without the lowest load of each experiment."""
    found = {}
    for metric in METRICS:
        errors = defaultdict[str, list[LevelError]](list)
        for point in without_lowest(points) if skip_first else points:
            if point.metric == metric:
                errors[point.experiment].append(LevelError(point.log_error, point.scatter))
        if parts := error_parts(list(errors.values())):
            found[metric] = parts
    return found


def coverage(
    points: Sequence[PredictedPoint], days_percent: Mapping[str, float] | None = None
) -> dict[str, IntervalCoverage]:
    """Metric -> coverage of its intervals, without the lowest load of each experiment. The intervals of an experiment
    come from the errors of the other experiments. ``days_percent``: metric -> the difference between days that the
    intervals include (None: none)."""
    compared, days = without_lowest(points), days_percent or {}
    held, widths = defaultdict[str, list[bool]](list), defaultdict[str, list[float]](list)
    for experiment in dict.fromkeys(point.experiment for point in compared):
        others = parts_by_metric([point for point in compared if point.experiment != experiment], skip_first=False)
        for point in compared:
            if point.experiment == experiment and point.metric in others:
                width = half_width(others[point.metric], days.get(point.metric, 0.0), point.scatter)
                widths[point.metric].append(width)
                held[point.metric].append(abs(point.log_error) <= width)
    return {
        metric: IntervalCoverage(statistics.fmean(held[metric]), math.expm1(statistics.median(widths[metric])))
        for metric in METRICS
        if metric in held
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
    """Input:output lengths -> rank correlations of the experiments of that workload (`rank_correlations`).
    ``node_gpus``: the GPUs of a node. Only closed loops are ranked, because in an open loop throughput is the offered
    rate. The repeats of a level count as their mean. A workload of fewer than three experiments has no entry."""
    rows = mean_rows(points)
    groups: dict[str, dict[str, tuple[Curve, Curve]]] = {}
    for experiment in experiments:
        if not any(isinstance(level.load, Open) for level in experiment.levels):
            curves = _curves(experiment, rows, node_gpus)
            groups.setdefault(experiment.workload.label, {})[experiment.name] = curves
    by_lengths = {}
    for lengths, group in groups.items():
        predicted, measured = ({name: curves[side] for name, curves in group.items()} for side in (0, 1))
        if correlations := rank_correlations(predicted, measured):
            by_lengths[lengths] = correlations
    return by_lengths


Rows = dict[tuple[str, str], dict[str, PredictedPoint]]  # (experiment, load) -> metric -> point


def _curves(experiment: MeasuredSweep, rows: Rows, node_gpus: int) -> tuple[Curve, Curve]:
    """The predicted and the measured curve of the levels that have both."""
    scale = node_gpus / experiment.deployment.gpus
    loads = sorted({level.load.value: name_of(level.load) for level in experiment.levels}.items())
    level_rows = [rows[experiment.name, name] for _, name in loads if (experiment.name, name) in rows]
    pairs = [(row["TPOT"], row["requests/s"]) for row in level_rows if {"TPOT", "requests/s"} <= row.keys()]
    return (
        [LevelPoint(tpot.predicted, scale * rate.predicted) for tpot, rate in pairs],
        [LevelPoint(tpot.measured, scale * rate.measured) for tpot, rate in pairs],
    )


def mean_rows(points: Sequence[PredictedPoint]) -> Rows:
    """The points by experiment and load, in order. The repeats of a level become their mean."""
    repeats: dict[tuple[str, str], dict[str, list[PredictedPoint]]] = {}
    for point in points:
        repeats.setdefault((point.experiment, point.load), {}).setdefault(point.metric, []).append(point)
    return {key: {metric: _mean(members) for metric, members in row.items()} for key, row in repeats.items()}


def _mean(points: Sequence[PredictedPoint]) -> PredictedPoint:
    means = {side: statistics.fmean(getattr(point, side) for point in points) for side in ("predicted", "measured")}
    return points[0].model_copy(update=means)


def table(points: Sequence[PredictedPoint]) -> str:
    """A Markdown table: for each experiment and load the predicted and measured figures, and their errors."""
    return macro(ACCURACY, "table", mean_rows(points))


def errors_text(errors: dict[str, float]) -> str:
    return f"{macro(ACCURACY, 'errors', errors)} (median absolute)"


def rankings_text(by_lengths: dict[str, list[TargetCorrelation]]) -> str:
    """One line per workload: the mean correlation, and for every target the number of configurations."""
    return macro(ACCURACY, "rankings", by_lengths)


class LevelPoint(NamedTuple):
    """TPOT and throughput per node of a level."""

    tpot_s: float
    per_node_rps: float


Curve = Sequence[LevelPoint]  # by load


class TargetCorrelation(NamedTuple):
    """Rank correlation of the configurations that reach one TPOT target."""

    tpot_s: float
    configurations: tuple[str, ...]
    correlation: float


def throughput_at(curve: Curve, tpot_s: float) -> float | None:
    """The highest throughput at that TPOT, linear between neighbouring levels; None if no part of the curve has it."""
    values: list[float] = []
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 == x1 == tpot_s:
            values += [y0, y1]
        elif min(x0, x1) <= tpot_s <= max(x0, x1):
            values.append(y0 + (y1 - y0) * (tpot_s - x0) / (x1 - x0))
    return max(values, default=None)


def spearman(values_a: Sequence[float], values_b: Sequence[float]) -> float | None:
    """Spearman's rank correlation of two sequences of one length. None for fewer than two values, or if all values of a
    sequence are equal."""
    ranks_a, ranks_b = _ranks(values_a), _ranks(values_b)
    if len(ranks_a) < 2 or np.ptp(ranks_a) == 0 or np.ptp(ranks_b) == 0:
        return None
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0. Equal values have the mean of their ranks."""
    _, group, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts + 1) / 2
    return means[group]


def rank_correlations(predicted: Mapping[str, Curve], measured: Mapping[str, Curve]) -> list[TargetCorrelation]:
    """Spearman's rank correlation of the configurations by throughput per node, at each TPOT of `TARGETS_S`.

    ``predicted``, ``measured``: configuration -> curve. A configuration counts at a target if its predicted and its
    measured curve both pass through that TPOT. Curves are not extrapolated beyond their lowest and highest level. A
    target is left out if fewer than three configurations count there, or if all of them are equal.
    """
    found = []
    for tpot_s in TARGETS_S:
        rates = {
            name: (predicted_rps, measured_rps)
            for name in predicted
            if (predicted_rps := throughput_at(predicted[name], tpot_s)) is not None
            and (measured_rps := throughput_at(measured[name], tpot_s)) is not None
        }
        if len(rates) < FEWEST_RANKED:
            continue
        correlation = spearman(*zip(*rates.values(), strict=True))
        if correlation is not None:
            found.append(TargetCorrelation(tpot_s, tuple(rates), correlation))
    return found
