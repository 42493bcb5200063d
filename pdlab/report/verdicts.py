"""Verdicts as values: the best, its lead, and the uncertainty. The templates have the words for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdlab.analysis.comparable import COMPARED_LOADS, groups, incomparable
from pdlab.analysis.curves import Curve, rankable
from pdlab.analysis.goodput import SloRanking
from pdlab.analysis.headline import Compared, EqualLatency, Matrix, PairComparison, compared
from pdlab.analysis.intervals import Comparison, is_tail, requests_for
from pdlab.analysis.ranking import BoundsRanking, Ranked
from pdlab.analysis.view import View
from pdlab.core import text
from pdlab.core.rendering import macro
from pdlab.core.text import ROUNDING, counted, percent, plain
from pdlab.report import tables
from pdlab.report.section import WORDS
from pdlab.report.tuning import baseline_text
from pdlab.results.slo import bounds_text

SERVED = {
    "open": ("goodput of open loops", "at constant request rates"),
    "closed": ("capacity of closed loops", "in closed loops"),
    "replay": ("capacity of replays", "in replays"),
}
# With a larger factor between its ends an interval is not informative.
WIDE = 10.0
MOST_PAIRS = 12
NO_BOUND = (
    "To find the deployment with the highest throughput within your latency limits, add them, for example "
    "--at tpot_ms=12,ttft_p95_ms=2000."
)
HIGHER = {"throughput": ("higher", "lower"), "ttft": ("longer", "shorter"), "tpot": ("longer", "shorter")}
LOOPS = {"concurrency": "closed loop", "rate": "open loop", "ramp": "ramp", "replay": "replay"}

DoubtCode = Literal[
    "edge",
    "search_too_wide",
    "search",
    "search_assumed",
    "one_repeat_too_wide",
    "one_repeat",
    "no_scatter",
    "too_wide",
    "interval",
]
AnswerCode = Literal[
    "unknown", "none", "none_within", "one_alone", "ttft_unbounded", "within_noise", "undecided", "best"
]


def headline(curves: Sequence[Curve], view: View, whole: Compared | None = None) -> str:
    """The whole curves compared, three lines for each deployment; or why they cannot be. ``whole``: their comparison,
    if known."""
    if not any(point.valid for curve in rankable(curves) for point in curve.points):
        return "No valid level to compare."
    if len(rankable(curves)) < 2:
        return f"Only {rankable(curves)[0].label}: nothing to compare."
    whole = compared(curves, view) if whole is None else whole
    texts = [matrix_text(each, view) for each in whole.matrices]
    spelled = whole.spelled()
    for block in spelled.headlines:
        lines = [figure_lines(each, curves, view) for each in block.comparisons]
        texts.append(macro(WORDS, "headline", block, lines, baseline_text(block, curves)))
    for pairs in spelled.pairs:
        shown = pairs.comparisons[:MOST_PAIRS]
        lines = [figure_lines(each, curves, view) for each in shown]
        texts.append(macro(WORDS, "pairs", pairs, shown, lines, LOOPS[pairs.kind]))
    return "\n\n".join(filter(None, [*texts, macro(WORDS, "apart", apart(whole, curves, view))]))


class MatrixCell(NamedTuple):
    """A curve over another. ``ratio``: empty without a shared load, ``-`` if unknown. ``mark``: + higher, - lower, ~ no
    difference resolved. ``detail``: every figure with its interval."""

    ratio: str = ""
    mark: str = ""
    verdict: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        return self.ratio + self.mark


LEAST_FACTOR = 0.005  # smaller ratios would be 0.00
MARKS = {"better": "+", "worse": "-", "not distinguishable": "~"}


def _matrix_cell(each: PairComparison, view: View) -> MatrixCell:
    comparison = each.ratio("throughput")
    names = {"throughput": f"{view.throughput_metric} tokens/s", "ttft": "TTFT", "tpot": "TPOT"}
    known = [f"{names[ratio.figure]} {ratio_text(ratio.comparison)}" for ratio in each.ratios if ratio.comparison]
    loads = text.counted(len(each.loads), "shared load")
    detail = f"{each.label} over {each.reference}, {loads}: {', '.join(known) or 'not known at every load'}"
    return MatrixCell("-", detail=detail) if comparison is None else _rated(comparison, detail)


def _rated(comparison: Comparison, detail: str) -> MatrixCell:
    ratio = f"{comparison.ratio:.0f}" if comparison.ratio >= 10 else short_ratio(comparison.ratio)
    return MatrixCell(ratio, MARKS[comparison.verdict], comparison.verdict, detail)


class MatrixTable(NamedTuple):
    """A matrix as a table: ``rows`` in the order of the labels of ``matrix``. ``at_latency``: at equal latency, not at
    equal load."""

    title: str
    matrix: Matrix
    rows: list[list[MatrixCell]]
    at_latency: bool


def matrix_tables(matrix: Matrix, view: View) -> list[MatrixTable]:
    """At equal load, and at equal latency if some curves reach a common one."""
    per = " per GPU" if view.normalized else ""
    group = "" if matrix.group is None else f", {matrix.group}"
    rate, loop = f"{view.throughput_metric.capitalize()} tokens/s{per}", f"({LOOPS[matrix.kind]}{group})"
    cells = {labels: _matrix_cell(each, view) for labels, each in matrix.cells().items()}
    tables = [MatrixTable(f"{rate} at equal load, row over column {loop}", matrix, _rows(matrix, cells), False)]
    if matrix.equal_latency:
        title = f"{rate} at equal {view.statistic} {view.latency_name}, row over column {loop}"
        cells = {labels: _latency_cell(each, view) for labels, each in matrix.latency_cells().items()}
        tables.append(MatrixTable(title, matrix, _rows(matrix, cells), True))
    return tables


def _rows(matrix: Matrix, cells: Mapping[tuple[str, str], MatrixCell]) -> list[list[MatrixCell]]:
    return [[cells.get((row, column), MatrixCell()) for column in matrix.labels] for row in matrix.labels]


def _latency_cell(each: EqualLatency, view: View) -> MatrixCell:
    span = f"{view.latency_name} {each.low:.4g} to {each.high:.4g} {view.latency_unit}"
    rate = f"{view.throughput_metric} tokens/s {ratio_text(each.comparison)}"
    return _rated(each.comparison, f"{each.label} over {each.reference}, {span}: {rate}")


def matrix_text(matrix: Matrix, view: View) -> str:
    """Every curve of a group over every other, as tables whose columns have the numbers of their rows."""
    return "\n\n".join(macro(WORDS, "matrix", table) for table in matrix_tables(matrix, view))


class NotCompared(NamedTuple):
    """What is not compared, and why. ``reason``: the obstacle between some of them. ``loads_compare``: some level has a
    kind of load that is compared. ``without``: labels that share a load with no other."""

    nothing_compared: bool
    reason: str | None
    loads_compare: bool
    without: tuple[str, ...]


def apart(whole: Compared, curves: Sequence[Curve], view: View) -> NotCompared:
    """Which of these curves are not compared, and why."""
    kinds = {point.kind for curve in rankable(curves) for point in curve.points if point.valid}
    admitted = {curve.label for group in groups(curves, view) if len(group.curves) > 1 for curve in group.curves}
    return NotCompared(
        nothing_compared=not whole.headlines,
        reason=incomparable(curves, view),
        loads_compare=bool(kinds & set(COMPARED_LOADS)),
        without=tuple(label for label in whole.apart if label in admitted),
    )


class FigureLine(NamedTuple):
    """``ratio`` with its interval, and its meaning in ``words``."""

    figure: str
    ratio: str
    words: str


def figure_lines(each: PairComparison, curves: Sequence[Curve], view: View) -> list[FigureLine]:
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


class LeadLimit(NamedTuple):
    """The uncertainty of a lead over ``label``. ``lead``: its interval in words."""

    code: DoubtCode
    label: str
    ahead: Comparison | None

    @property
    def lead(self) -> str:
        return "" if self.ahead is None else lead(self.ahead)

    @property
    def least_percent(self) -> str:
        """The smallest difference in per cent that one repeat resolves."""
        assert self.ahead is not None
        return percent(self.ahead.high / self.ahead.ratio - 1, reference=self.ahead.ratio - 1)


def doubt_of(ahead: Comparison | None, label: str) -> LeadLimit:
    """The uncertainty of a lead over ``label``, by its basis."""
    return LeadLimit(_doubt_code(ahead), label, ahead)


def _doubt_code(ahead: Comparison | None) -> DoubtCode:
    if ahead is None:
        return "edge"
    too_wide = ahead.verdict == "not distinguishable" and is_too_wide(ahead)
    if ahead.basis == "search" or ahead.basis == "search_assumed":
        return "search_too_wide" if too_wide else ahead.basis
    if ahead.high == float("inf"):
        return "edge"
    if ahead.basis == "assumed":
        return "one_repeat_too_wide" if too_wide else "one_repeat"
    if has_no_scatter(ahead):
        return "no_scatter"
    return "too_wide" if too_wide else "interval"


def deciding_doubt(ranking: Sequence[Ranked]) -> LeadLimit | None:
    """Of the first that is tied with the best by its scatter, else of the second; None with fewer than two."""
    tied = (ranked for ranked in ranking[1:] if ranked.tied and not ranked.at_least)
    close = next(tied, ranking[1] if len(ranking) > 1 else None)
    return None if close is None else doubt_of(close.best_over_it, close.label)


def unnamed_ends(ranking: Sequence[Ranked], code: AnswerCode) -> list[Ranked]:
    """Those that may give more than measured, which the verdict of that code does not say."""
    return [each for each in (ranking if code == "ttft_unbounded" else ranking[:1]) if each.end is not None]


@dataclass(frozen=True)
class BoundAnswer:
    """The answer to latency bounds for one kind of load. ``several``: there are other kinds. ``rate``: unit of the
    throughput."""

    bounds_ranking: BoundsRanking
    rate: str
    several: bool

    @property
    def code(self) -> AnswerCode:
        bounds_ranking = self.bounds_ranking
        if not bounds_ranking.ranking:
            return "none_within" if bounds_ranking.missed else "unknown"
        if len(bounds_ranking.ranking) == 1 and not bounds_ranking.unsure:
            return "one_alone"
        if not bounds_ranking.bounds.of_first_token:
            return "ttft_unbounded"
        tied = any(ranked.tied for ranked in bounds_ranking.ranking[1:])
        return "undecided" if tied else "within_noise" if bounds_ranking.unsure else "best"

    @property
    def loop_name(self) -> str:
        return LOOPS[self.bounds_ranking.kind]

    @property
    def doubt(self) -> LeadLimit | None:
        return deciding_doubt(self.bounds_ranking.ranking)

    @property
    def more(self) -> list[Ranked]:
        return unnamed_ends(self.bounds_ranking.ranking, self.code)

    @property
    def figures(self) -> list[str]:
        return [f"{each.label} {plain(each.estimate.value)}" for each in self.bounds_ranking.ranking]

    @property
    def needs(self) -> list[str]:
        """How many requests the bounded percentiles take."""
        return [
            f"{bound.metric.upper()} {bound.statistic} takes {counted(requests_for(bound.statistic), 'request')} in "
            "every repeat"
            for bound in self.bounds_ranking.bounds.bounds
            if is_tail(bound.statistic)
        ]

    def __str__(self) -> str:
        return macro(WORDS, "bounds_ranking", self)


def rate_name(curves: Sequence[Curve], view: View) -> str:
    """``output tokens/s per node (8 GPUs)``, ``output tokens/s, whole deployment``."""
    return f"{view.throughput_metric} tokens/s{' per' if view.normalized else ','} {tables.node_name(curves, view)}"


def bound_answers(answers: Sequence[BoundsRanking], curves: Sequence[Curve], view: View) -> list[BoundAnswer]:
    """One for each ranking within the same bounds."""
    rate = rate_name(curves, view)
    return [BoundAnswer(each, rate, len({other.kind for other in answers}) > 1) for each in answers]


@dataclass(frozen=True)
class SloAnswer:
    """The answer to one SLO. ``rate``: unit of the throughput; ``unit``: of a deployment's size."""

    slo_ranking: SloRanking
    rate: str
    unit: str

    @property
    def code(self) -> AnswerCode:
        if not self.slo_ranking.capacities:
            return "none"
        if len(self.slo_ranking.ranking) < 2 and not self.slo_ranking.unsure:
            return "one_alone"
        if self.slo_ranking.slo.ttft_s is None and self.slo_ranking.slo.e2el_s is None:
            return "ttft_unbounded"
        if any(ranked.tied for ranked in self.slo_ranking.ranking[1:]):
            return "undecided"
        return "within_noise" if self.slo_ranking.unsure else "best"

    @property
    def bounds(self) -> str:
        return bounds_text(self.slo_ranking.slo)

    @property
    def figure(self) -> str:
        return SERVED[self.slo_ranking.loop][0]

    @property
    def where(self) -> str:
        return SERVED[self.slo_ranking.loop][1]

    @property
    def doubt(self) -> LeadLimit | None:
        return deciding_doubt(self.slo_ranking.ranking)

    @property
    def more(self) -> list[Ranked]:
        return unnamed_ends(self.slo_ranking.ranking, self.code)

    @property
    def figures(self) -> list[str]:
        return [f"{each.label} {plain(each.throughput.value)}" for each in self.slo_ranking.capacities]


