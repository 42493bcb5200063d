"""Title, subtitle and footnotes of the picture of curves."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pdlab.analysis.comparable import groups, models_text, workloads_text
from pdlab.analysis.curves import Curve, configuration, own, shared_settings
from pdlab.analysis.view import View
from pdlab.core import text as core_text
from pdlab.core.deployment import Pool
from pdlab.report import tables
from pdlab.results.curve_names import PLAIN

MAX_FOOTNOTES = 12


def title(curves: Sequence[Curve], view: View) -> str:
    """Models, shared settings, and lengths."""
    measured = own(curves)
    workloads = dict.fromkeys(workloads_text(group.curves) for group in groups(measured, view))
    lengths = f"{core_text.listed(list(workloads))} tokens (input:output)"
    shared = shared_settings(measured)
    words = [models_text(measured)] if any(curve.model for curve in measured) else []
    words += [" ".join(shared[key] for key in PLAIN if key in shared)]
    return ", ".join([*filter(None, words), lengths])


def subtitle(curves: Sequence[Curve], view: View) -> str:
    """The meaning of numbers, rings, thin lines and crosses."""
    per = tables.node_name(curves, view)
    rate = f"per {per}" if view.normalized else per
    kinds = {point.kind for curve in own(curves) for point in curve.points}
    apart = ", for each kind of load by itself" if len(kinds) > 1 else ""
    text = f"Numbers at the points: requests/s, {rate}. "
    several = len(groups(curves, view)) > 1
    over = "over experiments that may be compared" if several else "over all experiments"
    text += f"Rings and yellow band: Pareto frontier {over}{apart}."
    invalid = any(not point.valid for curve in curves for point in curve.points)
    text += " Thin lines: by request rate." if any(len(curve.lines()) > 1 for curve in curves) else ""
    return f"{text} Hollow and crossed: not valid, reasons below." if invalid else text


def usual_footnotes(curves: Sequence[Curve], view: View) -> list[str]:
    """Footnotes: the terms, and the caveats of a comparison."""
    return [*wrapped(_glossary(curves, view)), *footnotes(tables.notes(curves, view))]


def _glossary(curves: Sequence[Curve], view: View) -> list[str]:
    """The terms of this picture, for new readers."""
    median = " p50: median." if view.statistic == "p50" else ""
    lines = [f"TTFT: time to first token. TPOT: time per output token after the first.{median}"]
    # One deployment of each kind explains the notation.
    kinds = {
        tuple(c.deployment.pools): (configuration(c.deployment), c.deployment.pools)
        for c in reversed(own(curves))
        if c.deployment
    }
    if kinds:
        names = [
            f"{label}: {' and '.join(_replicas(role, pool) for role, pool in pools.items())}"
            for label, pools in reversed(kinds.values())
        ]
        lines.append(f"{'; '.join(names)}. TP: tensor-parallel degree.")
    if ("prefill", "decode") in kinds:
        lines.append(
            "pack: the prefill and decode replicas of a pair share a node; spread: they are on different nodes."
        )
    if any(curve.gpus.device == "cpu" for curve in own(curves)):
        lines[-1] += " Engine rank: a CPU process in place of a GPU."
    return lines


def _replicas(role: str, pool: Pool) -> str:
    noun = "replica, prefill and decode" if role == "collocated" else f"{role} replica"
    return f"{pool.replicas} {noun if pool.replicas == 1 else noun.replace('replica', 'replicas')} (TP {pool.tp})"


def footnotes(notes: Sequence[str]) -> list[str]:
    """At most `MAX_FOOTNOTES` notes, as lines."""
    if len(notes) > MAX_FOOTNOTES:
        hidden = len(notes) - MAX_FOOTNOTES + 1
        notes = [*notes[: MAX_FOOTNOTES - 1], f"... and {hidden} more: see the tables"]
    return wrapped(notes)


def wrapped(notes: Sequence[str]) -> list[str]:
    """Lines of the width of a picture."""
    return [line for note in notes for line in textwrap.wrap(note, 190, subsequent_indent="   ")]
