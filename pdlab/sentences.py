"""What may be said in words: who gives most, by how much, how sure that is, and why nobody can be named."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab import tables
from pdlab.analysis import Curve, View
from pdlab.compare import Ranked, Reading, reading
from pdlab.statistics import Comparison


def sentence(curves: Sequence[Curve], view: View) -> str:
    """One plain sentence: who gives most at a common latency, or why nobody can be named."""
    found = reading(curves, view)
    if found is None:
        return "No valid level to compare."
    if reason := tables.incomparable(curves):
        return f"No winner can be named: {reason}."
    sizes = sorted({curve.gpus.total for curve in curves})
    if not view.normalized and len(sizes) > 1:
        counts = ", ".join(map(str, sizes))
        size = f"{counts} {tables.units(curves)}"
        return f"No winner can be named: the deployments have different sizes ({size}); normalise them."
    return _say(found, curves, view)


def _say(found: Reading, curves: Sequence[Curve], view: View) -> str:
    sign = "<=" if view.lower_is_better else ">="
    statistic = {"mean": "mean", "p50": "median"}.get(view.statistic, view.statistic)
    where = f"At {statistic} {view.latency_name} {sign} {plain(found.bound)} {view.latency_unit}"
    rate = f"{view.throughput_metric} tokens/s per {tables.node_name(curves, view)}"
    if not view.normalized:
        rate = f"{view.throughput_metric} tokens/s, whole deployment"
    best, *others = found.ranking
    most = f"about {plain(best.estimate.value)} {rate}"
    if not others:
        text = f"{where}, {best.label} gives {most}"
        text += "; it is the only one that is that fast" if found.missed else ""
    else:
        text = f"{where} {verdict(found.ranking, most)}"
    if found.missed and others:
        text += f"; not reached by {listed(found.missed)}"
    capped = [label for label in found.capped if label != best.label]
    if capped:
        text += f"; {listed(capped)} might give more: nothing was measured at higher load"
    return text + "."


def verdict(ranking: Sequence[Ranked], most: str) -> str:
    """``the best is A with ..., 12 % above B (...)`` or ``no winner can be named: ...``; two or more ranked."""
    best, second = ranking[0], ranking[1]
    tied = [ranked.label for ranked in ranking[1:] if ranked.tied]
    if tied:
        text = f"no winner can be named: {listed([f'{best.label} ({most})', *tied])} are not distinguishable"
        close = next(ranked for ranked in ranking[1:] if ranked.tied)
        return f"{text} ({doubt(close.best_over_it, close.label)})"
    ahead = second.best_over_it
    above = f"{(ahead.ratio - 1) * 100:.0f} % above" if ahead and second.estimate.value else "ahead of"
    return f"the best is {best.label} with {most}, {above} {second.label} ({doubt(ahead, second.label)})"


def doubt(ahead: Comparison | None, label: str) -> str:
    """How sure a lead over ``label`` is, and what that rests on."""
    if ahead is None or ahead.high == float("inf"):
        return "the bound is at the edge of what was measured"
    lead = f"{_percent(ahead.low - 1)} to {_percent(ahead.high - 1)} %"
    if ahead.basis == "assumed":
        least = _percent(ahead.high / ahead.ratio - 1)
        return f"one repeat: differences below {least} % are not meaningful"
    return f"{100 * ahead.level:g} % interval of the lead over {label}: {lead}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}".replace("-0", "0")


def plain(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}" if value < 1e5 else f"{value:,.0f}"


def listed(labels: Sequence[str]) -> str:
    if len(labels) > 4:
        return f"{', '.join(labels[:3])} and {len(labels) - 3} others"
    return " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))
