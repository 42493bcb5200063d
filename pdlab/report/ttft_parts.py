"""TTFT breakdown of each load: a table, a sentence for each curve, stacked parts, and the slowest requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from pdlab.analysis.curves import short_labels
from pdlab.analysis.ttft_parts import PartsAround, SlowRequest, TtftParts, shown_parts, ttft_parts
from pdlab.core.rendering import said
from pdlab.report import tables
from pdlab.report.section import Section
from pdlab.report.style import picture
from pdlab.results.schema import Experiment
from pdlab.results.store import MANIFEST, Store
from pdlab.results.timeline import PARTS

MOST_LOADS, MOST_CURVES = 6, 4  # in one picture
OTHER = "other"
LEAST_MS = 1e-6  # below this it is rounding
BAR_INCHES, BARS_BETWEEN = 0.2, 0.7  # width of a stacked bar; space between two curves, in bars
LEAST_BARS, BAR_CHARS = 3, 3.3  # least width for a curve's name, in bars; characters per bar
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
    "wait": "#c2a5cf",
    "recompute": "#67001f",
    "first_step": "#d73027",
    "out": "#e6ab02",
    OTHER: "#ffffff",
}


class PartPiece(NamedTuple):
    """A part in a bar, in ms from its begin."""

    name: str
    begins_ms: float
    ms: float
    color: str


class PartBar(NamedTuple):
    """``name``: beside it; its pieces, and the whole in ms."""

    name: str
    ms: float
    pieces: tuple[PartPiece, ...]


class BarGroup(NamedTuple):
    """Bars of a curve at a load. ``widest_ms``: the longest of these bars and of those compared with them."""

    label: str
    where: str
    bars: tuple[PartBar, ...]
    widest_ms: float


class PartsFigure(NamedTuple):
    """Data for the picture file and the page. ``legend``: (part, colour, meaning). ``loads``: requests around each
    percentile, by load and curve. ``slowest``: the slowest requests of each curve at its highest load, by time."""

    sentences: list[str]
    legend: list[tuple[str, str, str]]
    loads: dict[str, list[BarGroup]]
    slowest: list[BarGroup]
    left_out: str


def told(experiments: Sequence[tuple[Path, Experiment]]) -> list[TtftParts]:
    """Of every load of these folders' experiments whose timelines were kept. Raises StoreError."""
    levels = []
    labels = short_labels([experiment for _, experiment in experiments])
    for label, (folder, experiment) in zip(labels, experiments, strict=True):
        if (folder / MANIFEST).is_file():
            store = Store(folder)
            levels += ttft_parts(label, [(run, store.read_timelines(run.key)) for run in experiment.runs])
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
    text = said(tables.ASSETS / "sections.txt", "ttft_parts", rows, names, levels, sentences(levels))
    title, _, body = text.partition("\n")
    return Section(title, body)


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
    lacks = [f"{MOST_LOADS} of {loads} loads"] if loads > MOST_LOADS else []
    lacks += [f"the slowest of {MOST_CURVES} of {curves} curves"] if curves > MOST_CURVES else []
    return f" ({', '.join(lacks)})" if lacks else ""


def figure(levels: Sequence[TtftParts]) -> PartsFigure:
    """The bars of these levels."""
    names = _drawn(levels)

    def bar(name: str, ttft_s: float, parts: Iterable[tuple[str, float]]) -> PartBar:
        pieces, at_ms = [], 0.0
        for part, seconds in parts:
            shown = part if part in names else OTHER
            pieces.append(PartPiece(shown, at_ms, 1e3 * seconds, COLORS[shown]))
            at_ms += 1e3 * seconds
        return PartBar(name, 1e3 * ttft_s, tuple(pieces))

    def percentiles(level: TtftParts) -> tuple[PartBar, ...]:
        return tuple(bar(each.statistic, each.ttft_s, each.parts_s.items()) for each in level.around)

    loads = {}
    for where, curves in _loads(levels).items():
        widest_ms = max(1e3 * around.ttft_s for level in curves for around in level.around)
        loads[where] = [BarGroup(level.label, where, percentiles(level), widest_ms) for level in curves]
    slowest = [
        BarGroup(
            level.label,
            level.where,
            tuple(bar(_when(each), each.ttft_s, each.parts) for each in level.slowest),
            1e3 * level.slowest[0].ttft_s,
        )
        for level in _highest(levels)
    ]
    legend = [(name, COLORS[name], PARTS.get(name, "parts below 1 % each")) for name in names]
    return PartsFigure(sentences(levels), legend, loads, slowest, left_out(levels))


