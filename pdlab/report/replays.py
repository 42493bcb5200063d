"""Replays of sessions as sections and pictures. Facts: `pdlab.analysis.replays`.

They show turns, lengths, cached prompts, whole sessions, and the simulation of the same requests beside the
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.analysis.curves import Gpus, gpus_of
from pdlab.analysis.intervals import carried
from pdlab.analysis.loading import Loaded
from pdlab.analysis.replay_verdict import ReplayedDeployment, verdict
from pdlab.analysis.replays import LAST_TURN, LENGTH_STEP, ReplayFacts, TimesOfSome, replay_facts
from pdlab.analysis.ttft_parts import TtftParts
from pdlab.core.commands import PLAN
from pdlab.core.errors import UsageError
from pdlab.core.findings import Finding
from pdlab.core.rendering import macro
from pdlab.core.workload import Replay, Slo
from pdlab.report import timelines
from pdlab.report.figure import DASHED, DOTTED, Figure, Line, PlotPanel, line_panel, stacked
from pdlab.report.section import ASSETS, Section
from pdlab.report.style import HUES
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Run
from pdlab.results.slo import bounds_of_one
from pdlab.results.store import Store

SHOWN = ("p50", "p90", "p99")
OF_CLASSES = ("p50", "p90")
WORDS = ASSETS / "replays.txt"
MOST = 4  # of one picture of classes


class ShownReplay(NamedTuple):
    """One replay: its facts and its requests in bins of time."""

    facts: ReplayFacts
    bins: Sequence[timelines.TimeBin]


class ReplayedLevel(NamedTuple):
    """A level that replays a compiled workload. ``workload``: its label. ``curve``: the deployment's label, on
    ``gpus``. ``simulated``: the same requests, simulated."""

    label: str
    curve: str
    gpus: Gpus
    workload: str
    run: Run
    measured: ShownReplay
    simulated: ShownReplay | None = None

    @property
    def valid(self) -> bool:
        return self.run.validity.valid

    @property
    def facts(self) -> ReplayFacts:
        return self.measured.facts


class FigureRow(NamedTuple):
    """A figure of a replay in the unit in its name, measured and simulated; None: unknown."""

    name: str
    measured: float | None
    simulated: float | None

    @property
    def error_percent(self) -> float | None:
        if not self.measured or self.simulated is None:
            return None
        return 100 * (self.simulated / self.measured - 1)


class ClassRow(NamedTuple):
    """A class of requests; times in ms, None with too few requests. ``simulated_ms``: medians of TTFT and TPOT."""

    name: str
    requests: int
    ttft_ms: tuple[float | None, ...]
    tpot_ms: tuple[float | None, ...]
    simulated_ms: tuple[float | None, ...]


def replays(
    labelled: Sequence[tuple[str, Loaded]], slos: Sequence[Slo] = (), simulated: Sequence[Path] = ()
) -> list[ReplayedLevel]:
    """Every replay of these experiments, with its simulation in the folders of ``simulated``.

    A simulation belongs to the experiment of the same name and the level of the same requests. Raises StoreError, or
    UsageError for a simulation of none of them.
    """
    simulations = {folder: load_experiment(folder) for folder in simulated}
    used: set[Path] = set()
    found = []
    for label, (folder, experiment, *_) in labelled:
        for run in experiment.runs:
            measured = _replayed(folder, run, slos) if isinstance(run.load, Replay) else None
            if measured is None:
                continue
            text = f"{label}, {run.key.stem}" if run.key.repeat or run.key.value != 1 else label
            ours = [
                (path, each)
                for path, simulation in simulations.items()
                if simulation.name == experiment.name
                for each in simulation.runs
                if each.origin == "simulated" and each.key == run.key
                if each.workload.lengths.identity == run.workload.lengths.identity
            ]
            used |= {path for path, _ in ours}
            simulation = _replayed(*ours[0], slos) if ours else None
            workload = run.workload.lengths.label
            found.append(ReplayedLevel(text, label, gpus_of(experiment), workload, run, measured, simulation))
    for folder in simulations:
        if folder not in used:
            raise UsageError(
                f"--simulated {folder}: simulates no replay that is shown; give what {PLAN} --compare --out wrote for "
                "one of them"
            )
    return found


def _replayed(folder: Path, run: Run, slos: Sequence[Slo]) -> ShownReplay | None:
    requests = Store(folder).requests(run.key)
    facts = replay_facts(requests, slos)
    return None if facts is None else ShownReplay(facts, timelines.bins(requests))


def verdicts(levels: Sequence[ReplayedLevel], parts: Sequence[TtftParts] = ()) -> list[Finding]:
    """For each compiled workload and speed that several deployments replayed: the best one, and why."""
    groups: dict[tuple[str, float, str], dict[str, list[ReplayedLevel]]] = {}
    for each in levels:
        key = (each.run.workload.lengths.identity, each.run.key.value, each.run.origin)
        groups.setdefault(key, {}).setdefault(each.curve, []).append(each)
    findings = []
    for (_, speed, origin), members in groups.items():
        deployments = [
            ReplayedDeployment(
                label,
                own[0].gpus.total,
                own[0].gpus.device,
                tuple((each.run, each.facts) for each in own if each.valid),
                next((each for each in parts if (each.label, each.kind, each.load) == (label, "replay", speed)), None),
                failed=sum(not each.valid for each in own),
            )
            for label, own in members.items()
        ]
        workload = next(iter(members.values()))[0].workload
        workload += f" at {speed:g} times its speed" if speed != 1 else ""
        findings += verdict(f"{workload} ({origin})", deployments)
    return findings


def section(each: ReplayedLevel) -> Section:
    """Sentences on sessions and hits, measured and simulated figures, and latencies by class as tables."""
    facts, simulated = each.facts, each.simulated.facts if each.simulated else None
    within = [(bounds_of_one(found.slo), found) for found in facts.within]
    figures = list(figure_rows(facts, simulated)) if simulated else []
    rows = list(class_rows(facts, simulated))
    return Section(macro(WORDS, "title", each), macro(WORDS, "body", facts, within, figures, rows, bool(simulated)))


def figure_rows(measured: ReplayFacts, simulated: ReplayFacts) -> Iterator[FigureRow]:
    """Times in ms; shares in percent."""
    both = (measured, simulated)
    for name in ("ttft", "tpot"):
        for statistic in SHOWN:
            pair = [_known(getattr(each.every, name), each.every.requests, (statistic,))[0] for each in both]
            yield FigureRow(f"{name.upper()} {statistic}, ms", *pair)
    yield FigureRow("requests/s", *(each.requests_per_s for each in both))
    yield FigureRow(
        "cached prompt tokens, %", *(None if each.hit_share is None else 100 * each.hit_share for each in both)
    )
    for statistic in OF_CLASSES:
        pair = [each.completion.percentiles_s[statistic] if each.completion else None for each in both]
        yield FigureRow(f"session completion {statistic}, s", *pair)
    yield FigureRow("normalised interactivity at P90, tokens/s", *(each.interactivity_p90 for each in both))
    for ours, theirs in zip(measured.within, simulated.within, strict=True):
        yield FigureRow(f"sessions/s within {bounds_of_one(ours.slo)}", ours.per_s, theirs.per_s)


def class_rows(measured: ReplayFacts, simulated: ReplayFacts | None) -> Iterator[ClassRow]:
    """By turn, by prompt length, and by whether some of the prompt was cached."""
    other = _classes(simulated) if simulated else {}
    for name, each in _classes(measured).items():
        beside = other.get(name, TimesOfSome(0, None, None))
        yield ClassRow(
            name,
            each.requests,
            _known(each.ttft, each.requests, SHOWN),
            _known(each.tpot, each.requests, OF_CLASSES),
            tuple(_known(of, beside.requests, ("p50",))[0] for of in (beside.ttft, beside.tpot)),
        )


def _classes(facts: ReplayFacts) -> dict[str, TimesOfSome]:
    turns = {f"turn {_turn_name(turn)}": each for turn, each in facts.by_turn.items()}
    lengths = {f"{_length_name(longest, ' ')} tokens": each for longest, each in facts.by_length.items()}
    hits = {"some of the prompt cached": facts.by_hit.hit, "nothing cached": facts.by_hit.miss} if facts.by_hit else {}
    return {**turns, **lengths, **{name: each for name, each in hits.items() if each.requests}}


def _turn_name(turn: int) -> str:
    return f"{turn}{' and later' if turn == LAST_TURN else ''}"


def _length_name(longest: int, gap: str = "\n") -> str:
    return f"{longest // LENGTH_STEP + 1:,}{gap}to {longest:,}"


def _known(latency: object, requests: int, statistics: Sequence[str]) -> tuple[float | None, ...]:
    """Percentiles in ms, without the tails for which there are too few requests."""
    values: Mapping[str, float] = getattr(latency, "percentiles_s", {})
    return tuple(1000 * values[name] if name in values and carried(name, requests) else None for name in statistics)


def figure(each: ReplayedLevel) -> Figure:
    """A replay over time, its simulation beside it."""
    shown = [("measured" if each.run.origin == "measured" else each.run.origin, each.measured)]
    shown += [("simulated", each.simulated)] if each.simulated else []
    series = [
        timelines.TimelineSeries(one.bins, HUES[number], f"{each.label}, {word}")
        for number, (word, one) in enumerate(shown)
    ]
    return stacked(timelines.panels(series, replayed=True), timelines.TIME_NAME)


def class_figure(levels: Sequence[ReplayedLevel]) -> Figure:
    """TTFT and TPOT by turn, and beside it by prompt length, of at most `MOST` replays.

    Medians have circles, 90th percentiles are dashed, and the medians of simulations are dotted with crosses.
    """
    shown = [levels[place] for place in timelines.chosen([each.run for each in levels], MOST)]
    by_turn = _class_figure(shown, "turn", "by_turn", _turn_name)
    return by_turn.beside(_class_figure(shown, "prompt tokens", "by_length", _length_name))


def _class_figure(levels: Sequence[ReplayedLevel], axis: str, of: str, name_of: Callable[[int], str]) -> Figure:
    classes = sorted({key for each in levels for key in getattr(each.facts, of)})
    panels: list[PlotPanel] = []
    for metric in ("ttft", "tpot"):
        lines = [line for number, each in enumerate(levels) for line in _class_lines(each, number, of, metric, classes)]
        name = f"{metric.upper()} by {axis}, ms"
        panels.append(line_panel(name, lines, log=True, height_in=3.0, legend="" if panels else "above"))
    simulated = any(each.simulated for each in levels)
    tails = any(
        y is not None for panel in panels for line in panel.lines if line.dashes == DASHED for _, y in line.points
    )
    # Short, to fit the picture.
    looks = "o p50" + (", dashes p90" if tails else "") + (", dots simulated" if simulated else "")
    ticks = [(_middle(place), name_of(key)) for place, key in enumerate(classes)]
    return stacked(panels, f"{axis} ({looks})", ticks=ticks, ends=float(len(classes)))


def _class_lines(level: ReplayedLevel, number: int, of: str, metric: str, classes: Sequence[int]) -> Iterator[Line]:
    def line(facts: ReplayFacts, statistic: str, label: str = "", **look: Any) -> Line:
        members = [getattr(facts, of).get(key, TimesOfSome(0, None, None)) for key in classes]
        heights = [_known(getattr(one, metric), one.requests, (statistic,))[0] for one in members]
        points = [(_middle(place), height) for place, height in enumerate(heights)]
        return Line(points, HUES[number], label, **look)

    yield line(level.facts, "p50", level.label, marker="o")
    yield line(level.facts, "p90", dashes=DASHED)
    if level.simulated:
        yield line(level.simulated.facts, "p50", dashes=DOTTED, marker="x")


def _middle(place: int) -> float:
    return place + 0.5
