"""Verdicts in words: which is best, by how much, with which uncertainty, or why none is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdlab.analysis.comparable import COMPARED_LOADS, groups, incomparable
from pdlab.analysis.curves import Curve, own
from pdlab.analysis.goodput import Capacity, Pick
from pdlab.analysis.headline import Against, Compared, Headline, OtherPairs, compared
from pdlab.analysis.intervals import Comparison, is_tail, requests_for
from pdlab.analysis.ranking import Ranked, Reading, readings
from pdlab.analysis.view import View
from pdlab.core.bounds import Bounds
from pdlab.core.text import ROUNDING, aligned, listed, percent, plain
from pdlab.report import tables
from pdlab.report.tuning import baseline_text
from pdlab.results.slo import bounds_text

EDGE = "the bound is at the edge of what was measured"
SERVED = {
    "open": ("goodput of open loops", "at request rates"),
    "closed": ("capacity of closed loops", "in closed loops"),
}
# An interval whose ends are further apart than this factor carries no information.
WIDE = 10.0
MOST_PAIRS = 12


NO_BOUND = (
    "Who serves most within latencies that must be kept: give them, for example --at tpot_ms=12,ttft_p95_ms=2000."
)
HIGHER = {"throughput": ("higher", "lower"), "ttft": ("longer", "shorter"), "tpot": ("longer", "shorter")}
LOOPS = {"concurrency": "closed loop", "rate": "open loop", "ramp": "ramp"}


def headline(curves: Sequence[Curve], view: View, whole: Compared | None = None) -> str:
    """The whole curves compared, three lines for each deployment; or why they cannot be. ``whole``: their comparison,
    if it is made already."""
    if not any(point.valid for curve in own(curves) for point in curve.points):
        return "No valid level to compare."
    if len(own(curves)) < 2:
        return f"{own(curves)[0].label} alone: nothing to compare."
    whole = compared(curves, view) if whole is None else whole
    texts = [headline_text(each, curves, view) for each in whole.headlines]
    texts += [pairs_text(each, curves, view) for each in whole.pairs]
    return "\n\n".join(filter(None, [*texts, "\n".join(apart_text(whole, curves, view))]))


def headline_text(block: Headline, curves: Sequence[Curve], view: View) -> str:
    """``A over B``, a line for each figure, and what they rest on."""
    blocks = []
    bases = [entered(each, block) for each in block.against]
    for each, basis in zip(block.against, bases, strict=True):
        rows = [[f"  {name}", f"{ratio}: {words}"] for name, ratio, words in figure_lines(each, curves, view)]
        lines = aligned(rows, left=(0, 1))
        own_basis = [f"  ({basis})"] if len(set(bases)) > 1 else []
        blocks.append("\n".join([f"{each.label} over {block.reference}", *lines, *own_basis]))
    if len(set(bases)) == 1:
        blocks.append(f"  ({bases[0]})")
    baseline = baseline_text(block, curves)
    return "\n".join([*blocks, *filter(None, [reference_text(block), baseline])])


def reference_text(block: Headline) -> str | None:
    """Which curve the others are compared with, and why; None where there is one other alone."""
    if len(block.against) < 2:
        return None
    return f"Reference {block.reference}: it shares loads with {len(block.against)} others, no other with more."


def pairs_text(pairs: OtherPairs, curves: Sequence[Curve], view: View) -> str:
    """One line for each pair beside those with the reference, at most `MOST_PAIRS`."""
    shown = pairs.against[:MOST_PAIRS]
    figures = [figure_lines(each, curves, view) for each in shown]
    head = ["", *(line.figure for line in figures[0])]
    rows = [
        [f"{each.label} over {each.reference}", *(f"{line.ratio}: {line.words}" for line in lines)]
        for each, lines in zip(shown, figures, strict=True)
    ]
    lines = [f"  {line}" for line in aligned([head, *rows], left=range(len(head)))]
    bases = list(dict.fromkeys(entered(each, pairs) for each in shown))
    basis = bases[0] if len(bases) == 1 else f"{100 * pairs.confidence:g} % intervals, {TOGETHER}"
    left_out = len(pairs.against) - len(shown)
    more = [f"  {left_out} more pairs: give two folders alone to compare them."] if left_out else []
    return "\n".join([f"Other pairs of one size, {LOOPS[pairs.kind]}", *lines, *more, f"  ({basis})"])


def apart_text(whole: Compared, curves: Sequence[Curve], view: View) -> list[str]:
    """What is not compared, and why."""
    reason = incomparable(curves, view)
    if not whole.headlines:
        kinds = {point.kind for curve in own(curves) for point in curve.points if point.valid}
        no_load = "no two deployments share a load of one kind that is valid in both"
        if not kinds & set(COMPARED_LOADS):
            no_load = "a ramp goes through many loads, and its figures are means over them"
        return [f"No comparison: {reason or no_load}."]
    lines = [f"Not all are compared with each other: {reason}."] if reason else []
    admitted = {curve.label for group in groups(curves, view) if len(group.curves) > 1 for curve in group.curves}
    if without := [label for label in whole.apart if label in admitted]:
        lines.append(f"Compared with no other, because no load is shared with one: {listed(without)}.")
    return lines


TOGETHER = "all comparisons of a figure together"


def entered(each: Against, among: Headline | OtherPairs) -> str:
    """Which loads and repeats a comparison rests on, and at what level."""
    unit = "requests/s" if among.kind == "rate" else "in flight"
    loads = listed_all([f"{load:.3g}" for load in each.loads])
    per = " per GPU" if each.per_gpu else ""
    out = f" ({each.left_out} more {'is' if each.left_out == 1 else 'are'} not shared)" if each.left_out else ""
    repeats = (
        each.repeats.deployment
        if each.repeats.deployment == each.repeats.reference
        else " and ".join(map(str, each.repeats))
    )
    many = f"{repeats} repeat{'' if each.repeats == (1, 1) else 's'} each"
    if 1 in each.repeats:
        many += ", whose scatter from start to start is assumed"
    together = f", {TOGETHER}" if len(among.against) > 1 else ""
    level = f"{100 * among.confidence:g} % intervals{together}"
    return f"mean ratio over {loads} {unit}{per}{out}, {many}, {level}"


def listed_all(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


class FigureLine(NamedTuple):
    """``ratio`` with its interval, and in ``words`` what it says."""

    figure: str
    ratio: str
    words: str


def figure_lines(each: Against, curves: Sequence[Curve], view: View) -> list[FigureLine]:
    """Of the throughput and of both latencies."""
    per = f" per {tables.node_name(curves, view)}" if view.normalized else ""
    names = {
        "throughput": f"{view.throughput_metric} tokens/s{per}",
        "ttft": f"TTFT {view.statistic}",
        "tpot": f"TPOT {view.statistic}",
    }
    rows = []
    for ratio in each.ratios:
        comparison = ratio.comparison
        if comparison is None:
            rows.append(FigureLine(names[ratio.figure], "-", "not known at every load"))
            continue
        higher, lower = HIGHER[ratio.figure]
        words = {"better": higher, "worse": lower, "not distinguishable": "no difference resolved"}[comparison.verdict]
        rows.append(FigureLine(names[ratio.figure], ratio_text(comparison), words))
    return rows


def ratio_text(comparison: Comparison) -> str:
    """``0.97 (0.86-1.11)``, as exact as the verdict needs."""
    middle = f"{comparison.ratio:.2f}" if comparison.verdict == "not distinguishable" else _factor(comparison.ratio)
    if is_too_wide(comparison) and comparison.verdict == "not distinguishable":
        return f"{middle} (interval too wide)"
    if has_no_scatter(comparison):
        return f"{middle} (no scatter)"
    return f"{middle} ({_factor(comparison.low)}-{_factor(comparison.high)})"


def at_sentences(curves: Sequence[Curve], bounds: Bounds, view: View) -> list[str]:
    """For each kind of load the best configuration within latency bounds, or why none can be named."""
    return reading_sentences(readings(curves, bounds, view), curves, view)


def reading_sentences(answers: Sequence[Reading], curves: Sequence[Curve], view: View) -> list[str]:
    """A sentence for each of the readings within the same bounds."""
    return [reading_sentence(each, curves, view, several=len({each.kind for each in answers}) > 1) for each in answers]


def _of_group(name: str | None) -> str:
    return "" if name is None else f", {name}:"


def slo_sentence(pick: Pick, curves: Sequence[Curve], view: View) -> str:
    """The configuration with the highest throughput within the SLO, its margin over the second, and the uncertainty."""
    figure, how = SERVED[pick.loop]
    where = f"Within {bounds_text(pick.slo)}, by {figure}{_of_group(pick.group) or ','}"
    if not pick.capacities:
        text = f"{where} no configuration can be named"
    elif len(pick.ranking) > 1 and pick.slo.ttft_s is None and pick.slo.e2el_s is None:
        figures = [f"{each.label} {plain(each.throughput.value)}" for each in pick.capacities]
        rate = f"{view.throughput_metric} tokens/s per {tables.node_name(curves, view)}"
        text = f"{where} {unbounded(f'{pick.slo.flag},ttft_ms=2000', '--slo')} ({rate}: {listed(figures)})"
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


def reading_sentence(reading: Reading, curves: Sequence[Curve], view: View, *, several: bool = False) -> str:
    """One sentence on the highest throughput within the bounds; ``several``: name the kind of load."""
    where = f"At {reading.bounds.label}" + (f" ({LOOPS[reading.kind]})" if several else "") + _of_group(reading.group)
    rate = f"{view.throughput_metric} tokens/s per {tables.node_name(curves, view)}"
    if not view.normalized:
        rate = f"{view.throughput_metric} tokens/s, whole deployment"
    text = f"{where} {_who(reading, rate)}"
    if reading.missed and reading.ranking:
        text += f"; not reached by {listed(reading.missed)}"
    if reading.unknown and reading.ranking:
        text += f"; not known for {listed(reading.unknown)} ({unknown(reading.bounds)})"
    if reading.unsure and any(ranked.tied for ranked in reading.ranking[1:]):
        text += f"; {listed(reading.unsure)} may reach it as well"
    if reading.capped:
        text += f"; {listed(reading.capped)} might give more: nothing was measured at higher load"
    return text + "."


def unknown(bounds: Bounds) -> str:
    """Why the bounds cannot be judged at any level."""
    tails = [bound for bound in bounds.bounds if is_tail(bound.statistic)]
    needs = [
        f"{bound.metric.upper()} {bound.statistic} takes {requests_for(bound.statistic)} requests in every repeat"
        for bound in tails
    ]
    return f"not measured, or too few requests at every level: {listed(needs)}" if needs else "not measured"


def _who(reading: Reading, rate: str) -> str:
    if not reading.ranking:
        if not reading.missed:
            return f"no figure is known ({unknown(reading.bounds)})"
        of = f"{listed(reading.unknown)} ({unknown(reading.bounds)})" if reading.unknown else ""
        more = f", and no figure is known of {of}" if of else ""
        return f"no configuration can be named: no measured level of {listed(reading.missed)} is within{more}"
    best, *runners_up = reading.ranking
    most = f"about {plain(best.estimate.value)} {rate}"
    if not runners_up and not reading.unsure:
        alone = "; it is the only one that is that fast" if reading.missed else ""
        return f"{best.label} gives {most}{alone}"
    if not reading.bounds.of_first_token:
        figures = [f"{each.label} {plain(each.estimate.value)}" for each in reading.ranking]
        return f"{unbounded(reading.bounds.with_ttft)} ({rate}: {listed(figures)})"
    if reading.unsure and not any(ranked.tied for ranked in runners_up):
        names = listed([f"{best.label} ({most})", *reading.unsure])
        edge = f"the bounds are within the noise of the nearest level of {listed(reading.unsure)}"
        return f"no winner can be named: {names} are not distinguishable ({edge})"
    return verdict(reading.ranking, most)


def unbounded(example: str, flag: str = "--at") -> str:
    """Why a bound on TPOT alone names no winner: requests may queue before prefill for as long as they like."""
    return f"no winner is named while TTFT is unbounded: bound it too, for example {flag} {example}"


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
        return f"above {percent(low)} %" if ahead.verdict == "better" else "interval too wide"
    if has_no_scatter(ahead) and ahead.basis != "search":
        return "no scatter between repeats"
    return f"{percent(low)} to {percent(high)} %"


def lead_factor(ahead: Comparison) -> str:
    """The same as a factor: ``1.12 x (1.03 to 1.21)``."""
    if is_too_wide(ahead):
        ends = f"above {_factor(ahead.low)}" if ahead.verdict == "better" else "interval too wide"
    else:
        ends = f"{_factor(ahead.low)} to {_factor(ahead.high)}"
    return f"{_factor(ahead.ratio)} x ({ends})"


def _factor(value: float) -> str:
    """Two decimals, or as many as distinguish it from 1."""
    share = abs(value - 1)
    return f"{value:.{2 if share > 0.005 or share <= ROUNDING else next(d for d in range(10) if round(share, d))}f}"
