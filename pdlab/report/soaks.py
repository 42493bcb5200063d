"""Loads that were held for long: latencies minute by minute, as a table, as a picture and as a drawing in a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pdlab.analysis.curves import short_labels
from pdlab.core import text as core_text
from pdlab.report.section import Section
from pdlab.report.style import HUES, STYLE_FILE, save
from pdlab.results.schema import Distribution, Experiment, Run, SoakWindow
from pdlab.results.soak import changes

ROWS = 20  # of a table; longer ones show every second minute, and so on
SoakMetric = Literal["tpot", "ttft"]
METRICS: tuple[SoakMetric, ...] = ("tpot", "ttft")
STATISTICS = ("p50", "p95")
PANEL = (9.0, 2.9)
WIDTH, HEIGHT, LEFT, BELOW = 640, 170, 58, 26  # of a drawing in a page


class Held(NamedTuple):
    """A run with a ``soak``, and its label."""

    label: str
    run: Run

    @property
    def windows(self) -> tuple[SoakWindow, ...]:
        return self.run.soak.windows if self.run.soak else ()

    @property
    def sentence(self) -> str:
        assert self.run.soak is not None
        return f"{self.label}, {len(self.windows)} minutes: {changes(self.run.soak)}"

    def line(self, metric: SoakMetric, statistic: str) -> list[tuple[float, float]]:
        """(minute, ms) in the middle of each window that has answers."""
        return [
            ((window.begins_s + window.ends_s) / 120, 1000 * latency.percentiles_s[statistic])
            for window in self.windows
            if (latency := _of(window, metric)) is not None
        ]


def _of(window: SoakWindow, metric: SoakMetric) -> Distribution | None:
    return window.tpot if metric == "tpot" else window.ttft


def held(experiments: Sequence[Experiment]) -> list[Held]:
    """Every run of the experiments that was held for long."""
    soaks = []
    for label, experiment in zip(short_labels(experiments), experiments, strict=True):
        for run in experiment.runs:
            if run.soak is not None:
                load = f"{run.load.value:g} requests/s" if run.key.kind == "rate" else f"concurrency {run.load.value:g}"
                invalid = "" if run.validity.valid else ", not valid"
                soaks.append(Held(f"{label} at {load}{invalid}", run))
    return soaks


def section(each: Held) -> Section:
    """The change as the title, and the minutes as a table."""
    step = -(-len(each.windows) // ROWS)
    rows = []
    for window in each.windows[::step]:
        cells = [
            core_text.number(1000 * latency.percentiles_s[statistic]) if (latency := _of(window, metric)) else "-"
            for metric in METRICS
            for statistic in STATISTICS
        ]
        made = core_text.number(window.output_tokens_per_s)
        rows.append([f"{window.begins_s / 60:.0f} to {window.ends_s / 60:.0f}", str(window.requests), *cells, made])
    head = ["minute", "requests", *(f"{metric.upper()} {s}, ms" for metric in METRICS for s in STATISTICS)]
    return Section(f"Over time: {each.sentence}", core_text.table([*head, "output tok/s"], rows, left=(0,)))


def draw(soaks: Sequence[Held], path: Path) -> None:
    """TPOT and TTFT against time (png, svg or pdf): medians, and the 95th percentiles dashed. Raises StoreError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context(STYLE_FILE):
        figure, panels = plt.subplots(
            len(METRICS), 1, figsize=(PANEL[0], len(METRICS) * PANEL[1]), sharex=True, layout="constrained"
        )
        try:
            for axes, metric in zip(panels, METRICS, strict=True):
                for number, each in enumerate(soaks):
                    color = HUES[number % len(HUES)]
                    for statistic, look in zip(STATISTICS, ("-", "--"), strict=True):
                        line = each.line(metric, statistic)
                        label = each.label if statistic == "p50" else None
                        axes.plot([x for x, _ in line], [y for _, y in line], look, color=color, label=label)
                axes.set_ylim(bottom=0)
                axes.set_ylabel(f"{metric.upper()}, ms (dashed: p95)")
            panels[-1].set_xlabel("minutes since the load began")
            panels[0].legend(frameon=False, fontsize=8)
            save(figure, path)
        finally:
            plt.close(figure)


def drawing(each: Held, metric: SoakMetric) -> str:
    """One latency over time as SVG for a page, of numbers and fixed words alone; empty without data."""
    lines = {statistic: each.line(metric, statistic) for statistic in STATISTICS}
    values = [y for line in lines.values() for _, y in line]
    if not values or max(values) <= 0:
        return ""
    most, ends = max(values) * 1.08, max(each.windows[-1].ends_s / 60, 1e-9)

    def at(x: float, y: float) -> str:
        return f"{LEFT + x / ends * (WIDTH - LEFT - 8):.1f},{(1 - y / most) * (HEIGHT - BELOW):.1f}"

    def point(line: list[tuple[float, float]], color: str, dash: str) -> str:
        places = " ".join(at(x, y) for x, y in line)
        return f'<polyline fill="none" stroke="{color}" stroke-width="1.6"{dash} points="{places}"/>'

    floor = HEIGHT - BELOW
    marks = [
        f'<path d="M{LEFT},0V{floor}H{WIDTH - 8}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="11" text-anchor="end">{core_text.plain(most)}</text>',
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 8}">0</text>',
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">{core_text.plain(ends)} minutes</text>',
        f'<text x="{LEFT + 8}" y="11">{metric.upper()}, ms (median; dashed: p95)</text>',
        point(lines["p50"], HUES[0], ""),
        point(lines["p95"], HUES[1], ' stroke-dasharray="5 3"'),
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" font-size="11" '
        f'fill="currentColor" aria-label="{metric.upper()} over time">{"".join(marks)}</svg>'
    )
