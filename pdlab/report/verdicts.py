"""Verdicts in words: which is best, by how much, with which uncertainty, or why none is named."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.analysis.curves import Curve, View
from pdlab.analysis.goodput import Capacity, Pick
from pdlab.analysis.intervals import Comparison
from pdlab.analysis.ranking import Ranked, Reading, own, reading
from pdlab.core.text import ROUNDING, listed, percent, plain
from pdlab.report import tables
from pdlab.results.slo import bounds_text

EDGE = "the bound is at the edge of what was measured"
LOOPS = {
    "open": ("goodput of open loops", "at request rates"),
    "closed": ("capacity of closed loops", "in closed loops"),
}
# An interval whose ends are further apart than this factor carries no information.
WIDE = 10.0


def sentence(curves: Sequence[Curve], view: View) -> str:
    """One sentence: the best configuration at a common latency, or why none can be named."""
    comparison = reading(curves, view)
    if comparison is None:
        return "No valid level to compare."
    if reason := incomparable(curves, view):
        return f"No winner can be named: {reason}."
    return _ranking_sentence(comparison, curves, view)


def incomparable(curves: Sequence[Curve], view: View) -> str | None:
    """Why the curves cannot be ranked in this view; None if they can."""
    if reason := tables.incomparable(curves):
        return reason
    sizes = sorted({curve.gpus.total for curve in own(curves)})
    if view.normalized or len(sizes) < 2:
        return None
    counts = ", ".join(map(str, sizes))
    return f"the deployments have different sizes ({counts} {tables.units(curves)}); normalise them"


def slo_sentence(pick: Pick, curves: Sequence[Curve], view: View) -> str:
    """The configuration with the highest throughput within the SLO, its margin over the second, and the uncertainty."""
    figure, how = LOOPS[pick.loop]
    where = f"Within {bounds_text(pick.slo)}, by {figure},"
    if reason := incomparable(curves, view):
        return f"{where} no winner can be named: {reason}."
    if not pick.capacities:
        text = f"{where} no configuration can be named"
    else:
        best = pick.capacities[0]
        most = (
            f"about {plain(best.throughput.value)} {view.throughput_metric} tokens/s per "
            f"{tables.node_name(curves, view)}, {plain(best.requests_per_gpu_s.value)} requests/s per "
            f"{tables.unit(curves)}"
        )
        text = (
            f"{where} {verdict(pick.ranking, most)}" if len(pick.ranking) > 1 else f"{where} {best.label} gives {most}"
        )
    if pick.missed:
        text += f"; not met by {listed(pick.missed)} at any level measured"
    if pick.unknown:
        text += f"; not known for {listed(pick.unknown)} (neither requests nor that percentile were kept)"
    if pick.elsewhere:
        text += f"; not measured {how}: {listed(pick.elsewhere)}"
    searched = [f"{capacity.label} {bracket(capacity)}" for capacity in pick.capacities if capacity.searches]
    if searched:
        text += f"; by searches for the highest rate of the whole deployment: {listed(searched)}"
    capped = [capacity.label for capacity in pick.capacities if capacity.capped]
    if capped:
        text += f"; {listed(capped)} might give more: the highest load measured still meets it"
    return text + "."


def bracket(capacity: Capacity) -> str:
    """``between 7.1 and 7.5 requests/s (95 % confidence)``: what the searches behind a capacity found."""
    low, high = capacity.bracket_rps
    if low is not None and high is not None:
        text = f"between {low:g} and {high:g} requests/s"
    elif low is not None:
        text = f"at least {low:g} requests/s"
    else:
        text = "not known" if high is None else f"below {high:g} requests/s"
    many = f", each of {len(capacity.searches)} repeats" if len(capacity.searches) > 1 else ""
    return f"{text} ({100 * capacity.bracket_confidence:g} % confidence{many})"


def _ranking_sentence(comparison: Reading, curves: Sequence[Curve], view: View) -> str:
    sign = "<=" if view.lower_is_better else ">="
    statistic = {"mean": "mean", "p50": "median"}.get(view.statistic, view.statistic)
    where = f"At {statistic} {view.latency_name} {sign} {plain(comparison.bound)} {view.latency_unit}"
    rate = f"{view.throughput_metric} tokens/s per {tables.node_name(curves, view)}"
    if not view.normalized:
        rate = f"{view.throughput_metric} tokens/s, whole deployment"
    best, *runners_up = comparison.ranking
    most = f"about {plain(best.estimate.value)} {rate}"
    if comparison.unsure and not any(ranked.tied for ranked in runners_up):
        names = listed([f"{best.label} ({most})", *comparison.unsure])
        edge = f"the bound is within the noise of the lowest {view.latency_name} of {listed(comparison.unsure)}"
        text = f"{where} no winner can be named: {names} are not distinguishable ({edge})"
    elif not runners_up:
        text = f"{where}, {best.label} gives {most}"
        text += "; it is the only one that is that fast" if comparison.missed else ""
    else:
        text = f"{where} {verdict(comparison.ranking, most)}"
    if comparison.missed and (runners_up or comparison.unsure):
        text += f"; not reached by {listed(comparison.missed)}"
    if comparison.unsure and any(ranked.tied for ranked in runners_up):
        text += f"; {listed(comparison.unsure)} may reach it as well"
    capped = [label for label in comparison.capped if label != best.label]
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
    above = f"{percent(ahead.ratio - 1)} % above" if ahead and second.estimate.value else "ahead of"
    return f"the best is {best.label} with {most}, {above} {second.label} ({doubt(ahead, second.label)})"


def doubt(ahead: Comparison | None, label: str) -> str:
    """The uncertainty of a lead over ``label``, and its basis."""
    if ahead is None:
        return EDGE
    tied = ahead.verdict == "not distinguishable"
    of = f"{100 * ahead.level:g} % interval of the lead over {label}"
    if ahead.basis == "search":
        if is_too_wide(ahead) and tied:
            return "what the search for the highest rate left open is too wide to compare"
        return f"{of}: {lead(ahead)}, by the ends of the search for the highest rate"
    if ahead.high == float("inf"):
        return EDGE
    if ahead.basis == "assumed":
        if is_too_wide(ahead) and tied:
            return "one repeat, whose requests scatter too much there to compare"
        least = percent(ahead.high / ahead.ratio - 1, reference=ahead.ratio - 1)
        return f"one repeat: differences below {least} % are not meaningful"
    if has_no_scatter(ahead):
        return "the repeats do not scatter at all"
    if is_too_wide(ahead) and tied:
        factor = plain(ahead.high / ahead.low) if ahead.high < 1000 * ahead.low else "more than 1,000"
        return f"the repeats differ too much there: the {of} spans a factor of {factor}"
    return f"{of}: {lead(ahead)}"


def has_no_scatter(ahead: Comparison) -> bool:
    """Whether the scatter is 0, as between equal repeats."""
    return ahead.high - ahead.low <= ROUNDING * ahead.ratio


def is_too_wide(ahead: Comparison) -> bool:
    """Whether the interval is too wide to be informative."""
    return not ahead.low or ahead.high / ahead.low > WIDE


def lead(ahead: Comparison) -> str:
    """The interval of a lead, as exact as the verdict needs: ``3 to 12 %``, ``-0.4 to 9 %``, ``above 60 %``."""
    low, high = ahead.low - 1, ahead.high - 1
    if is_too_wide(ahead):
        return f"above {percent(low)} %" if ahead.verdict == "better" else "too wide to say"
    if has_no_scatter(ahead) and ahead.basis != "search":
        return "no scatter between repeats"
    return f"{percent(low)} to {percent(high)} %"


def lead_factor(ahead: Comparison) -> str:
    """The same as a factor: ``1.12 x (1.03 to 1.21)``."""

    def factor(value: float) -> str:
        share = abs(value - 1)
        return f"{value:.{2 if share > 0.005 or share <= ROUNDING else next(d for d in range(10) if round(share, d))}f}"

    if is_too_wide(ahead):
        ends = f"above {factor(ahead.low)}" if ahead.verdict == "better" else "too wide to say"
    else:
        ends = f"{factor(ahead.low)} to {factor(ahead.high)}"
    return f"{factor(ahead.ratio)} x ({ends})"
