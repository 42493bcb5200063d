"""A report as text: tables, answers to SLOs, and the comparison in words."""

from __future__ import annotations

from collections.abc import Iterator

from pdlab.analysis.curves import rankable
from pdlab.report import chaos as chaos_report
from pdlab.report import replays, sections, soaks, tables, timelines, ttft_parts, verdicts
from pdlab.report.build import Report
from pdlab.report.section import Section


def render_text(report: Report) -> str:
    """The whole report; ends without a newline. The notes are separate: `Report.notes`."""
    parts = [left_out_text(report), tables_text(report), *(each.text for each in slo_sections(report))]
    return "\n\n".join([*filter(None, parts), verdict_text(report)])


def left_out_text(report: Report) -> str:
    """The curves without GPUs of the view's role; empty if there are none."""
    if not report.left_out:
        return ""
    return f"Left out, with no {report.view.role} GPUs of their own: {', '.join(report.left_out)}"


def tables_text(report: Report) -> str:
    """Every table except those of SLOs."""
    if not report.curves:
        return "\n\n".join(
            f"{chaos_report.text(each)}\n\n{chaos_report.fault_list(each)}" for each in report.results.chaos
        )
    faults = [chaos_report.text(each) for each in report.results.chaos]
    further = [each.text for each in (*further_sections(report), *replay_sections(report))]
    return "\n\n".join([tables.render(report.curves, report.view), *further, *faults])


def further_sections(report: Report) -> Iterator[Section]:
    """Sections beside the levels: remarks, crossovers, TTFT breakdown, cost, and changes over time."""
    curves, view = report.curves, report.view
    if report.remarks:
        yield Section(report.remarks[0], "\n".join(report.remarks[1:]))
    yield from (sections.crossover_section(each, view) for each in report.crossovers)
    if report.parts:
        yield ttft_parts.section(report.parts)
    with_timelines = {each.label for each in report.parts}
    if (split := sections.split_section([curve for curve in curves if curve.label not in with_timelines])) is not None:
        yield split
    if report.price_per_gpu_hour is not None:
        yield sections.cost_section(report.costs, curves, view, report.price_per_gpu_hour, report.at)
    yield from map(soaks.section, report.soaks)
    yield from (timelines.section(each) for each in report.timelines if each.changes or not each.replays)


def replay_sections(report: Report) -> list[Section]:
    """One for each replay of sessions."""
    return [replays.section(each) for each in report.replays]


def slo_sections(report: Report) -> list[Section]:
    """The throughput of each configuration within the SLOs."""
    return [sections.slo_section(slo_ranking, report.curves, report.view) for slo_ranking in report.slo_rankings]


def slo_sentences(report: Report) -> list[str]:
    """The configuration with the highest throughput within the SLOs, and the uncertainty."""
    return [verdicts.slo_sentence(slo_ranking, report.curves, report.view) for slo_ranking in report.slo_rankings]


def verdict_text(report: Report) -> str:
    """The last lines: whole curves compared, then the answers. For faults only: the outcomes of the requests."""
    curves, view = report.curves, report.view
    if not curves:
        faults = report.results.chaos
        return "\n".join([*report.remarks, *(f"{each.name}: {chaos_report.lines(each)[0]}" for each in faults)])
    lines = [verdicts.headline(curves, view, report.comparison)]
    for answers in report.bounds_rankings:
        lines += map(str, verdicts.bound_answers(answers, curves, view))
    if not report.at and len(rankable(curves)) > 1:
        lines.append(verdicts.NO_BOUND)
    return "\n".join([*lines, *slo_sentences(report), *(each.text for each in report.replay_verdicts)])
