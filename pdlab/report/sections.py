"""Sections below the tables of a report: rankings within SLOs, crossovers, TTFT breakdown, cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdlab.analysis.comparable import COMPARED_LOADS, groups
from pdlab.analysis.crossovers import GroupCrossovers
from pdlab.analysis.curves import Curve, LevelCost
from pdlab.analysis.goodput import KINDS_OF, SloRanking, goodput_at, share_at
from pdlab.analysis.ranking import Ranked, bounds_rankings
from pdlab.analysis.ttft_breakdown import PARTS
from pdlab.analysis.view import View
from pdlab.core.bounds import Bounds
from pdlab.core.workload import LoadKind
from pdlab.report import tables
from pdlab.report.section import Section, of_macro
from pdlab.report.verdicts import LOOPS, SERVED, lead_factor, short_ratio
from pdlab.results.slo import bounds_text


class SectionFacts(tables.TableFacts):
    """`TableFacts` with the words for a lead."""

    lead_factor = staticmethod(lead_factor)
    short_ratio = staticmethod(short_ratio)


def slo_section(ranked: SloRanking, curves: Sequence[Curve], view: View) -> Section:
    """Table of capacities, and of levels if their requests are known."""
    members = {
        *(each.label for each in ranked.capacities),
        *ranked.missed,
        *ranked.unsure,
        *(each.label for each in ranked.unknown),
        *ranked.elsewhere,
    }
    shown = [curve for curve in curves if curve.label in members or curve.published is not None]
    levels = [
        (curve, point, share, share.interval(view.confidence), rate)
        for curve in shown
        for point in curve.points
        if point.kind in KINDS_OF[ranked.loop]
        if (share := share_at(point, ranked.slo)) is not None
        if (rate := goodput_at(point, ranked.slo)) is not None
    ]
    return of_macro("slo", ranked, SectionFacts(shown, view), bounds_text(ranked.slo), SERVED[ranked.loop][0], levels)


def crossover_section(each: GroupCrossovers, view: View) -> Section:
    """The best configuration by throughput, with the interval of each change."""
    return of_macro("crossovers", each, SectionFacts(each.curves, view), LOOPS[each.kind] if each.kind else "")


def split_section(curves: Sequence[Curve]) -> Section | None:
    """Breakdown of the mean TTFT by engine metrics, in ms, for curves without timelines; None without metrics."""
    rows = [(curve.label, load, split) for curve in curves for (_, load), split in sorted(curve.splits.items())]
    return of_macro("breakdown", rows, PARTS) if rows else None


class CostRow(NamedTuple):
    """``cheapest``: for each of the bounds, whether it is the cheapest valid level of its group and kind of load within
    them, and no other deployment might cost less there."""

    cost: LevelCost
    cheapest: list[bool]


class OpenCost(NamedTuple):
    """``rivals``: might cost less within the bounds than the cheapest level, at loads that are not known.
    ``loop_name``: their kind of load; empty if there is one kind only."""

    bounds: Bounds
    loop_name: str
    rivals: list[Ranked]


def cost_section(
    costs: Sequence[LevelCost], curves: Sequence[Curve], view: View, price_per_gpu_hour: float, at: Sequence[Bounds]
) -> Section:
    """Cost per million tokens by level, with the cheapest valid level within each of ``at`` marked.

    Without a bound the cheapest level is always one of those with the longest waits. Each group has a mark for each
    kind of load that is compared, and none where another deployment might cost less.
    """
    number = {curve.label: i for i, group in enumerate(groups(curves, view)) for curve in group.curves}
    several = len({each.point.kind for each in costs} & set(COMPARED_LOADS)) > 1
    rows, open_costs = [CostRow(each, []) for each in costs], []
    for bounds in at:
        held = [
            each.point.valid
            and each.curve.published is None
            and each.point.kind in COMPARED_LOADS
            and bounds.hold(each.point)
            for each in costs
        ]
        cheapest: dict[tuple[int | None, LoadKind], tuple[float, str]] = {}
        for (curve, point, per_million), within in zip(costs, held, strict=True):
            if within:
                key = number.get(curve.label), point.kind
                found = per_million[view.throughput_metric].value, curve.label
                cheapest[key] = min(found, cheapest.get(key, found))
        undecided = set()
        for answer in bounds_rankings(curves, bounds, view):
            rivals = [
                ranked
                for ranked in answer.ranking
                if ranked.end is not None and ranked.tied
                if (least := cheapest.get((number.get(ranked.label), answer.kind))) is not None
                if least[1] != ranked.label
            ]
            if rivals:
                open_costs.append(OpenCost(bounds, LOOPS[answer.kind] if several else "", rivals))
            undecided |= {(number.get(ranked.label), answer.kind) for ranked in rivals}
        for row, within in zip(rows, held, strict=True):
            key = number.get(row.cost.curve.label), row.cost.point.kind
            value = row.cost.per_million[view.throughput_metric].value
            row.cheapest.append(within and key not in undecided and value == cheapest[key][0])
    on_gpus = any(curve.gpus.device == "gpu" for curve in curves)
    paid_for = "the whole deployment" if not on_gpus else "whole nodes" if view.count == "nodes" else "the GPUs used"
    return of_macro("cost", rows, SectionFacts(curves, view), price_per_gpu_hour, at, paid_for, several, open_costs)
