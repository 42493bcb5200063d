"""A report as pictures: the plot, and beside it one of what moved over time and of each folder of faults."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pdlab.report import chaos as chaos_report
from pdlab.report import curve_figure, plots, replays, soaks, time_figure, timelines, ttft_parts
from pdlab.report.build import Report


class Picture(NamedTuple):
    """A file that was written. ``what``: the kind of picture; ``left_out``: what is not in it, in words."""

    what: str
    path: Path
    left_out: str = ""

    @property
    def line(self) -> str:
        return f"{self.what}: {self.path}{self.left_out}"


def draw(
    report: Report, path: str | Path, *, log_latency: bool | None = None, log_load: bool | None = None
) -> list[Picture]:
    """Write every picture, png, svg or pdf by the suffix; the folder must be there. ``path`` is that of the first, from
    which those of the others are made. None for a scale: chosen by the values. Raises StoreError."""
    path = Path(path)
    if not report.curves:
        return _draw_faults(report, path, path.stem)
    plots.draw(curve_figure.of_report(report, log_latency=log_latency, log_load=log_load), path)
    made = [Picture("Plot", path)]
    if report.soaks:
        made.append(Picture("Plot over time", path.with_stem(f"{path.stem}-over-time")))
        time_figure.draw(soaks.figure(report.soaks), made[-1].path)
    if moving := report.timelines:
        most = timelines.MOST
        left_out = f" (the first {most} of {len(moving)})" if len(moving) > most else ""
        made.append(Picture("Plot of load and roles over time", path.with_stem(f"{path.stem}-roles"), left_out))
        time_figure.draw(timelines.figure(moving), made[-1].path)
    if shown := report.replays:
        left_out = f" (the first {replays.MOST} of {len(shown)})" if len(shown) > replays.MOST else ""
        made.append(Picture("Plot of replays by turn and length", path.with_stem(f"{path.stem}-classes"), left_out))
        by_turn, by_length = replays.class_figures(shown)
        time_figure.draw(by_turn, made[-1].path, by_length)
    for number, each in enumerate((each for each in report.replays if each.simulated), start=1):
        stem = f"{path.stem}-replay" + (f"-{number}" if number > 1 else "")
        made.append(Picture(f"Plot of {each.label}, measured and simulated", path.with_stem(stem)))
        time_figure.draw(replays.figure(each), made[-1].path)
    if report.parts:
        path_of_parts = path.with_stem(f"{path.stem}-ttft")
        parts = ttft_parts.figure(report.parts)
        ttft_parts.draw(parts, path_of_parts)
        made.append(Picture("Plot of where TTFT went", path_of_parts, parts.left_out))
    return [*made, *_draw_faults(report, path, f"{path.stem}-faults")]


def _draw_faults(report: Report, path: Path, stem: str) -> list[Picture]:
    made = []
    for number, each in enumerate(report.results.chaos, start=1):
        picture = Picture("Plot of faults", path.with_stem(stem if number == 1 else f"{stem}-{number}"))
        time_figure.draw(chaos_report.figure(each), picture.path)
        made.append(picture)
    return made
