"""Soaks: latencies minute by minute, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pdlab.analysis.loading import Loaded
from pdlab.core import text as core_text
from pdlab.core.rendering import macro
from pdlab.core.text import counted
from pdlab.core.workload import title
from pdlab.report.figure import DASHED, Figure, Line, PlotPanel, line_panel, stacked
from pdlab.report.section import WORDS, Section
from pdlab.report.style import HUES
from pdlab.report.timelines import chosen, repeat_words
from pdlab.results.schema import Distribution, Run, Soak, SoakWindow

ROWS = 20  # most rows of a table; longer soaks show every second minute, and so on
SoakMetric = Literal["tpot", "ttft"]
METRICS: tuple[SoakMetric, ...] = ("tpot", "ttft")
STATISTICS = ("p50", "p95")


def changes(soak: Soak) -> str:
    """How each latency changed, in words."""
    return macro(WORDS, "soak_changes", soak)


class SoakRun(NamedTuple):
    """A run with a ``soak``, and its label."""

    label: str
    run: Run

    @property
    def windows(self) -> tuple[SoakWindow, ...]:
        return self.run.soak.windows if self.run.soak else ()

    @property
    def sentence(self) -> str:
        assert self.run.soak is not None
        return f"{self.label}, {counted(len(self.windows), 'minute')}: {changes(self.run.soak)}"

    def line(self, metric: SoakMetric, statistic: str) -> list[tuple[float, float | None]]:
        """(minute, ms) in the middle of each window that has answers."""
        return [
            ((window.begins_s + window.ends_s) / 120, 1000 * latency.percentiles_s[statistic])
            for window in self.windows
            if (latency := _of(window, metric)) is not None
        ]


def _of(window: SoakWindow, metric: SoakMetric) -> Distribution | None:
    return window.tpot if metric == "tpot" else window.ttft


def held(labelled: Sequence[tuple[str, Loaded]]) -> list[SoakRun]:
    """Every soak of these experiments."""
    soaks = []
    for label, each in labelled:
        for run in each.experiment.runs:
            if run.soak is not None:
                invalid = "" if run.validity.valid else ", not valid"
                nth = repeat_words(run, each.experiment.runs)
                soaks.append(SoakRun(f"{label} at {title(run.load)}{nth}{invalid}", run))
    return soaks


def section(each: SoakRun) -> Section:
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


def figure(soaks: Sequence[SoakRun]) -> Figure:
    """TPOT and TTFT against time, of as many as are `chosen`: medians, and the 95th percentiles dashed."""
    shown = [soaks[place] for place in chosen([each.run for each in soaks])]
    panels: list[PlotPanel] = []
    for metric in METRICS:
        lines = []
        for each, color in zip(shown, HUES, strict=False):
            lines.append(Line(each.line(metric, "p50"), color, each.label))
            lines.append(Line(each.line(metric, "p95"), color, dashes=DASHED))
        name = f"{metric.upper()}, ms (dashed: p95)"
        panels.append(line_panel(name, lines, height_in=2.9, legend="" if panels else "best"))
    return stacked(panels, "minutes since the load began")
