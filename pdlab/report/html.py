"""One self-contained HTML file: the question, the verdict, plots, tables, exclusions, manifests, commands.

The template engine escapes text, figures are JSON without a ``<``, and the page's own policy forbids every load and
every script but its own. The same folders give the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pdlab.analysis.audit.registry import AuditFinding
from pdlab.analysis.comparable import groups, models_text
from pdlab.analysis.curves import Curve, Point, gpus_of, rankable
from pdlab.analysis.headline import Compared, Headline, OtherPairs, PairComparison, compared
from pdlab.analysis.loading import Loaded
from pdlab.analysis.ranking import bounds_rankings
from pdlab.analysis.view import View
from pdlab.core.environment import env_variable
from pdlab.core.errors import WriteError
from pdlab.core.files import replace
from pdlab.core.rendering import Macros, rendered
from pdlab.core.text import counted
from pdlab.core.version import __version__
from pdlab.report import chaos as chaos_report
from pdlab.report import replays, soaks, tables, timelines, ttft_parts, verdicts
from pdlab.report import text as report_text
from pdlab.report.build import Report
from pdlab.report.curve_figure import of_report
from pdlab.report.replays import ReplayedLevel
from pdlab.report.section import ASSETS, WORDS
from pdlab.report.tuning import baseline_text
from pdlab.results.chaos import Chaos
from pdlab.results.schema import ExperimentRecord, Manifest, Run, note_texts
from pdlab.results.store import read_record

BY_A_PROGRAM = "pdlab.write_html(...)"
LATENCIES: tuple[Literal["ttft", "tpot", "e2el"], ...] = ("ttft", "tpot", "e2el")
STATISTICS = ("p50", "p99")  # of every latency, beside the one that the page judges by


class TableCell(NamedTuple):
    """A figure in a table, with its half interval in per cent if known."""

    value: str
    half: str = ""


def write_html(
    report: Report, path: str | Path, *, command: str = BY_A_PROGRAM, log_latency: bool | None = None
) -> None:
    """Write the page. ``command``: the command that made it. ``log_latency`` None: chosen by the values. Raises
    WriteError if it cannot be written."""
    try:
        replace(Path(path), render(report, command, log_latency=log_latency).encode(errors="backslashreplace"))
    except WriteError as error:
        raise WriteError(f"report {error}; or choose another --report") from error


def render(report: Report, command: str, *, log_latency: bool | None = None) -> str:
    """The whole file as text."""
    if not report.curves:
        return _render_faults(report, command)
    curves, view, loaded = report.curves, report.view, report.results.loaded
    shown = {curve.label for curve in curves}
    by_label = {label: source for label, source in report.results.labelled if label in shown}
    points = [(curve, point) for curve in curves for point in curve.points]
    columns = _level_columns(curves, view)
    findings = [finding for finding in report.findings if finding.code != "invalid"]
    records = _records(loaded)
    page = rendered(
        ASSETS / "report.html",
        curves=curves,
        facts=_page_facts(curves, [loaded.experiment.manifest for loaded in by_label.values()]),
        node=tables.node_name(curves, view),
        node_always=tables.node_name(curves, _per_node(view)),
        parts=list(_compared_groups(report)),
        words=Macros(WORDS),
        no_bound=verdicts.NO_BOUND,
        view=view,
        figure=lambda estimate: tables.figure(estimate, view.confidence),
        lead=verdicts.lead,
        infinite=math.inf,
        # Levels that failed their checks have a section of their own.
        notes=[*tables.notes(curves, view, exclusions=False), *tables.tail_notes(curves)],
        answers=[*report_text.slo_sentences(report), *_searches(by_label)],
        texts=[*report_text.further_sections(report), *report_text.slo_sections(report)],
        head=["configuration", "load", "repeats", "window", *(name for _, name, _ in columns)],
        groups=_groups(columns),
        levels=[_level(i, curve, point, columns) for i, curve in enumerate(curves) for point in curve.points],
        soaks=[{"sentence": each.sentence, "figure": soaks.figure([each])} for each in report.soaks],
        moving=timelines.figure(report.timelines) if report.timelines else None,
        replay_verdicts=[each.text for each in report.replay_verdicts],
        replayed=[_replayed(each) for each in report.replays],
        replay_classes=replays.class_figure(report.replays),
        ttft=ttft_parts.pictured(report.parts) if report.parts else None,
        faults=[_faults(each) for each in report.results.chaos],
        excluded=[*_excluded(points), *_failed_visits(records)],
        audit=list(_findings(findings)),
        audit_count=len(findings),
        folders=len({source.folder for source in loaded}),
        experiments=[_experiment(label, loaded) for label, loaded in by_label.items()],
        sweeps=[{"name": record.name, "commands": record.commands} for record in records if record.commands],
        command=command,
        units=tables.units(curves),
        version=__version__,
        **_looks("figure.js", "report.js"),
        payload=of_report(report, every=True, log_latency=log_latency).page(),
    )
    return f"{page}\n"


def _render_faults(report: Report, command: str) -> str:
    made = report.results.chaos
    page = rendered(
        ASSETS / "faults.html",
        title=f"Faults made under load: {', '.join(each.name for each in made)}",
        faults=[_faults(each) for each in made],
        command=command,
        version=__version__,
        **_looks("figure.js"),
    )
    return f"{page}\n"


def _replayed(each: ReplayedLevel) -> dict[str, Any]:
    return {"section": replays.section(each), "figure": replays.figure(each) if each.simulated else None}


def _faults(each: Chaos) -> dict[str, Any]:
    return {
        "title": chaos_report.title(each),
        "table": chaos_report.table(each),
        "lines": chaos_report.lines(each),
        "list": chaos_report.fault_list(each),
        "figure": chaos_report.figure(each),
        "command": each.run.command,
    }


def _looks(*scripts: str) -> dict[str, str]:
    """Style and script of a page, and the hash by which its policy admits this script and no other."""
    style, *parts = ((ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", *scripts))
    script = "".join(parts)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"css": style, "script": script, "script_hash": f"sha256-{digest}"}


def _per_node(view: View) -> View:
    return view.model_copy(update={"normalized": True, "role": "all"})


class PageFacts(NamedTuple):
    """Facts on everything shown, for the head of the page. ``shared``: settings that all have. ``repeats``: fewest and
    most of a level. ``days``: first and last. ``origins``: of experiments that were not measured. ``known_intervals``:
    some level has one."""

    models: str
    shared: str
    workloads: list[str]
    experiments: int
    published: int
    levels: int
    repeats: tuple[int, int]
    invalid: int
    days: tuple[str, ...]
    origins: list[str]
    on_cpus: bool
    known_intervals: bool


def _page_facts(curves: Sequence[Curve], manifests: Sequence[Manifest]) -> PageFacts:
    points = [point for curve in curves for point in curve.points]
    published = sum(curve.published is not None for curve in curves)
    days = sorted({manifest.started_at[:10] for manifest in manifests if manifest.started_at})
    origins = dict.fromkeys(f"{each.origin}{' (rehearsed)' if each.rehearsal else ''}" for each in manifests)
    return PageFacts(
        models=models_text(rankable(curves)),
        shared=tables.shared_text(curves),
        workloads=list(dict.fromkeys(curve.workload for curve in curves)),
        experiments=len(curves) - published,
        published=published,
        levels=len(points),
        repeats=(min(point.repeats for point in points), max(point.repeats for point in points)),
        invalid=sum(not point.valid for point in points),
        days=tuple(dict.fromkeys((days[0], days[-1]))) if days else (),
        origins=[origin for origin in origins if origin != "measured"],
        on_cpus=any(manifest.local for manifest in manifests),
        known_intervals=any(point.rate_estimate("requests").basis for point in points),
    )


class ComparedGroup(NamedTuple):
    """The page's part on experiments that may be compared with each other. ``matrices``: for many curves, in place of
    ``blocks``. ``whole``: the comparisons outside the matrices. ``blocks``: a deployment over another, the comparison
    that it belongs to, and a line for each figure. ``ask_bounds``: explain how to give bounds."""

    name: str | None
    matrices: list[verdicts.MatrixTable]
    whole: Compared
    sentence: str | None
    blocks: list[tuple[PairComparison, Headline | OtherPairs, list[verdicts.FigureLine]]]
    baselines: list[str]
    apart: verdicts.NotCompared
    answers: list[verdicts.BoundAnswer]
    ask_bounds: bool
    rate: str


def _compared_groups(report: Report) -> Iterator[ComparedGroup]:
    """Largest first."""
    view = report.view
    for group in sorted(groups(report.curves, view), key=lambda each: -len(each.curves)):
        members = group.curves
        every = compared(members, view)
        whole = every.spelled()
        shown: list[tuple[Headline | OtherPairs, PairComparison]]
        shown = [(among, each) for among in whole.headlines for each in among.comparisons]
        shown += [(among, each) for among in whole.pairs for each in among.comparisons[: verdicts.MOST_PAIRS]]
        yield ComparedGroup(
            name=group.name,
            matrices=[table for matrix in every.matrices for table in verdicts.matrix_tables(matrix, view)],
            whole=whole,
            sentence=None if every.headlines else verdicts.headline(members, view, every),
            blocks=[(each, among, verdicts.figure_lines(each, members, view)) for among, each in shown],
            baselines=[text for block in whole.headlines if (text := baseline_text(block, members))],
            apart=verdicts.apart(every, members, view),
            answers=[
                answer
                for bounds in report.at
                for answer in verdicts.bound_answers(bounds_rankings(members, bounds, view), members, view)
            ],
            ask_bounds=not report.at and len(members) > 1,
            rate=verdicts.rate_name(members, view),
        )


def _searches(by_label: dict[str, Loaded]) -> Iterator[str]:
    """Results of the searches for the highest rate within an SLO."""
    for label, loaded in by_label.items():
        for search in loaded.experiment.searches:
            yield f"{label}, {search.title}: {search.detail}"


# Levels

Column = tuple[str, str, Any]


def _level_columns(curves: Sequence[Curve], view: View) -> list[Column]:
    """(group, name, function of curve and point -> cell) of every column with figures."""
    node = _per_node(view)
    columns: list[Column] = [
        ("latency, ms", f"{metric.upper()} {stat}", lambda c, p, m=metric, s=stat: p.ms_estimate(m, s))
        for metric in LATENCIES
        for stat in dict.fromkeys((view.statistic, *STATISTICS))
    ]
    for group, factor in (
        ("whole deployment, per second", lambda c: 1.0),
        (f"per {tables.node_name(curves, node)}, per second", lambda c: c.scale(node)),
    ):
        columns += [
            (group, rate, lambda c, p, r=rate, f=factor: p.rate_estimate(r).scaled(f(c))) for rate in tables.RATES
        ]
    points = [(curve, point) for curve in curves for point in curve.points]
    visible = [
        (g, n, lambda c, p, f=f: TableCell(*tables.value_and_half(f(c, p), view.confidence))) for g, n, f in columns
    ]
    return [column for column in visible if any(column[2](c, p).value != "-" for c, p in points)]


def _groups(columns: Sequence[Column]) -> list[dict[str, Any]]:
    names = [group for group, _, _ in columns]
    return [{"name": name, "span": names.count(name)} for name in dict.fromkeys(names)]


def _level(index: int, curve: Curve, point: Point, columns: Sequence[Column]) -> dict[str, Any]:
    leading_cells = [
        TableCell(point.load + ("" if point.valid else " x")),
        TableCell(str(point.repeats)),
        TableCell(point.window),
    ]
    return {
        "curve": index,
        "label": curve.label,
        "out": not point.valid,
        "cells": [*leading_cells, *(of(curve, point) for _, _, of in columns)],
    }


# Exclusions


def _excluded(points: Sequence[tuple[Curve, Point]]) -> Iterator[dict[str, str]]:
    for curve, point in points:
        if point.reasons:
            subject = tables.load_name(point)
            if point.valid:
                subject += f", {point.excluded} of {counted(point.repeats + point.excluded, 'repeat')}"
            yield {"label": curve.label, "subject": subject, "why": "; ".join(point.reasons)}


def _failed_visits(records: Sequence[ExperimentRecord]) -> Iterator[dict[str, str]]:
    """Deployments of the same experiment files that were not, or not fully, measured."""
    for record in records:
        for visit in record.visits:
            if visit.status != "done":
                subject = f"repeat {visit.repeat} of {record.name}: {visit.status}"
                yield {"label": visit.deployment, "subject": subject, "why": visit.error or "not measured"}


def _records(sources: Sequence[Loaded]) -> list[ExperimentRecord]:
    """The records of experiment files beside the folders of results."""
    parents = dict.fromkeys(source.folder.resolve().parent for source in sources)
    return [record for folder in parents if (record := read_record(folder))]


# Audit


def _findings(findings: Sequence[AuditFinding]) -> Iterator[dict[str, Any]]:
    """By kind and consequence, so that thirty folders with one fault are one entry."""
    kinds: dict[tuple[str, str], list[AuditFinding]] = {}
    for finding in findings:
        kinds.setdefault((finding.kind, finding.consequence), []).append(finding)
    for (kind, consequence), members in kinds.items():
        percents = [finding.percent for finding in members if finding.percent is not None]
        yield {
            "name": kind,
            "folders": len({name.split("/")[0] for each in members for name in each.files}),
            "percent": max(percents, default=None),
            "consequence": consequence,
            "fix": members[0].fix,
            "members": [{"files": _files(finding.files), "evidence": finding.evidence} for finding in members],
        }


def _files(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0].split('/')[0]}, {len(names)} files"


# Experiments


def _experiment(label: str, loaded: Loaded) -> dict[str, Any]:
    manifest, runs = loaded.experiment.manifest, loaded.experiment.runs
    return {
        "label": label,
        "name": loaded.experiment.name,
        "gpus": manifest.gpus,
        "unit": gpus_of(loaded.experiment).unit,
        "runs": len(runs),
        "origin": "rehearsed" if manifest.rehearsal else manifest.origin,
        "facts": [
            {"name": name, "value": value} for name, value in (*_manifest_facts(manifest), *_gates(runs)) if value
        ],
        "manifest": manifest.model_dump_json(indent=1, exclude_none=True),
        "commands": list(manifest.commands),
    }


def _manifest_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "label", manifest.label
    yield "model", manifest.deployment.model if manifest.deployment else manifest.model or ""
    if manifest.placement:
        yield "placement", "; ".join(_replicas(manifest))
    canary = manifest.canary
    yield "answers checked", canary.detail if canary else "not recorded" if manifest.origin == "measured" else ""
    yield "versions", _pairs(manifest.versions)
    yield "hardware", _pairs(manifest.hardware)
    yield "transport", _pairs(manifest.transport_env)
    yield "environment", "; ".join(_variables(manifest))
    dirty = ", with uncommitted changes" if manifest.git_dirty else ""
    yield "commit", f"{manifest.git_commit}{dirty}" if manifest.git_commit else ""
    yield "measured", " to ".join(text for text in (manifest.started_at, manifest.finished_at) if text)
    if manifest.origin == "imported":
        stated = (("versions", manifest.versions), ("hardware", manifest.hardware))
        names = [f"other {name}" if of_files else name for name, of_files in stated]
        yield "not recorded", f"{', '.join(names)}, placement, commands: the folder has no manifest"


def _gates(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Gates that were not checked, and notes, over the experiment's levels."""
    unchecked = dict.fromkeys(f"{gate} ({why.text})" for run in runs for gate, why in run.validity.unchecked.items())
    yield "gates not checked", "; ".join(unchecked)
    yield "notes", "; ".join(note_texts(runs))


def _replicas(manifest: Manifest) -> Iterator[str]:
    assert manifest.placement is not None
    for replica in manifest.placement.replicas:
        slots = [f"{node} [{','.join(map(str, ids))}]" for group in replica.groups for node, ids in group.slots.items()]
        yield f"{replica.role} {replica.index} on {' + '.join(slots)}"


def _variables(manifest: Manifest) -> Iterator[str]:
    """The requested variables, by pool; secrets are recorded by name only."""
    for role in manifest.deployment.pools if manifest.deployment else ():
        assert manifest.deployment is not None
        if given := manifest.deployment.env_of(role):
            yield f"{role}: {', '.join(env_variable(name, value) for name, value in given.items())}"


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