def slo_sentence(slo_ranking: SloRanking, curves: Sequence[Curve], view: View) -> str:
    """The configuration with the highest throughput within the SLO, its margin over the second, and the uncertainty."""
    rate = f"{view.throughput_metric} tokens/s per {tables.node_name(curves, view)}"
    return macro(WORDS, "slo", SloAnswer(slo_ranking, rate, tables.unit(curves)))


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
    if has_no_scatter(ahead) and ahead.basis not in ("search", "search_assumed"):
        return "no scatter between repeats"
    return f"{percent(low)} to {percent(high)} %"


def lead_factor(ahead: Comparison) -> str:
    """The same as a factor: ``1.12 x (1.03 to 1.21)``."""
    if is_too_wide(ahead):
        ends = f"above {_factor(ahead.low)}" if ahead.verdict == "better" else "interval too wide"
    else:
        ends = f"{_factor(ahead.low)} to {_factor(ahead.high)}"
    return f"{_factor(ahead.ratio)} x ({ends})"


def short_ratio(value: float) -> str:
    """Two decimals, or one digit where they would be 0.00."""
    return f"{value:.1g}" if 0 < value < LEAST_FACTOR else f"{value:.2f}"


def _factor(value: float) -> str:
    """`short_ratio`, or as many decimals as distinguish it from 1."""
    share = abs(value - 1)
    if share > 0.005 or share <= ROUNDING:
        return short_ratio(value)
    return f"{value:.{next(d for d in range(10) if round(share, d))}f}"
