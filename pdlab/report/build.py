"""Measurements -> a report as a value: curves, comparisons, answers and notes, without any layout.

`pdlab.report.text`, `pdlab.report.pictures` and `pdlab.report.html` print it, draw it and write it as a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pdlab.analysis import curves as analysis
from pdlab.analysis import goodput, loading, published_tables, ranking
from pdlab.analysis.audit import rules
from pdlab.analysis.audit.registry import AuditFinding
from pdlab.analysis.crossovers import GroupCrossovers, group_crossovers
from pdlab.analysis.curves import Curve, LevelCost, level_costs, rankable
from pdlab.analysis.goodput import SloRanking
from pdlab.analysis.headline import Compared, compared
from pdlab.analysis.ranking import BoundsRanking, Frontier, bounds_rankings, frontiers
from pdlab.analysis.ttft_parts import TtftParts
from pdlab.analysis.tuning import judged_again
from pdlab.analysis.view import View
from pdlab.core.arguments import SLO_QUANTILE
from pdlab.core.bounds import Bounds, parse_bounds
from pdlab.core.command_lines import command_line
from pdlab.core.errors import UsageError
from pdlab.core.findings import Finding, found
from pdlab.core.text import listed
from pdlab.core.workload import Replay, Slo, parse_slo
from pdlab.report import replays, soaks, timelines, ttft_parts, whole_nodes
from pdlab.report.load import Results
from pdlab.report.replays import ReplayedLevel
from pdlab.report.soaks import SoakRun
from pdlab.report.timelines import Timeline
from pdlab.results.published_curves import unmarked_repeats
from pdlab.results.store import bounds_in_files

MOST_NAMED = 3  # files of one load in a note


@dataclass(frozen=True, eq=False)
class Report:
    """The results in one view. Without load levels ``curves`` is empty, and only the faults are there.

    ``view``: with a latency that some level has. ``left_out``: labels of curves without GPUs of the view's role.
    ``at``: the latency bounds of the answers. ``slo_rankings``: answers to SLOs. ``price_per_gpu_hour``: None: without
    costs. ``remarks``: the caller's own lines. ``notes``: caveats for the reader. ``parts``: TTFT breakdown by curve
    and load, if timelines were kept.
    """

    results: Results
    view: View
    curves: tuple[Curve, ...] = ()
    left_out: tuple[str, ...] = ()
    at: tuple[Bounds, ...] = ()
    slo_rankings: tuple[SloRanking, ...] = ()
    price_per_gpu_hour: float | None = None
    remarks: tuple[str, ...] = ()
    notes: tuple[Finding, ...] = ()
    soaks: tuple[SoakRun, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    replays: tuple[ReplayedLevel, ...] = ()
    parts: tuple[TtftParts, ...] = ()

    @cached_property
    def comparison(self) -> Compared:
        """Whole curves compared."""
        return compared(self.curves, self.view)

    @cached_property
    def bounds_rankings(self) -> tuple[tuple[BoundsRanking, ...], ...]:
        """For each of ``at`` the rankings within it, by kind of load and group."""
        return tuple(tuple(bounds_rankings(self.curves, bounds, self.view)) for bounds in self.at)

    @property
    def best(self) -> tuple[str, ...]:
        """Labels of those with the highest throughput within the bounds and SLOs, each once."""
        rankings = [*(bounds_ranking.ranking for answers in self.bounds_rankings for bounds_ranking in answers)]
        rankings += [slo_ranking.ranking for slo_ranking in self.slo_rankings]
        return tuple(dict.fromkeys(ranking[0].label for ranking in rankings if ranking))

    @cached_property
    def frontiers(self) -> tuple[Frontier, ...]:
        """The Pareto frontiers, one for each kind of load and group."""
        return tuple(frontiers(self.curves, self.view))

    @cached_property
    def crossovers(self) -> tuple[GroupCrossovers, ...]:
        """The best configuration by throughput, for each kind of load and group."""
        return tuple(group_crossovers(self.curves, self.view))

    @cached_property
    def replay_verdicts(self) -> tuple[Finding, ...]:
        """The best deployment for each workload that several replayed, and why."""
        return tuple(replays.verdicts(self.replays, self.parts))

    @cached_property
    def costs(self) -> tuple[LevelCost, ...]:
        """Cost per million tokens at every level; empty without a price."""
        if self.price_per_gpu_hour is None:
            return ()
        return tuple(level_costs(self.curves, self.price_per_gpu_hour, self.view.count))

    @cached_property
    def findings(self) -> tuple[AuditFinding, ...]:
        """The audit's findings in the folders."""
        folders = list(dict.fromkeys(each.folder for each in self.results.loaded))
        return tuple(rules.audit(folders, self.results.stated, read=loading.of_others(self.results.loaded)))

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the figures themselves may be wrong; to be shown wherever the figures are."""
        return tuple(note.text for note in self.notes if note.code == "plot_audited")


def build_report(
    results: Results,
    view: View | None = None,
    *,
    at: Sequence[Bounds | str] = (),
    slos: Sequence[Slo | str] = (),
    price_per_gpu_hour: float | None = None,
    published: Sequence[Path] = (),
    remarks: Sequence[str] = (),
    simulated: Sequence[Path] = (),
) -> Report:
    """The report on the results of `pdlab.report.load.load`.

    ``view``: what it sets is kept. A latency mode or statistic that it leaves open becomes one that some level has.
    ``at``: latency bounds such as ``tpot_ms=12,ttft_p95_ms=2000`` (empty: those of the experiments' files). ``slos``:
    SLOs such as ``ttft_ms=2000``; as text, for 95 % of the requests (empty: those that were searched for).
    ``published``: tables of others, as CSV. ``simulated``: folders of simulated replays, shown beside the measured
    ones.

    Raises UsageError if nothing can be shown in this view, and StoreError for what cannot be read.
    """
    view = view or View()
    bounds = [parse_bounds(each, view.statistic) if isinstance(each, str) else each for each in at]
    given_slos = [parse_slo(each, SLO_QUANTILE) if isinstance(each, str) else each for each in slos]
    if simulated and not any(isinstance(run.load, Replay) for each in results.experiments for run in each.runs):
        raise UsageError(f"--simulated {simulated[0]}: nothing that is shown is a replay; leave --simulated out")
    if not results.loaded:
        return Report(results, view, remarks=tuple(remarks), notes=results.notes)
    bounds = bounds or bounds_of_files(results, view)
    given_slos = given_slos or list(
        dict.fromkeys(search.slo for each in results.experiments for search in each.searches)
    )
    if given_slos:
        results = results.with_every_request()
    notes = [*results.notes, *_unmarked_repeats(results)]
    curves = _curves(results, published, notes)
    shown = tuple(curve for curve in curves if curve.has_role(view))
    if not shown:
        raise UsageError(f"--per-role {view.role}: no experiment has {view.role} GPUs of its own; leave it out")
    view = _known_view(shown, view, notes)
    ranking.require_latency(rankable(shown), view)
    notes += _audit_note(results)
    labelled = results.labelled
    return Report(
        results=results,
        view=view,
        curves=shown,
        left_out=tuple(curve.label for curve in curves if not curve.has_role(view)),
        at=tuple(bounds),
        slo_rankings=tuple(slo_ranking for slo in given_slos for slo_ranking in goodput.slo_rankings(shown, slo, view)),
        price_per_gpu_hour=price_per_gpu_hour,
        remarks=tuple(remarks),
        notes=tuple(notes),
        soaks=tuple(soaks.held(labelled)),
        timelines=tuple(timelines.moving(labelled)),
        replays=tuple(replays.replays(labelled, given_slos, simulated)),
        parts=tuple(
            each
            for each in ttft_parts.levels_with_timelines(labelled)
            if each.label in {curve.label for curve in shown}
        ),
    )


def bounds_of_files(results: Results, view: View) -> list[Bounds]:
    """The latency bounds in the experiments' files, each once. Raises UsageError."""
    entries = bounds_in_files(results.folders.given)
    return list(dict.fromkeys(parse_bounds(each.text, view.statistic, f"{each.folder}, at:") for each in entries))


def _unmarked_repeats(results: Results) -> Iterator[Finding]:
    """Folders of others that have repeats by numbers in names, which may be settings, with the files of one load."""
    named: dict[Path, list[tuple[str, ...]]] = {}
    for each in results.loaded:
        if each.sourced is not None:
            named.setdefault(each.folder, []).extend(unmarked_repeats(each.sourced.runs))
    for folder, files in named.items():
        if files:
            yield found("unmarked_repeats", folder=str(folder), names=listed(files[0][:MOST_NAMED]))


def _curves(results: Results, published: Sequence[Path], notes: list[Finding]) -> list[Curve]:
    """The measured curves, one for each measurement, and the published ones."""
    made = analysis.curves(results.experiments, [each.requests for each in results.loaded])
    every = [
        curve.model_copy(update={"tuning": judged_again(each)})
        for curve, each in zip(made, results.loaded, strict=True)
    ]
    kept = analysis.drawn_once(every)
    if len(kept) < len(every):
        names = [curve.label for curve in kept if curve not in every]
        notes.append(found("drawn_once", names="; ".join(names)))
    measured = [whole_nodes.counted(curve) for curve in kept]
    return [*measured, *(curve for path in published for curve in published_tables.load(path))]


def _known_view(curves: Sequence[Curve], view: View, notes: list[Finding]) -> View:
    """The view, with a latency that some level has, as far as the view leaves that open."""
    fixed = view.model_fields_set
    modes = ["token"] if view.use_interactivity else ["token", "first_token"]
    for mode in [view.latency_mode] if "latency_mode" in fixed else modes:
        for statistic in [view.statistic] if "statistic" in fixed else [view.statistic, "mean"]:
            other = view.model_copy(update={"latency_mode": mode, "statistic": statistic})
            if ranking.drawn_points(rankable(curves), other):
                if other != view:
                    lacks, has = (f"{each.statistic} of {each.latency_name}" for each in (view, other))
                    notes.append(found("other_latency", lacks=lacks, has=has))
                return other
    return view


def _audit_note(results: Results) -> list[Finding]:
    """A note if the audit finds something in these folders that makes a plot of them wrong."""
    paths = results.folders.experiments
    hashes = loading.hashes(results.loaded)
    findings = rules.shared(
        rules.hard(
            rules.audit(paths, results.stated, recompute=False, hashes=hashes, read=loading.of_others(results.loaded))
        )
    )
    if not findings:
        return []
    kinds = ", ".join(dict.fromkeys(finding.kind for finding in findings))
    few = len(paths) <= 4
    line = command_line("viz", audit=paths if few else ("DIR...",))
    return [found("plot_audited", kinds=kinds, command=line if few else f"{line} with these folders")]
