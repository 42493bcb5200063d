"""Levels whose load or roles change, over time: arrivals, TTFT and TPOT by arrival, and the P:D split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlab.analysis.loading import Loaded
from pdlab.analysis.replays import hit_share
from pdlab.core.deployment import Deployment, Fluid
from pdlab.core.mixes import Mixes
from pdlab.core.workload import Open, Replay
from pdlab.report.figure import DASHED, Figure, Legend, Line, PlotPanel, line_panel, stacked, steps
from pdlab.report.section import Section
from pdlab.report.style import HUES
from pdlab.results import roles_log
from pdlab.results.columns import sorted_known
from pdlab.results.level_data import LevelData
from pdlab.results.metrics import percentile
from pdlab.results.roles_log import RoleChange
from pdlab.results.schema import Run
from pdlab.results.store import Store

if TYPE_CHECKING:
    from pdlab.results.level_data import Column, Mask

MOST = 6  # in one picture
BINS, LEAST_BIN_S = 120, 1.0
PANEL_IN = 1.9
TIME_NAME = "seconds since the load began; latencies by the arrival of a request (dashed: p95)"


class TimeBin(NamedTuple):
    """The requests that arrived in a time bin. ``middle_s``: seconds since the level began. Latencies: median and 95th
    percentile in seconds (None: no request has one). ``in_flight``: mean number in flight. ``hit_share``: share of the
    arrived prompt tokens from a cache (None: unknown)."""

    middle_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    in_flight: float
    hit_share: float | None
    ttft_s: tuple[float, float] | None
    tpot_s: tuple[float, float] | None


class Timeline(NamedTuple):
    """A level in bins of time, until the last answer's end, and its role changes."""

    label: str
    run: Run
    bins: Sequence[TimeBin]
    ends_s: float
    changes: tuple[RoleChange, ...]

    @property
    def replays(self) -> bool:
        """Whether it replays a compiled workload."""
        return isinstance(self.run.load, Replay)


def moving(labelled: Sequence[tuple[str, Loaded]]) -> list[Timeline]:
    """The levels with a mix that changes, a replay, or role changes. Raises StoreError."""
    found = []
    for label, (folder, experiment, *_) in labelled:
        for run in experiment.runs:
            nth = repeat_words(run, experiment.runs)
            changes = roles_log.read(folder, run)
            if changes or isinstance(run.workload.lengths, Mixes) or isinstance(run.load, Replay):
                mean = run.workload.mean_rps(run.load) if isinstance(run.load, Open) else run.load.value
                what = "requests/s" if run.key.kind == "rate" else run.key.kind
                origin = "rehearsed" if run.rehearsal else run.origin
                moves = "replay" if isinstance(run.load, Replay) else f"{mean:.3g} {what}"
                text = f"{label}, {moves}, {origin}{nth}"
                requests = Store(folder).requests(run.key)
                ends_s = float(np.max(np.fmax(requests.ended_s, requests.arrival_s), initial=0.0))
                shown = changes or as_launched(experiment.manifest.deployment)
                found.append(Timeline(text, run, bins(requests), ends_s, shown))
    return found


def repeat_words(run: Run, runs: Sequence[Run]) -> str:
    """``, repeat 2`` for one of several runs of a load; empty for the only one."""
    same = [each for each in runs if (each.key.kind, each.key.value) == (run.key.kind, run.key.value)]
    return f", repeat {run.key.repeat + 1}" if len(same) > 1 else ""


def chosen(runs: Sequence[Run], most: int = MOST) -> list[int]:
    """The places of at most ``most`` runs, in their order: one repeat of each load before others of the same."""
    return sorted(sorted(range(len(runs)), key=lambda place: runs[place].key.repeat)[:most])


def as_launched(deployment: Deployment | None) -> tuple[RoleChange, ...]:
    """The fixed split of a fluid pool that was launched with one; else empty."""
    topology = deployment.topology if deployment else None
    if not isinstance(topology, Fluid) or topology.split is None:
        return ()
    return (RoleChange(0.0, *topology.split, "as launched"),)


def bins(requests: LevelData) -> list[TimeBin]:
    """The arrivals in bins of equal length: about `BINS`, of a second at least."""
    if not len(requests):
        return []
    ends_s = float(requests.arrival_s[-1])
    count = max(1, min(BINS, int(ends_s / LEAST_BIN_S)))
    width_s = max(ends_s / count, 1e-9)
    places = np.minimum((requests.arrival_s / width_s).astype(np.int64), count - 1)
    busy_s = _busy_s(requests, width_s, count)
    return [_bin(requests, places == index, index, width_s, float(busy_s[index])) for index in range(count)]


