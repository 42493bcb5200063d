"""Which few of many curves have a colour: those on the frontier, and the best for each latency bound; others are grey.

Readers, colour-blind ones above all, distinguish only a handful of colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdlab.analysis.comparable import groups, workloads_text
from pdlab.analysis.curves import Curve, rankable
from pdlab.analysis.ranking import frontiers
from pdlab.analysis.view import View

MOST_ALIKE = 12
"""Curves of one picture that may all have a colour."""
MOST_COLOURED = 7
MOST_TOGETHER = 6
"""Curves of several workloads or models in one panel; more have a panel for each workload and model."""


def highlighted(curves: Sequence[Curve], view: View, best: Sequence[str] = ()) -> frozenset[str] | None:
    """Labels of the curves with a colour, at most `MOST_COLOURED` of each comparable group; None: all.

    ``best``: labels that answer latency bounds; they come first.
    """
    if len(rankable(curves)) <= MOST_ALIKE:
        return None
    chosen: list[str] = []
    for group in groups(curves, view):
        labels = [curve.label for curve in group.curves]
        # With equally many points on the frontier the curve with more throughput comes first.
        on_it = Counter(
            drawn.curve.label for frontier in frontiers(group.curves, view) for drawn in reversed(frontier.points)
        )
        ordered = dict.fromkeys(
            [*(label for label in best if label in labels), *(each for each, _ in on_it.most_common())]
        )
        chosen += list(ordered)[:MOST_COLOURED]
    return frozenset(chosen)


def named_groups(curves: Sequence[Curve], view: View) -> list[tuple[str, tuple[Curve, ...]]]:
    """(name, curves) of every comparable group, largest first. Published curves are with the groups of their
    workload."""
    others = [curve for curve in curves if curve.published is not None]
    return [
        (
            group.name or workloads_text(group.curves),
            (*group.curves, *(each for each in others if each.workload == group.curves[0].workload)),
        )
        for group in sorted(groups(curves, view), key=lambda group: -len(group.curves))
    ]


def panels(curves: Sequence[Curve], view: View) -> list[tuple[str, tuple[Curve, ...]]]:
    """(name, curves) of every panel of throughput against latency: one, or with many curves one for each group."""
    found = named_groups(curves, view)
    return found if len(found) > 1 and len(rankable(curves)) > MOST_TOGETHER else [("", tuple(curves))]
