"""Title, subtitle and footnotes of the picture of curves."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from pdlab.analysis.comparable import COMPARED_LOADS, groups, models_text, workloads_text
from pdlab.analysis.curves import Curve, configuration, rankable, shared_settings
from pdlab.analysis.view import View
from pdlab.core import text as core_text
from pdlab.core.bounds import Statistic
from pdlab.core.rendering import macro
from pdlab.report import tables
from pdlab.report.section import WORDS
from pdlab.results.curve_names import PLAIN

MAX_FOOTNOTES = 12


def title(curves: Sequence[Curve], view: View) -> str:
    """Models, shared settings, and lengths."""
    measured = rankable(curves)
    workloads = dict.fromkeys(workloads_text(group.curves) for group in groups(measured, view))
    lengths = f"{core_text.listed(list(workloads))} tokens (input:output)"
    shared = shared_settings(measured)
    words = [models_text(measured)] if any(curve.model for curve in measured) else []
    words += [" ".join(shared[key] for key in PLAIN if key in shared)]
    return ", ".join([*filter(None, words), lengths])


def subtitle(curves: Sequence[Curve], view: View, *, selected: bool = False) -> str:
    """The meaning of numbers, rings, thin lines and crosses. ``selected``: the curves are some of many."""
    return macro(
        WORDS,
        "subtitle",
        per=("per " if view.normalized else "") + tables.node_name(curves, view),
        several=len(groups(curves, view)) > 1,
        selected=selected,
        several_kinds=len({point.kind for curve in rankable(curves) for point in curve.points}) > 1,
        rings=any(point.valid and point.kind in COMPARED_LOADS for curve in rankable(curves) for point in curve.points),
        thin=any(len(curve.lines()) > 1 for curve in curves),
        invalid=any(not point.valid for curve in curves for point in curve.points),
    )


def not_placed(latency: str, labels: Mapping[str, Statistic | None]) -> str:
    """A note on curves without ``latency``. ``labels``: theirs, with a statistic that their files have (None: not
    given)."""
    return macro(WORDS, "not_placed", latency, labels.items())


def usual_footnotes(curves: Sequence[Curve], view: View) -> list[str]:
    """Footnotes: the terms, and the caveats of a comparison."""
    return [*wrapped(_glossary(curves, view)), *footnotes(tables.notes(curves, view))]


def _glossary(curves: Sequence[Curve], view: View) -> list[str]:
    """The terms of this picture, for new readers. One deployment of each kind explains the notation."""
    kinds = {tuple(c.deployment.pools): c.deployment for c in reversed(rankable(curves)) if c.deployment}
    examples = [(configuration(each), each.pools) for each in reversed(kinds.values())]
    on_cpus = any(curve.gpus.device == "cpu" for curve in rankable(curves))
    return macro(
        WORDS, "glossary", view.statistic == "p50", examples, ("prefill", "decode") in kinds, on_cpus
    ).splitlines()


def footnotes(notes: Sequence[str]) -> list[str]:
    """At most `MAX_FOOTNOTES` notes, as lines."""
    if len(notes) > MAX_FOOTNOTES:
        hidden = len(notes) - MAX_FOOTNOTES + 1
        notes = [*notes[: MAX_FOOTNOTES - 1], f"... and {hidden} more: see the tables"]
    return wrapped(notes)


def wrapped(notes: Sequence[str]) -> list[str]:
    """Lines of the width of a picture."""
    return [line for note in notes for line in textwrap.wrap(note, 190, subsequent_indent="   ")]