def _bin(requests: LevelData, own: Mask, index: int, width_s: float, busy_s: float) -> TimeBin:
    return TimeBin(
        middle_s=(index + 0.5) * width_s,
        requests_per_s=int(own.sum()) / width_s,
        prompt_tokens_per_s=float(requests.input_tokens[own].sum()) / width_s,
        in_flight=busy_s / width_s,
        hit_share=hit_share(requests, own),
        ttft_s=_middle_and_tail(requests.ttft_s[own]),
        tpot_s=_middle_and_tail(requests.tpot_s[own]),
    )


def _busy_s(requests: LevelData, width_s: float, count: int) -> Column:
    """Of each bin the time that all requests together were in flight in it."""
    ended_s = np.fmax(requests.ended_s, requests.arrival_s)  # NaN: it never ended
    edges_s = width_s * np.arange(count + 1)
    stays_s = ended_s - requests.arrival_s
    until_s = [float(np.clip(edge_s - requests.arrival_s, 0.0, stays_s).sum()) for edge_s in edges_s]
    return np.diff(until_s)


def _middle_and_tail(values_s: Column) -> tuple[float, float] | None:
    ordered = sorted_known(values_s)
    return (percentile(ordered, 50), percentile(ordered, 95)) if len(ordered) else None


def section(each: Timeline) -> Section:
    """The role changes, one a line."""
    if not each.changes:
        return Section(f"Roles over time: {each.label}: none changed")
    lines = [f"{change.at_s:8.1f} s  {change.prefill}:{change.decode}  {change.reason}" for change in each.changes]
    return Section(f"Roles over time (prefill:decode): {each.label}", "\n".join(lines))


class TimelineSeries(NamedTuple):
    """One line of each panel: bins, colour, and name in the legend."""

    bins: Sequence[TimeBin]
    color: str
    label: str


def panels(series: Sequence[TimelineSeries], *, replayed: bool) -> list[PlotPanel]:
    """Load and latencies over time: medians, and the 95th percentiles dashed. ``replayed``: with the number in flight
    and the hit share."""

    def panel(name: str, value: Callable[[TimeBin], float | None], legend: Legend = "") -> PlotPanel:
        lines = [
            Line([(one.middle_s, value(one)) for one in each.bins], each.color, each.label if legend else "")
            for each in series
        ]
        return line_panel(name, lines, height_in=PANEL_IN, legend=legend)

    def latency_panel(name: str, pair_of: Callable[[TimeBin], tuple[float, float] | None], factor: float) -> PlotPanel:
        def line(each: TimelineSeries, statistic: int) -> Line:
            pairs = [(one.middle_s, pair_of(one)) for one in each.bins]
            points = [(x, None if pair is None else factor * pair[statistic]) for x, pair in pairs]
            return Line(points, each.color, dashes=DASHED if statistic else (), width=0.9 if statistic else 1.3)

        lines = [line(each, statistic) for each in series for statistic in (0, 1)]
        return line_panel(name, lines, height_in=PANEL_IN)

    made = [
        panel("requests/s", lambda one: one.requests_per_s, "above"),
        panel("thousand\nprompt tokens/s", lambda one: one.prompt_tokens_per_s / 1000),
        latency_panel("TTFT, s", lambda one: one.ttft_s, 1.0),
        latency_panel("TPOT, ms", lambda one: one.tpot_s, 1000.0),
    ]
    if replayed:
        made.append(panel("in flight", lambda one: one.in_flight))
        made.append(panel("hit share of\nprompt tokens", lambda one: one.hit_share))
    return made


def figure(timelines: Sequence[Timeline]) -> Figure:
    """At most `MOST` of them on one axis of time. Roles are of pools, whose sizes may differ."""
    shown = [timelines[place] for place in chosen([each.run for each in timelines])]
    colors = [HUES[number % len(HUES)] for number in range(len(shown))]
    series = [TimelineSeries(each.bins, color, each.label) for each, color in zip(shown, colors, strict=True)]
    made = panels(series, replayed=any(each.replays for each in shown))
    if changing := [(each, color) for each, color in zip(shown, colors, strict=True) if each.changes]:
        totals = {each.changes[0].prefill + each.changes[0].decode for each, _ in changing}
        of = max(totals)
        if len(totals) == 1:
            lines = [Line(_split_steps(each), color) for each, color in changing]
            made.append(line_panel(f"prefill, of {of}", lines, top=of, height_in=PANEL_IN))
        else:
            lines = [Line(_split_steps(each, share=True), color) for each, color in changing]
            made.append(line_panel("prefill, share\nof the pool", lines, top=1.0, height_in=PANEL_IN))
    return stacked(made, TIME_NAME)


def _split_steps(each: Timeline, *, share: bool = False) -> list[tuple[float, float | None]]:
    """Prefill engines over time. ``share``: of all engines."""
    values = [change.prefill / (change.prefill + change.decode) if share else change.prefill for change in each.changes]
    return steps([*(change.at_s for change in each.changes), each.ends_s], values)
