"""Replays of sessions as sections and pictures: turns, lengths, cached prompts, whole sessions, and the simulation of
the same requests beside what was measured. Facts: `pdlab.analysis.replays`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pdlab.analysis.curves import short_labels
from pdlab.analysis.intervals import MIN_BEYOND, beyond, is_tail
from pdlab.analysis.replays import LAST_TURN, LENGTH_STEP, Latencies, ReplayFacts, replay_facts
from pdlab.core.errors import UsageError
from pdlab.core.rendering import said
from pdlab.core.workload import Replay, Slo
from pdlab.report import timelines
from pdlab.report.section import Section
from pdlab.report.style import HUES, STYLE_FILE, save
from pdlab.report.time_figure import TimeFigure
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Experiment, RequestRecord, Run
from pdlab.results.slo import bounds_of_one
from pdlab.results.store import Store

SHOWN = ("p50", "p90", "p99")
OF_CLASSES = ("p50", "p90")
WORDS = Path(__file__).parent / "assets" / "replays.txt"
MOST = 4  # of one picture of classes
CLASSES_IN = (9.0, 6.0)


class Replayed(NamedTuple):
    """One replay: its facts and its requests."""

    facts: ReplayFacts
    records: tuple[RequestRecord, ...]


class ReplayedLevel(NamedTuple):
    """A level that replays a compiled workload; ``workload``: its label. ``simulated``: its requests, simulated."""

    label: str
    workload: str
    run: Run
    measured: Replayed
    simulated: Replayed | None = None

    @property
    def valid(self) -> bool:
        return self.run.validity.valid

    @property
    def facts(self) -> ReplayFacts:
        return self.measured.facts


class FigureRow(NamedTuple):
    """A figure of a replay in the unit that its name has, measured and simulated; None: not known."""

    name: str
    measured: float | None
    simulated: float | None

    @property
    def error_percent(self) -> float | None:
        if not self.measured or self.simulated is None:
            return None
        return 100 * (self.simulated / self.measured - 1)


class ClassRow(NamedTuple):
    """A class of requests; times in ms, None where so few requests do not carry them. ``simulated_ms``: the medians of
    TTFT and TPOT."""

    name: str
    requests: int
    ttft_ms: tuple[float | None, ...]
    tpot_ms: tuple[float | None, ...]
    simulated_ms: tuple[float | None, ...]


def replays(
    experiments: Sequence[tuple[Path, Experiment]], slos: Sequence[Slo] = (), simulated: Sequence[Path] = ()
) -> list[ReplayedLevel]:
    """Every replay in these folders, with its simulation in the folders of ``simulated``: the experiment of the same
    name, the level of the same requests. Raises StoreError, or UsageError for a simulation of none of them."""
    simulations = {folder: load_experiment(folder) for folder in simulated}
    used: set[Path] = set()
    found = []
    labels = short_labels([experiment for _, experiment in experiments])
    for label, (folder, experiment) in zip(labels, experiments, strict=True):
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
            found.append(ReplayedLevel(text, run.workload.lengths.label, run, measured, simulation))
    for folder in simulations:
        if folder not in used:
            raise UsageError(
                f"--simulated {folder}: simulates no replay that is shown; give what plan.py --compare --out wrote for "
                "one of them"
            )
    return found


def _replayed(folder: Path, run: Run, slos: Sequence[Slo]) -> Replayed | None:
    records = Store(folder).read_records(run.key)
    facts = replay_facts(records, slos)
    return None if facts is None else Replayed(facts, records)


def section(each: ReplayedLevel) -> Section:
    """Sentences on sessions and hits, measured and simulated figures, and latencies by class as tables."""
    facts, simulated = each.facts, each.simulated.facts if each.simulated else None
    within = [(bounds_of_one(found.slo), found) for found in facts.within]
    figures = list(figure_rows(facts, simulated)) if simulated else []
    rows = list(class_rows(facts, simulated))
    return Section(said(WORDS, "title", each), said(WORDS, "body", facts, within, figures, rows, bool(simulated)))


def figure_rows(measured: ReplayFacts, simulated: ReplayFacts) -> Iterator[FigureRow]:
    """Latencies in ms; shares in percent."""
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
        beside = other.get(name, Latencies(0, None, None))
        yield ClassRow(
            name,
            each.requests,
            _known(each.ttft, each.requests, SHOWN),
            _known(each.tpot, each.requests, OF_CLASSES),
            tuple(_known(of, beside.requests, ("p50",))[0] for of in (beside.ttft, beside.tpot))
            if beside
            else (None,) * 2,
        )


def _classes(facts: ReplayFacts) -> dict[str, Latencies]:
    hits = {"some of the prompt cached": facts.by_hit.hit, "nothing cached": facts.by_hit.miss} if facts.by_hit else {}
    return {**_turns(facts), **_lengths(facts), **{name: each for name, each in hits.items() if each.requests}}


def _turns(facts: ReplayFacts) -> dict[str, Latencies]:
    return {f"turn {turn}{' and later' if turn == LAST_TURN else ''}": each for turn, each in facts.by_turn.items()}


def _lengths(facts: ReplayFacts) -> dict[str, Latencies]:
    return {f"{longest // LENGTH_STEP + 1:,} to {longest:,} tokens": each for longest, each in facts.by_length.items()}


def _known(latency: object, requests: int, statistics: Sequence[str]) -> tuple[float | None, ...]:
    """Percentiles in ms, without the tails that so few requests do not carry."""
    values: Mapping[str, float] = getattr(latency, "percentiles_s", {})
    carried = [name for name in statistics if not is_tail(name) or beyond(name, requests) >= MIN_BEYOND]
    return tuple(1000 * values[name] if name in carried and name in values else None for name in statistics)


def figure(each: ReplayedLevel) -> TimeFigure:
    """A replay over time, its simulation beside it."""
    shown = [("measured" if each.run.origin == "measured" else each.run.origin, each.measured)]
    shown += [("simulated", each.simulated)] if each.simulated else []
    series = [
        timelines.Series(timelines.bins(one.records), HUES[number], f"{each.label}, {word}")
        for number, (word, one) in enumerate(shown)
    ]
    return TimeFigure(timelines.panels(series, replayed=True), timelines.TIME_NAME, "s")


def draw_classes(levels: Sequence[ReplayedLevel], path: Path) -> None:
    """TTFT and TPOT by turn and by prompt length, at most `MOST` replays: medians, 90th percentiles dashed, and the
    medians of simulations dotted with hollow marks. Raises StoreError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    with plt.style.context(STYLE_FILE):
        figure, grid = plt.subplots(2, 2, figsize=CLASSES_IN, sharex="col", layout="constrained")
        try:
            for column, (of, axis_name) in enumerate(((_turns, "turn"), (_lengths, "prompt tokens"))):
                names = list(dict.fromkeys(name for each in levels[:MOST] for name in of(each.facts)))
                for row, (metric, unit) in enumerate((("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"))):
                    axes = grid[row][column]
                    for number, each in enumerate(levels[:MOST]):
                        lines = [(each.facts, "p50", "solid", "o", each.label), (each.facts, "p90", "dashed", "", None)]
                        lines += [(each.simulated.facts, "p50", "dotted", "s", None)] if each.simulated else []
                        for facts, statistic, dash, mark, label in lines:
                            classes = of(facts)
                            ys = [
                                _known(getattr(classes[name], metric), classes[name].requests, (statistic,))[0]
                                if name in classes
                                else None
                                for name in names
                            ]
                            face = "white" if dash == "dotted" else None
                            look = {"linestyle": dash, "marker": mark, "markerfacecolor": face, "label": label}
                            points = [float("nan") if y is None else y for y in ys]
                            axes.plot(range(len(names)), points, color=HUES[number % len(HUES)], markersize=4, **look)
                    axes.set_yscale("log")
                    axes.yaxis.set_major_formatter(LogFormatter())
                    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.7)))
                    axes.set_ylabel(unit)
                    short = [
                        name.removeprefix("turn ").removesuffix(" tokens").replace(" to ", "\nto ") for name in names
                    ]
                    axes.set_xticks(range(len(names)), short, fontsize=7)
                    axes.set_xlabel(axis_name if row else "")
            handles, labels = grid[0][0].get_legend_handles_labels()
            figure.suptitle("solid: p50, dashed: p90, dotted with squares: p50 simulated", fontsize=9)
            figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
            save(figure, path)
        finally:
            plt.close(figure)
