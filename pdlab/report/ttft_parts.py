"""TTFT breakdown of each load: a table, a sentence for each curve, stacked parts, and the slowest requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pdlab.analysis.loading import Loaded
from pdlab.analysis.ttft_parts import PartsAround, SlowRequest, TtftParts, shown_parts, ttft_parts
from pdlab.core.text import counted, number
from pdlab.report.figure import Axis, Block, Figure, PlotPanel
from pdlab.report.section import Section, of_macro
from pdlab.results.store import MANIFEST, Store
from pdlab.results.timeline import PARTS

MOST_LOADS, MOST_CURVES = 6, 4  # in one picture
OTHER = "other"
LEAST_MS = 1e-6  # below this it is rounding
BAR_INCHES, BARS_BETWEEN = 0.2, 0.7  # width of a stacked bar; space between two curves, in bars
LEAST_BARS = 3  # least width for a curve's name, in bars
HALF_BAR = 0.4
# Parts that are no single stretch of time: they are measured as a sum, and drawn before what they surround.
TWO_WAYS = "two ways in one: front, call, prefill_server"
LOADS_IN, SLOWEST_IN, ABOVE = 4.6, 4.0, 1.05
# By place: grey outside and in servers, blue at prefill, green to red from decode's admission on.
COLORS = {
    "front": "#4d4d4d",
    "server": "#8c8c8c",
    "failed_calls": "#000000",
    "call": "#bfbfbf",
    "prefill_server": "#9ecae1",
    "queue": "#08519c",
    "prefill": "#4292c6",
    "submit": "#d9d9d9",
    "admission": "#a6d96a",
    "post": "#1a9850",
    "transfer": "#fee08b",
    "step_lag": "#f46d43",
    "guard": "#762a83",
    "lost_read": "#e7298a",
    "wait": "#c2a5cf",
    "recompute": "#67001f",
    "first_step": "#d73027",
    "out": "#e6ab02",
    OTHER: "#ffffff",
}


class PartsPictures(NamedTuple):
    """``loads``: requests around each percentile, a panel for each load. ``slowest``: the slowest requests of each
    curve at its highest load; ``caption``: what a reader must know of them. ``left_out``: what the picture file leaves
    out, in words."""

    sentences: list[str]
    loads: Figure
    slowest: Figure
    left_out: str
    caption: str = TWO_WAYS

    @property
    def file(self) -> Figure:
        """Both, the slowest requests of some curves below."""
        (loads,), (slowest,) = self.loads.rows, self.slowest.rows
        columns = max(len(loads), len(slowest[:MOST_CURVES]))
        below = [panel._replace(x=panel.x._replace(label=f"{panel.x.label}\n({self.caption})")) for panel in slowest]
        most = max(panel.x.high - panel.x.low for panel in loads)
        width = max(9.0, max(3.4, 0.8 + BAR_INCHES * most) * columns + 1.3)
        return self.loads._replace(rows=[loads, below[:MOST_CURVES]], width_in=width)


def levels_with_timelines(labelled: Sequence[tuple[str, Loaded]]) -> list[TtftParts]:
    """Of every load of these experiments whose timelines were kept. Raises StoreError."""
    levels = []
    for label, (folder, experiment, *_) in labelled:
        if (folder / MANIFEST).is_file():
            store = Store(folder)
            levels += ttft_parts(label, [(run, store.timelines(run.key)) for run in experiment.runs])
    return levels


class PartsRow(NamedTuple):
    """A row of the table: ``statistic`` and figures in ms, None if no request had the part. ``other_ms``: parts without
    a column."""

    label: str
    where: str
    statistic: str
    ttft_ms: float
    parts_ms: tuple[float | None, ...]
    other_ms: float | None


def section(levels: Sequence[TtftParts]) -> Section:
    """Parts by curve, load and percentile, in ms, and the largest part of each curve at its highest load."""
    names = shown_parts(levels)
    rows = [_row(level, around, names) for level in levels for around in (*level.around, level.mean)]
    return of_macro("ttft_parts", rows, names, levels, sentences(levels))


def _row(level: TtftParts, around: PartsAround, names: Sequence[str]) -> PartsRow:
    parts_ms = tuple(1e3 * around.parts_s[name] if name in around.parts_s else None for name in names)
    other_ms = 1e3 * around.ttft_s - sum(filter(None, parts_ms))
    first = around is (level.around or (level.mean,))[0]
    return PartsRow(
        level.label if first else "",
        level.where if first else "",
        around.statistic,
        1e3 * around.ttft_s,
        parts_ms,
        other_ms if other_ms > LEAST_MS else None,
    )


def sentences(levels: Sequence[TtftParts]) -> list[str]:
    """For each curve at its highest load: the largest part, and what changes it."""
    return [level.finding.text for level in _highest(levels)]


def _highest(levels: Sequence[TtftParts]) -> list[TtftParts]:
    by_curve: dict[str, TtftParts] = {}
    for level in levels:
        known = by_curve.get(level.label)
        if known is None or (known.kind, known.load) <= (level.kind, level.load):
            by_curve[level.label] = level
    return list(by_curve.values())


def _loads(levels: Sequence[TtftParts]) -> dict[str, list[TtftParts]]:
    """The curves by load, for at most `MOST_LOADS` loads: first those with most curves, then higher ones."""
    by_load: dict[tuple[str, float], list[TtftParts]] = {}
    for level in levels:
        by_load.setdefault((level.kind, level.load), []).append(level)
    kept = sorted(by_load, key=lambda key: (len(by_load[key]), key), reverse=True)[:MOST_LOADS]
    return {by_load[key][0].where: by_load[key] for key in sorted(kept)}


def left_out(levels: Sequence[TtftParts]) -> str:
    """What the pictures leave out; may be empty."""
    loads = len({(level.kind, level.load) for level in levels})
    curves = len(_highest(levels))
    lacks = [f"{MOST_LOADS} of {counted(loads, 'load')}"] if loads > MOST_LOADS else []
    lacks += [f"the slowest of {MOST_CURVES} of {counted(curves, 'curve')}"] if curves > MOST_CURVES else []
    return f" ({', '.join(lacks)})" if lacks else ""


def pictured(levels: Sequence[TtftParts]) -> PartsPictures:
    """The pictures of these levels."""
    names = _drawn(levels)
    keys = [(name, COLORS[name], PARTS.get(name, "parts below 1 % each")) for name in names]
    loads = [_stacked(where, curves, names) for where, curves in _loads(levels).items()]
    slowest = [_waterfall(level, names) for level in _highest(levels)]
    return PartsPictures(sentences(levels), Figure([loads], keys=keys), Figure([slowest]), left_out(levels))


def _drawn(levels: Sequence[TtftParts]) -> list[str]:
    """Parts with their own colour: of the means, and of the slowest requests."""
    shown = {*shown_parts(levels)}
    for level in _highest(levels):
        shown |= {name for each in level.slowest for name, seconds in each.parts if seconds >= 0.02 * each.ttft_s}
    return [*(name for name in PARTS if name in shown), OTHER]


def _bar(
    place: float, ttft_s: float, parts: Iterable[tuple[str, float]], names: Sequence[str], *, flat: bool
) -> Iterator[Block]:
    """The parts of a TTFT one after the other, to the right if ``flat``, else upwards."""
    begins_ms = 0.0
    for part, seconds in parts:
        shown, ends_ms = part if part in names else OTHER, begins_ms + 1e3 * seconds
        at, to = (begins_ms, place - HALF_BAR), (ends_ms, place + HALF_BAR)
        name = f"{shown} {number(1e3 * seconds)} of {number(1e3 * ttft_s)} ms"
        yield Block(at, to, COLORS[shown], name) if flat else Block(at[::-1], to[::-1], COLORS[shown], name)
        begins_ms = ends_ms


def _stacked(where: str, levels: Sequence[TtftParts], names: Sequence[str]) -> PlotPanel:
    """The curves at one load: a bar for each percentile."""
    begins, ticks, groups = 0.0, [], []
    blocks: list[Block] = []
    for level in levels:
        room = max(len(level.around), LEAST_BARS)
        for place, around in enumerate(level.around):
            at = begins + place + (room - len(level.around)) / 2
            blocks += _bar(at, around.ttft_s, around.parts_s.items(), names, flat=False)
            ticks.append((at, around.statistic))
        groups.append((begins + (room - 1) / 2, float(room), level.label))
        begins += room + BARS_BETWEEN
    x = Axis("", -0.5 - BARS_BETWEEN / 2, begins - 0.5 - BARS_BETWEEN / 2, ticks=ticks, groups=groups)
    most_ms = max(1e3 * around.ttft_s for level in levels for around in level.around)
    return PlotPanel(Axis("TTFT, ms", high=ABOVE * most_ms), x, blocks=blocks, title=where, height_in=LOADS_IN)


def _waterfall(level: TtftParts, names: Sequence[str]) -> PlotPanel:
    """The slowest requests of a curve, from when each was sent."""
    bars = [_bar(row, each.ttft_s, each.parts, names, flat=True) for row, each in enumerate(level.slowest)]
    count, ticks = len(level.slowest), [(row, _when(each)) for row, each in enumerate(level.slowest)]
    y = Axis("when it was sent", count - 0.4, -0.6, ticks=ticks)
    x = Axis("ms since the request was sent", high=ABOVE * 1e3 * level.slowest[0].ttft_s)
    title = f"the slowest {count} at {level.where}:\n{level.label}"
    return PlotPanel(y, x, blocks=list(chain(*bars)), title=title, height_in=SLOWEST_IN)


def _when(each: SlowRequest) -> str:
    """When it was sent, and its path if that is not the usual one."""
    return f"{each.arrival_s:.1f} s" + (f", {each.path}" if each.path not in ("pd", "collocated") else "")