def draw(spec: PartsFigure, path: Path) -> None:
    """Above, a panel for each load; below, the slowest requests of some curves (png, svg or pdf). Raises StoreError."""
    from matplotlib.patches import Patch

    slowest = spec.slowest[:MOST_CURVES]
    columns = max(len(spec.loads), len(slowest))
    most = max(sum(_room(group) + BARS_BETWEEN for group in groups) for groups in spec.loads.values())
    width = max(9.0, max(3.4, 0.8 + BAR_INCHES * most) * columns + 1.3)
    with picture(path, figsize=(width, 8.6), layout="constrained") as figure:
        above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        grid = above.subplots(1, len(spec.loads), squeeze=False)[0]
        for axes, (where, groups) in zip(grid, spec.loads.items(), strict=True):
            _stacked(axes, where, groups)
        for axes, group in zip(below.subplots(1, len(slowest), squeeze=False)[0], slowest, strict=True):
            _waterfall(axes, group)
        edge: dict[str, Any] = {"edgecolor": "#444444", "linewidth": 0.4}
        handles = [Patch(facecolor=color, label=name, **edge) for name, color, _ in spec.legend]
        figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8, reverse=True)


def _drawn(levels: Sequence[TtftParts]) -> list[str]:
    """Parts with their own colour: of the means, and of the slowest requests."""
    shown = {*shown_parts(levels)}
    for level in _highest(levels):
        shown |= {name for each in level.slowest for name, seconds in each.parts if seconds >= 0.02 * each.ttft_s}
    return [*(name for name in PARTS if name in shown), OTHER]


def _room(group: BarGroup) -> int:
    """Width of a curve beside others of its load, in bars."""
    return max(len(group.bars), LEAST_BARS)


def _stacked(axes: Any, where: str, groups: Sequence[BarGroup]) -> None:
    begins, ticks, labels = 0.0, [], []
    for group in groups:
        room = _room(group)
        for number, bar in enumerate(group.bars):
            at = begins + number + (room - len(group.bars)) / 2
            for _, bottom, ms, color in bar.pieces:
                axes.bar(at, ms, 0.8, bottom=bottom, color=color, edgecolor="#444444", linewidth=0.3)
            ticks.append(at)
            labels.append(bar.name)
        axes.annotate(
            "\n".join(wrap(group.label, int(BAR_CHARS * room))),
            (begins + (room - 1) / 2, 0),
            xytext=(0, -26),
            textcoords="offset points",
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=6.5,
            annotation_clip=False,
        )
        begins += room + BARS_BETWEEN
    axes.set_xticks(ticks, labels, fontsize=7, rotation=90)
    axes.set_xlim(-0.5 - BARS_BETWEEN / 2, begins - 0.5 - BARS_BETWEEN / 2)
    axes.grid(visible=False, axis="x")
    axes.set_title(where, fontsize=9)
    axes.set_ylabel("TTFT, ms")
    axes.set_ylim(bottom=0)


def _waterfall(axes: Any, group: BarGroup) -> None:
    for row, bar in enumerate(group.bars):
        for _, left, ms, color in bar.pieces:
            axes.barh(row, ms, 0.82, left=left, color=color, edgecolor="#444444", linewidth=0.2)
    axes.set_yticks(range(len(group.bars)), [bar.name for bar in group.bars], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the request was sent")
    axes.set_title(f"the slowest {len(group.bars)} at {group.where}:\n{group.label}", fontsize=8)
    axes.set_ylabel("when it was sent", fontsize=7)
    axes.grid(visible=False, axis="y")


def _when(each: SlowRequest) -> str:
    """When it was sent, and its path if that is not the usual one."""
    return f"{each.arrival_s:.1f} s" + (f", {each.path}" if each.path not in ("pd", "collocated") else "")
