"""Curves as a figure that is a value: the picture file and the page draw the same one.

This module alone decides what is drawn: looks and names of series, which levels a line joins, intervals, the levels
that compete for the frontier, and names and scales of axes. For one choice that gives panels of `pdlab.report.figure`:
`pdlab.report.plots` places them in a picture file, and ``assets/report.js`` makes them from the JSON. The page also
computes the ends of axes and the frontiers of the visible series.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from pdlab.analysis.comparable import COMPARED_LOADS, groups
from pdlab.analysis.curves import Curve, Point, Rate, rankable
from pdlab.analysis.intervals import Estimate
from pdlab.analysis.ranking import pareto
from pdlab.analysis.view import View
from pdlab.core import text as core_text
from pdlab.core.bounds import METRICS, Metric, Statistic
from pdlab.core.workload import LoadKind
from pdlab.report import captions, tables
from pdlab.report.build import Report
from pdlab.report.figure import Axis, Label, Line, Place, PlotPanel, page_json
from pdlab.report.highlight import highlighted, named_groups, panels
from pdlab.report.scales import LOGARITHMIC, loads_are_logarithmic, logarithmic, spans
from pdlab.report.style import SOFT, Style, styles, text_color

TAIL: Statistic = "p99"
STATISTICS: tuple[Statistic, ...] = ("mean", "p50", "p90", "p95", "p99")
EVERY = ""  # the group of all series
MARK, THIN_MARK, LOAD_MARK, QUIET_MARK = 6.0, 4.0, 4.5, 2.2  # points
WIDTH_OF_MARK, QUIET_WIDTH = 0.32, 0.7
LATENCIES: dict[str, dict[str, Any]] = {
    "token": {"latency_mode": "token", "use_interactivity": False},
    "first_token": {"latency_mode": "first_token", "use_interactivity": False},
    "chunk": {"latency_mode": "chunk", "use_interactivity": False},
    "interactivity": {"latency_mode": "token", "use_interactivity": True},
    "e2el": {},
}
LOAD_METRICS: tuple[Metric, ...] = ("tpot", "ttft")
METRIC_OF: dict[str, Metric] = {"token": "tpot", "first_token": "ttft", "e2el": "e2el"}

Value = tuple[float, ...]
"""A figure, and where its interval is known the better and the worse end of that."""
TextTable = tuple[tuple[str, ...], ...]
Column = tuple[Value | None, ...]
"""One figure of every level; None where it is not known or has no place."""


class LoadAxis(NamedTuple):
    """``name``: at the axis; ``title``: in the title of a panel; ``level``: one load in words, ``{}`` is its value."""

    name: str
    title: str
    level: str


LOAD_AXES: dict[LoadKind, LoadAxis] = {
    "concurrency": LoadAxis("concurrency (in flight, whole deployment)", "concurrency", "concurrency {}"),
    "rate": LoadAxis("request rate (requests/s, whole deployment)", "request rate", "{} requests/s"),
    "ramp": LoadAxis("end of ramp (requests/s, whole deployment)", "request rate", "ramp to {} requests/s"),
    "replay": LoadAxis("speed of a replay (times that of its source)", "speed of the replay", "replay at {} times"),
}


class Band(NamedTuple):
    """Possible error of a predicted curve: relative half-widths of its latencies."""

    tpot: float
    ttft: float

    def around(self, value: float, metric: str) -> Value:
        """The value with its ends: the worse one is the value times a factor, the better one divided by it."""
        error = 1 + (self.tpot if metric == "tpot" else self.ttft)
        return value, value / error, value * error


class FigureSeries(NamedTuple):
    """A curve. ``ink``: colour of its texts. ``facts``: its size and workload. ``groups``: names of the groups that
    show it. ``published``: it competes with no other."""

    label: str
    name: str
    facts: str
    style: Style
    ink: str
    groups: tuple[str, ...]
    published: bool


class FigureLevel(NamedTuple):
    """A load of a series. ``note``: its requests/s, written beside it. ``summary``: load, repeats and window.
    ``verdict``: valid, or why not. ``left_out``: why repeats of a valid one are left out. ``tables``: its latencies and
    rates in rows of text, heads first; only for a page."""

    series: int
    load: str
    valid: bool
    note: str
    summary: str
    verdict: str
    left_out: str
    tables: tuple[TextTable, ...]


class SeriesLine(NamedTuple):
    """Levels of one kind of load, by load. ``joined``: valid ones; ``off``: the others. ``banded``: those of ``joined``
    with intervals. ``mark``: size of the marks, and ``width`` of the line, in points."""

    series: int
    joined: tuple[int, ...]
    off: tuple[int, ...]
    banded: tuple[int, ...]
    mark: float
    width: float


class ColumnAxis(NamedTuple):
    """``column``: the shown column. ``name``: in a title. ``label``: beside the axis; ``log_label``: the same if it is
    logarithmic. ``log``: names of the groups for which it is logarithmic. ``free``: a reader may choose its scale.
    ``better``: the side of better values, whose intervals are known; empty: none. ``at_values``: ticks are at the
    values.

    It extends beyond the values by ``shares`` of their span (``zero``: from 0, and by shares of the highest). A
    logarithmic axis extends by ``factors``.
    """

    column: str
    name: str
    label: str
    log_label: str
    log: tuple[str, ...] = ()
    free: bool = False
    better: Literal["", "left", "right"] = ""
    at_values: bool = False
    zero: bool = True
    shares: tuple[float, float] = (0.0, 0.08)
    factors: tuple[float, float] = (1.2, 1.2)

    def limits(self, values: Sequence[float], log: bool) -> tuple[float, float]:
        """Ends of the axis for these values."""
        low, high = min(values), max(values)
        if log:
            return low / self.factors[0], high * self.factors[1]
        if self.zero:
            return 0.0, high * (1 + self.shares[1]) or 1.0
        span = high - low or high or 1.0
        return max(0.0, low - self.shares[0] * span), high + self.shares[1] * span

    def axis(self, values: Sequence[float], log: bool) -> Axis:
        """As it is drawn for these values."""
        ends = self.limits(values, log) if values else (0.0, 1.0)
        at = sorted({*values}) if self.at_values else ()
        return Axis(self.log_label if log else self.label, *ends, log, at)


class AxisChoice(NamedTuple):
    """The possible axes of one side of a panel. The key is the choice for each of ``by``, joined by a dot."""

    by: tuple[str, ...]
    axes: Mapping[str, ColumnAxis]

    def of(self, chosen: Mapping[str, str]) -> ColumnAxis:
        return self.axes[".".join(chosen[name] for name in self.by)]


class CurvePanel(NamedTuple):
    """``main``: throughput against latency, with frontiers and names; else a latency against a load."""

    main: bool
    x: AxisChoice
    y: AxisChoice
    lines: tuple[SeriesLine, ...]


class CurveFigure(NamedTuple):
    """``columns``: figures of the levels by name. ``rivals``: levels that compete for one frontier. ``groups``: names
    of comparable groups, largest first. ``facets``: those with a panel of their own in a picture file. ``choices``:
    (key, words) of each choice. ``chosen``: the choices at first. ``beside``: statistics with panels beside each other
    in a picture file. ``remarks`` and ``footnotes``: lines below it."""

    title: str
    subtitle: str
    series: tuple[FigureSeries, ...]
    levels: tuple[FigureLevel, ...]
    columns: Mapping[str, Column]
    panels: tuple[CurvePanel, ...]
    rivals: tuple[tuple[int, ...], ...]
    groups: tuple[str, ...]
    facets: tuple[str, ...]
    choices: Mapping[str, tuple[tuple[str, str], ...]]
    chosen: Mapping[str, str]
    beside: tuple[str, ...]
    remarks: tuple[str, ...]
    footnotes: tuple[str, ...]

    def members(self, group: str) -> list[int]:
        """The series of a group, by index."""
        return [i for i, each in enumerate(self.series) if group in (EVERY, *each.groups)]

    def _known(
        self, panel: CurvePanel, group: str, choice: Mapping[str, str]
    ) -> tuple[list[SeriesLine], dict[int, Place]]:
        """The lines of a group in a panel, and the figures of their levels where both are known."""
        x, y, members = panel.x.of(choice), panel.y.of(choice), self.members(group)
        lines = [line for line in panel.lines if line.series in members]
        at = {}
        for level in sorted(level for line in lines for level in (*line.joined, *line.off)):
            across, up = self.columns[x.column][level], self.columns[y.column][level]
            if across and up:
                at[level] = across[0], up[0]
        return lines, at

    def drawn(self, group: str = EVERY) -> list[int]:
        """The series of a group that a picture file shows in some panel, by index. A facet has the main panel alone."""
        panels = self.panels if len(self.facets) < 2 else self.panels[:1]
        levels = {
            level
            for panel in panels
            for stat in ((self.chosen["stat"],) if panel.main else self.beside)
            for level in self._known(panel, group, {**self.chosen, "stat": stat})[1]
        }
        shown = {self.levels[level].series for level in levels}
        return [i for i in self.members(group) if i in shown]

    def shown(self, panel: CurvePanel, group: str = EVERY, **chosen: str) -> PlotPanel:
        """A panel of a group as a picture file has it, the main one with names and notes. ``chosen`` overrides the
        choices at first."""
        choice = {**self.chosen, **chosen}
        x, y = panel.x.of(choice), panel.y.of(choice)
        log_x, log_y = group in x.log, group in y.log
        lines, at = self._known(panel, group, choice)
        frontiers = []
        for rivals in self.rivals if panel.main else ():
            if placed := [level for level in rivals if level in at]:
                frontiers.append([placed[i] for i in pareto([at[level] for level in placed], x.better == "left")])
        # A logarithmic axis has no 0.
        at = {level: (x, y) for level, (x, y) in at.items() if (x > 0 or not log_x) and (y > 0 or not log_y)}
        frontiers = [[level for level in each if level in at] for each in frontiers]
        xs, ys = ([place[side] for place in at.values()] for side in (0, 1))
        drawn = [each for line in lines for each in self._lines(line, at, self.band(x, y, line)) if each.points]
        return PlotPanel(
            y.axis(ys, log_y),
            x.axis(xs, log_x),
            drawn,
            frontiers=[[at[level] for level in each] for each in frontiers if each],
            labels=list(self._labels(lines, at, {*chain(*frontiers)})) if panel.main else (),
            title=f"{y.name} against {x.name}",
            empty=f"no {x.name if panel.main else y.name} in these runs",
        )

    def band(self, x: ColumnAxis, y: ColumnAxis, line: SeriesLine) -> list[Place]:
        """The outline of the area between the intervals of a line: along the better ends of both figures, and back
        along the worse ends. Empty with fewer than two intervals."""
        pairs = [(self.columns[x.column][level], self.columns[y.column][level]) for level in line.banded]
        ends = [(x[1:], y[1:]) for x, y in pairs if x and y and x[1:] and y[1:]]
        better, worse = ([(x[side], y[side]) for x, y in ends] for side in (0, 1))
        return [*better, *reversed(worse)] if len(ends) > 1 else []

    def _lines(self, line: SeriesLine, at: Mapping[int, Place], area: Sequence[Place]) -> Iterator[Line]:
        """The joined levels with their intervals, and the levels that stand off."""
        of = self.series[line.series].style
        joined, off = ([at[level] for level in levels if level in at] for levels in (line.joined, line.off))
        look: Literal["full", "hollow"] = "hollow" if of.hollow and not of.quiet else "full"
        drawn = Line(joined, of.color, "", of.dashes, line.width, of.marker, line.mark, look, of.quiet, area)
        yield drawn
        yield drawn._replace(points=off, dashes=(), width=0.0, mark=max(line.mark, THIN_MARK), look="crossed", area=())

    def _labels(self, lines: Sequence[SeriesLine], at: Mapping[int, Place], best: Collection[int]) -> Iterator[Label]:
        """Names at the line ends, then notes at the levels, those on a frontier first."""
        # One name for both kinds of load: their lines differ in width.
        for number, line in sorted({line.series: line for line in reversed(lines)}.items()):
            series = self.series[number]
            placed = [at[level] for level in line.joined if level in at]
            if placed and not series.style.quiet:
                yield Label(series.label, placed[-1], (9, 14), 9, series.ink, own=True)
        of = {level: self.series[self.levels[level].series] for level in at}
        for level in sorted(at, key=lambda level: level not in best):
            if not of[level].style.quiet:
                yield Label(self.levels[level].note, at[level], (6, 9, 13), 7.3, of[level].ink)
        # A grey curve is not in the legend: its name is beside its point on the frontier, if there is room.
        last = {self.levels[level].series: level for level in sorted(best) if of[level].style.quiet}
        for number in sorted(last):
            yield Label(self.series[number].label, at[last[number]], (9, 14), 7.3, SOFT)

    def page(self) -> str:
        """The figure for the page, as JSON."""
        left_out = {"title", "subtitle", "facets", "beside", "remarks", "footnotes"}
        return page_json({name: value for name, value in self._asdict().items() if name not in left_out})


def of_report(
    report: Report, *, every: bool = False, log_latency: bool | None = None, log_load: bool | None = None
) -> CurveFigure:
    """The curves of a report; see `curve_figure`."""
    remarks, best = [*report.remarks, *report.doubts], report.best
    return curve_figure(
        report.curves, report.view, every=every, log_latency=log_latency, log_load=log_load, remarks=remarks, best=best
    )


def curve_figure(
    curves: Sequence[Curve],
    view: View,
    *,
    every: bool = False,
    log_latency: bool | None = None,
    log_load: bool | None = None,
    bands: Mapping[str, Band] | None = None,
    notes: Sequence[str] | None = None,
    remarks: Sequence[str] = (),
    best: Sequence[str] = (),
    selected: bool = False,
) -> CurveFigure:
    """The figure of curves.

    ``every``: with all choices of a page's reader, not only ``view``. ``log_latency`` and ``log_load`` None: an axis is
    logarithmic if one curve or load would otherwise compress the others. ``bands``: of predicted curves by name, in
    place of those from repeats. ``notes``: footnotes in place of the usual ones. ``remarks``: darker lines above the
    footnotes. ``best``: labels that get a colour first, if there are too many curves to colour
    (`pdlab.report.highlight`). ``selected``: the curves are some of many, and the frontier is of these.
    """
    return _Builder(curves, view, every, log_latency, log_load, bands or {}).figure(notes, remarks, best, selected)


@dataclass
class _Builder:
    """Makes the parts of a figure; a column is made when an axis first needs it. Fields: those of `curve_figure`."""

    curves: Sequence[Curve]
    view: View
    every: bool
    log_latency: bool | None
    log_load: bool | None
    bands: Mapping[str, Band]
    columns: dict[str, Column] = field(default_factory=dict)
    looks: dict[int, Style] = field(default_factory=dict)

    def __post_init__(self) -> None:
        curves, view = self.curves, self.view
        self.levels = [(i, curve, point) for i, curve in enumerate(curves) for point in curve.points]
        self.kinds = [kind for kind in LOAD_AXES if any(kind in curve.lines() for curve in rankable(curves))]
        named = {name: {id(each) for each in members} for name, members in named_groups(curves, view)}
        self.groups_of = [tuple(n for n in named if id(curve) in named[n]) or (curve.workload,) for curve in curves]
        self.group_names = tuple(dict.fromkeys([*named, *chain(*self.groups_of)]))
        self.latency = "interactivity" if view.use_interactivity else view.latency_mode
        self.per = "whole" if not view.normalized else "gpu" if view.gpus_per_node == 1 else "node"
        self.views = self._views()

    def _views(self) -> dict[str, tuple[View, str]]:
        """The ways to count throughput, with their names."""
        given = self.view
        if not self.every:
            return {self.per: (given, tables.node_name(self.curves, given))}
        node = given if given.normalized else _with(given, normalized=True, role="all")
        unit = tables.unit(self.curves)
        ways = {
            "node": (node, tables.node_name(self.curves, node)),
            "gpu": (_with(node, gpus_per_node=1), unit if node.role == "all" else f"{node.role} {unit}"),
            "whole": (_with(given, normalized=False), tables.node_name(self.curves, _with(given, normalized=False))),
        }
        return ways if node.gpus_per_node > 1 else {"gpu": ways["node"], "whole": ways["whole"]}

    def figure(
        self, notes: Sequence[str] | None, remarks: Sequence[str], best: Sequence[str], selected: bool
    ) -> CurveFigure:
        curves, view = self.curves, self.view
        facets = panels(curves, view)
        chosen = highlighted(curves, view, best)
        for _, members in ((EVERY, curves), *reversed(facets)):
            self.looks |= dict(zip(map(id, members), styles(members, chosen), strict=True))
        statistics, beside = self._statistics()
        latencies = [each for each in LATENCIES if self._is_known(each, statistics)] if self.every else [self.latency]
        rates = tables.RATES if self.every else (view.throughput_metric,)
        shown = [self._main(latencies, statistics, rates)]
        shown += [self._load(kind, metric, statistics) for kind in self.kinds for metric in LOAD_METRICS]
        return CurveFigure(
            title=captions.title(curves, view),
            subtitle=captions.subtitle(curves, view, selected=selected),
            series=tuple(map(self._series, curves, self.groups_of)),
            levels=tuple(self._level(*each, statistics) for each in self.levels),
            columns=self.columns,
            panels=tuple(shown),
            rivals=tuple(self._rivals()),
            groups=self.group_names,
            facets=tuple(name for name, _ in facets),
            choices={
                "latency": tuple((each, self._latency(each)[0]) for each in latencies),
                "stat": tuple((each, "p50 (median)" if each == "p50" else each) for each in statistics),
                "rate": tuple((rate, _rate_name(rate)) for rate in rates),
                "per": tuple((key, name) for key, (_, name) in self.views.items()),
            },
            chosen={"latency": self.latency, "stat": view.statistic, "rate": view.throughput_metric, "per": self.per},
            beside=beside,
            remarks=tuple(captions.wrapped(remarks)),
            footnotes=(
                *captions.wrapped(self._not_placed(hint=notes is None)),
                *(captions.usual_footnotes(curves, view) if notes is None else captions.footnotes(notes)),
            ),
        )

    def _not_placed(self, *, hint: bool) -> list[str]:
        """A note on the curves without the latency of the main panel. ``hint``: with the --stat that shows a curve."""
        column = self.column(_latency_column(self.latency, self.view.statistic))
        placed = {series for (series, _, _), value in zip(self.levels, column, strict=True) if value}
        missing: dict[str, Statistic | None] = {}
        for series, curve in enumerate(self.curves):
            if series not in placed:
                views = {each: _with(self.view, statistic=each) for each in STATISTICS if hint}
                known = (name for name, view in views.items() if any(p.latency(view) is not None for p in curve.points))
                missing[curve.label] = next(known, None)
        latency = f"{self._latency(self.latency)[0]} {self.view.statistic}"
        return [captions.not_placed(latency, missing)] if missing else []

    def _statistics(self) -> tuple[list[Statistic], tuple[Statistic, ...]]:
        """The statistics that may be chosen, and those beside each other in a picture file."""
        points = [point for _, _, point in self.levels]
        known = {statistic for point in points for values in point.latency_ms.values() for statistic in values}
        # Tails are beside the medians. With two kinds of load the picture would be too wide; the tables have them.
        tail = any(point.ms(metric, TAIL) is not None for point in points for metric in LOAD_METRICS)
        beside: tuple[Statistic, ...] = (self.view.statistic, TAIL)
        if len(self.kinds) > 1 or not tail or self.view.statistic == TAIL:
            beside = beside[:1]
        return [each for each in STATISTICS if each in known] if self.every else list(beside), beside

    def _is_known(self, latency: str, statistics: Sequence[Statistic]) -> bool:
        return any(value for each in statistics for value in self.column(_latency_column(latency, each)))

    def _latency(self, key: str) -> tuple[str, str]:
        """Name and unit."""
        if key == "e2el":
            return "E2EL", "ms"
        view = _with(self.view, **LATENCIES[key])
        return view.latency_name, view.latency_unit

    def column(self, name: str) -> Column:
        """One figure of every level. ``name``: a kind of load, a latency and its statistic, or a rate and its unit."""
        if name not in self.columns:
            of, _, choice = name.partition(".")
            self.columns[name] = tuple(self._value(curve, point, of, choice) for _, curve, point in self.levels)
        return self.columns[name]

    def _value(self, curve: Curve, point: Point, of: str, choice: Any) -> Value | None:
        if of in LOAD_AXES:
            return (point.value,) * 3 if point.kind == of else None
        band, estimate = self.bands.get(curve.name), None
        if of in tables.RATES:
            rate: Any = of
            estimate = point.rate_estimate(rate).scaled(curve.scale(self.views[choice][0]))
            if band:
                return (estimate.value,) * 3
        elif of in LATENCIES and of not in METRIC_OF:
            estimate = point.latency_estimate(_with(self.view, statistic=choice, **LATENCIES[of]))
        else:
            metric: Any = of
            estimate = point.ms_estimate(metric, choice)
            if band and estimate:
                return band.around(estimate.value, of)
        if estimate is None:
            return None
        interval = estimate.interval(self.view.confidence)
        if interval is None:
            return (estimate.value,)
        rises = of in tables.RATES or of == "interactivity"
        ends = (interval.high, interval.low) if rises else (interval.low, interval.high)
        return estimate.value, *ends

    def _series(self, curve: Curve, groups_of: tuple[str, ...]) -> FigureSeries:
        look, gpus = self.looks[id(curve)], curve.gpus
        roles = f" ({gpus.prefill} prefill, {gpus.decode} decode)" if gpus.prefill else ""
        facts = f"{core_text.counted(gpus.total, gpus.unit)}{roles}, {curve.workload} tokens"
        return FigureSeries(
            curve.label, curve.name, facts, look, text_color(look.color), groups_of, curve.published is not None
        )

    def _level(self, number: int, curve: Curve, point: Point, statistics: Sequence[Statistic]) -> FigureLevel:
        load = LOAD_AXES[point.kind].level.format(f"{point.value:g}")
        more = f" ({point.excluded} more left out)" if point.excluded else ""
        window = "steady window" if point.window == "steady" else "whole run"
        why = "; ".join(point.reasons)
        return FigureLevel(
            series=number,
            load=load,
            valid=point.valid,
            note=core_text.number(point.requests_per_s * curve.scale(self.view)),
            summary=f"{load}, {core_text.counted(point.repeats, 'repeat')}{more}, {window}",
            verdict="valid" if point.valid else f"not valid: {why}",
            left_out=f"left out: {why}" if point.valid and why else "",
            tables=self._tables(curve, point, statistics) if self.every else (),
        )

    def _tables(self, curve: Curve, point: Point, statistics: Sequence[Statistic]) -> tuple[TextTable, TextTable]:
        def shown(estimate: Estimate | None) -> str:
            return tables.figure(estimate, self.view.confidence)

        known = [each for each in statistics if any(point.ms(metric, each) is not None for metric in METRICS)]
        latencies = [
            (metric.upper(), *(shown(point.ms_estimate(metric, each)) for each in known))
            for metric in METRICS
            if any(point.ms(metric, each) is not None for each in known)
        ]
        rates = [
            (
                _rate_name(rate).removesuffix("/s"),
                *(shown(point.rate_estimate(rate).scaled(curve.scale(view))) for view, _ in self.views.values()),
            )
            for rate in tables.RATES
        ]
        counted = (name for _, name in self.views.values())
        return (("ms", *known), *latencies), (("per second", *counted), *rates)

    def _rivals(self) -> Iterator[tuple[int, ...]]:
        """The valid levels of each group and kind of load: closed and open loops do not compete."""
        for group in groups(self.curves, self.view):
            members = {id(curve) for curve in group.curves}
            valid = {point.kind for curve in group.curves for point in curve.points if point.valid}
            for kind in (kind for kind in COMPARED_LOADS if kind in valid):
                yield tuple(
                    number
                    for number, (_, curve, point) in enumerate(self.levels)
                    if id(curve) in members and point.valid and point.kind == kind
                )

    def _line(self, series: int, kind: LoadKind, mark: float, kept: Collection[int] | None = None) -> SeriesLine:
        of = {
            number: (curve, point)
            for number, (i, curve, point) in enumerate(self.levels)
            if i == series and point.kind == kind and (kept is None or number in kept)
        }
        quiet = self.looks[id(self.curves[series])].quiet
        joined = tuple(number for number, (_, point) in of.items() if point.valid)
        off = tuple(number for number, (_, point) in of.items() if not point.valid)
        # Only intervals of several starts, or of a prediction, are about the configuration and not about one run.
        banded = joined if kept is not None else tuple(number for number in joined if self._has_spread(*of[number]))
        if quiet:
            return SeriesLine(series, joined, off, (), QUIET_MARK, QUIET_WIDTH)
        return SeriesLine(series, joined, off, banded, mark, WIDTH_OF_MARK * mark)

    def _has_spread(self, curve: Curve, point: Point) -> bool:
        return point.repeats > 1 or curve.name in self.bands

    def _main(self, latencies: Sequence[str], statistics: Sequence[Statistic], rates: Sequence[Rate]) -> CurvePanel:
        lines = tuple(
            self._line(i, kind, THIN_MARK if kind == "rate" and len(curve.lines()) > 1 else MARK)
            for i, curve in enumerate(self.curves)
            for kind in curve.lines()
        )
        across = {
            f"{latency}.{statistic}": self._latency_axis(latency, statistic, lines)
            for latency in latencies
            for statistic in statistics
        }
        up = {f"{rate}.{per}": self._rate_axis(rate, per, lines) for rate in rates for per in self.views}
        return CurvePanel(True, AxisChoice(("latency", "stat"), across), AxisChoice(("rate", "per"), up), lines)

    def _latency_axis(self, latency: str, statistic: Statistic, lines: Sequence[SeriesLine]) -> ColumnAxis:
        (name, unit), falls = self._latency(latency), latency != "interactivity"
        column, side = _latency_column(latency, statistic), "left" if falls else "right"
        return ColumnAxis(
            column=column,
            name=name,
            label=f"{name} {statistic}, {unit}  ({side} is better)",
            log_label=f"{name} {statistic}, {unit}  ({side} is better, {LOGARITHMIC})",
            log=self._groups_where(lines, column, lambda *values: falls and self._latency_is_logarithmic(*values)),
            free=falls,
            better="left" if falls else "right",
            zero=False,
            # Room for the names at the line ends, which are at high latency or low interactivity.
            shares=(0.06, 0.12) if falls else (0.18, 0.06),
            factors=(1.12, 1.18),
        )

    def _rate_axis(self, rate: Rate, per: str, lines: Sequence[SeriesLine]) -> ColumnAxis:
        view, counted = self.views[per]
        label = f"{_rate_name(rate)}, {'per ' if view.normalized else ''}{counted}"
        return ColumnAxis(
            column=f"{rate}.{per}",
            name=f"{'request' if rate == 'requests' else rate} throughput".capitalize(),
            label=label,
            log_label=f"{label}  ({LOGARITHMIC})",
            log=self._groups_where(lines, f"{rate}.{per}", lambda valid, _: spans(valid)),
        )

    def _load(self, kind: LoadKind, metric: Metric, statistics: Sequence[Statistic]) -> CurvePanel:
        """Loads of published systems would stretch the axis and are left out."""
        columns = [self.column(f"{metric}.{statistic}") for statistic in statistics]
        kept = {number for column in columns for number, value in enumerate(column) if value}
        found = [self._line(i, kind, LOAD_MARK, kept) for i, each in enumerate(self.curves) if each.published is None]
        lines = tuple(line for line in found if line.joined or line.off)
        loads = [self.levels[number][2].value for line in lines for number in (*line.joined, *line.off)] or [1.0]
        named, room = LOAD_AXES[kind], (max(loads) / min(loads)) ** 0.05 if min(loads) > 0 else 1.0
        across = ColumnAxis(
            column=kind,
            name=named.title,
            label=named.name,
            log_label=f"{named.name.removesuffix(')')}; {LOGARITHMIC})",
            log=self._groups_where(
                lines, kind, lambda _, every: bool(every) and loads_are_logarithmic(sorted({*every}), self.log_load)
            ),
            at_values=True,
            shares=(0.0, 0.05),
            factors=(room, room) if room > 1 else (1.5, 1.5),
        )
        up: dict[str, ColumnAxis] = {each: self._metric_axis(metric, each, lines) for each in statistics}
        return CurvePanel(False, AxisChoice((), {"": across}), AxisChoice(("stat",), up), lines)

    def _metric_axis(self, metric: Metric, statistic: Statistic, lines: Sequence[SeriesLine]) -> ColumnAxis:
        label, column = f"{metric.upper()} {statistic}, ms", f"{metric}.{statistic}"
        return ColumnAxis(
            column=column,
            name=metric.upper() if statistic == "p50" else f"{metric.upper()} {statistic}",
            label=label,
            log_label=f"{label} ({LOGARITHMIC})",
            log=self._groups_where(lines, column, self._latency_is_logarithmic),
            free=True,
            factors=(1.25, 1.25),
        )

    def _latency_is_logarithmic(self, valid: Sequence[Sequence[float]], every: Sequence[float]) -> bool:
        has_a_place = any(value > 0 for value in every)
        return has_a_place and (logarithmic(valid) if self.log_latency is None else self.log_latency)

    def _groups_where(
        self, lines: Sequence[SeriesLine], column: str, rule: Callable[[list[list[float]], list[float]], bool]
    ) -> tuple[str, ...]:
        """Names of the groups for which the rule holds, given the valid values of each series and all values."""
        values = {number: value[0] for number, value in enumerate(self.column(column)) if value}

        def holds(group: str) -> bool:
            shown = [line for line in lines if group in (EVERY, *self.groups_of[line.series])]
            valid: dict[int, list[float]] = {line.series: [] for line in shown}
            for line in shown:
                valid[line.series] += [values[number] for number in line.joined if number in values]
            every = [values[number] for line in shown for number in (*line.joined, *line.off) if number in values]
            return rule(list(valid.values()), every)

        return tuple(group for group in (EVERY, *self.group_names) if holds(group))


def _latency_column(latency: str, statistic: Statistic) -> str:
    return f"{METRIC_OF.get(latency, latency)}.{statistic}"


def _rate_name(rate: Rate) -> str:
    return "requests/s" if rate == "requests" else f"{rate} tokens/s"


def _with(view: View, **update: Any) -> View:
    return view.model_copy(update=update)
