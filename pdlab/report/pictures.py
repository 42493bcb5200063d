"""A report as picture files: the plot, pictures over time, and one of each folder of faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdlab.report import chaos as chaos_report
from pdlab.report import curve_figure, paper, plots, replays, soaks, timelines, ttft_parts
from pdlab.report.build import Report


class Picture(NamedTuple):
    """A written file. ``what``: the kind of picture; ``left_out``: what is not in it, in words."""

    what: str
    path: Path
    left_out: str = ""

    @property
    def line(self) -> str:
        return f"{self.what}: {self.path}{self.left_out}"


def draw(
    report: Report, path: str | Path, *, log_latency: bool | None = None, log_load: bool | None = None
) -> list[Picture]:
    """Write every picture, png, svg or pdf by the suffix, into an existing folder. Raises StoreError.

    ``path`` is the first picture's; the other names are made from it. None for a scale: chosen by the values.
    """
    path = Path(path)
    if not report.curves:
        return _draw_faults(report, path, path.stem)
    plots.draw(curve_figure.of_report(report, log_latency=log_latency, log_load=log_load), path)
    made = [Picture("Plot", path)]

    def add(suffix: str, what: str, left_out: str = "") -> Path:
        made.append(Picture(what, path.with_stem(path.stem + suffix), left_out))
        return made[-1].path

    def beyond(most: int, shown: Sequence[object]) -> str:
        return f" ({most} of {len(shown)}, a repeat of each load first)" if len(shown) > most else ""

    if report.soaks:
        left_out = beyond(timelines.MOST, report.soaks)
        paper.draw(soaks.figure(report.soaks), add("-over-time", "Plot over time", left_out))
    if moving := report.timelines:
        left_out = beyond(timelines.MOST, moving)
        paper.draw(timelines.figure(moving), add("-roles", "Plot of load and roles over time", left_out))
    if shown := report.replays:
        left_out = beyond(replays.MOST, shown)
        paper.draw(replays.class_figure(shown), add("-classes", "Plot of replays by turn and length", left_out))
    for number, each in enumerate((each for each in report.replays if each.simulated), start=1):
        suffix = "-replay" if number == 1 else f"-replay-{number}"
        paper.draw(replays.figure(each), add(suffix, f"Plot of {each.label}, measured and simulated"))
    if report.parts:
        parts = ttft_parts.pictured(report.parts)
        paper.draw(parts.file, add("-ttft", "Plot of where TTFT went", parts.left_out))
    return [*made, *_draw_faults(report, path, f"{path.stem}-faults")]


def _draw_faults(report: Report, path: Path, stem: str) -> list[Picture]:
    made = []
    for number, each in enumerate(report.results.chaos, start=1):
        picture = Picture("Plot of faults", path.with_stem(stem if number == 1 else f"{stem}-{number}"))
        paper.draw(chaos_report.figure(each), picture.path)
        made.append(picture)
    return made
