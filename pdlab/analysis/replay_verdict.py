"""Which of several deployments that replayed the same requests is best, by which figure, and why.

A figure of several replays has their measured scatter. One replay has no scatter: it is assumed to be that of other
single repeats (`single_repeat_sd`). A share of counted sessions has at least the error of the count, because equal
counts of a few replays do not show that the next one is equal.

A lead counts only if equal deployments would show any such lead by chance less than once in twenty. Every pair of
deployments and every compared figure takes its share of this error (Bonferroni), because each of them could give the
lead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pdlab.analysis.intervals import Basis, Estimate, compare, of_repeats, share_error
from pdlab.analysis.power import CONFIDENCE, ScatteredFigure, of_slo, single_repeat_sd
from pdlab.analysis.replays import ReplayFacts
from pdlab.analysis.ttft_parts import PartsAround, TtftParts
from pdlab.core.findings import Finding, found
from pdlab.core.text import listed, number
from pdlab.results.schema import Distribution, Run
from pdlab.results.slo import bounds_of_one

# The finding on a difference in TTFT, by the parts (`pdlab.results.timeline.PARTS`) with most of it.
CAUSES: Mapping[str, tuple[str, ...]] = {
    "replay_by_servers": ("front", "server", "prefill_server", "failed_calls", "out"),
    "replay_by_queue": ("queue", "admission", "wait"),
    "replay_by_prefill": ("prefill", "recompute"),
    "replay_by_transfer": ("call", "submit", "post", "transfer", "step_lag", "guard", "lost_read"),
    "replay_by_first_step": ("first_step",),
}
# A difference in prefill time is due to cache hits if the computed tokens explain at least this share of it.
DUE_TO_HITS = 0.5
# A larger factor between equal deployments is not informative.
WIDE = 10.0
SCATTER = {"repeats": "measured scatter of the replays", "assumed": "assumed scatter of single replays"}


class ReplayedDeployment(NamedTuple):
    """A deployment and its valid replays of the requests. ``parts``: breakdown of its TTFT (None: unknown). ``failed``:
    number of replays that failed their checks."""

    label: str
    gpus: int
    device: Literal["gpu", "cpu"]
    replays: tuple[tuple[Run, ReplayFacts], ...]
    parts: TtftParts | None
    failed: int = 0


class ComparedFigure(NamedTuple):
    """``of``: its value in a replay (None: unknown). ``why``: explains the best one's lead over another. ``scatters``:
    it is taken to scatter from start to start as the one of these that scatters most. ``hits``: of a figure that counts
    sessions, the counted ones of a replay and all of them."""

    name: str
    unit: str
    of: Callable[[Run, ReplayFacts], float | None]
    why: Callable[[ReplayedDeployment, ReplayedDeployment], Finding | None]
    scatters: tuple[ScatteredFigure, ...]
    higher: bool = False
    hits: Callable[[ReplayFacts], tuple[int, int]] | None = None


class ReplayScore(NamedTuple):
    """A deployment's figure: the mean over its replays. The scatter of a single one is assumed."""

    deployment: ReplayedDeployment
    figure: Estimate


class ReplayLead(NamedTuple):
    """Of the best deployment over ``other``. ``factor``: infinite over 0. ``limit``: the factor by which equal
    deployments may differ with this scatter. ``counts``: the lead is beyond it."""

    other: ReplayScore
    factor: float
    limit: float
    counts: bool
    basis: Basis


class Standings(NamedTuple):
    """The deployments by one figure: the best, and its lead over each of the others, best first."""

    figure: ComparedFigure
    best: ReplayScore
    leads: tuple[ReplayLead, ...]

    @property
    def tied(self) -> list[ReplayLead]:
        return [lead for lead in self.leads if not lead.counts]

    @property
    def behind(self) -> list[ReplayLead]:
        return [lead for lead in self.leads if lead.counts]

    @property
    def leaders(self) -> list[str]:
        """The best one, and those that are not distinguishable from it."""
        return [self.best.deployment.label, *(lead.other.deployment.label for lead in self.tied)]


def verdict(workload: str, deployments: Sequence[ReplayedDeployment]) -> list[Finding]:
    """Findings on deployments that replayed one compiled workload at one speed: the best overall, then each figure with
    its reason. Empty if fewer than two have a valid replay."""
    failed = [found("replay_not_compared", label=each.label, workload=workload) for each in deployments if each.failed]
    judged = [each for each in deployments if each.replays]
    if len(judged) < 2:
        return []
    known = {
        figure: scores
        for figure in figures(judged[0].replays[0][1])
        if len(scores := list(_scores(figure, judged))) == len(judged) and max(each.figure.value for each in scores) > 0
    }
    looks = len(known) * math.comb(len(judged), 2)
    standings = [_standings(figure, scores, looks) for figure, scores in known.items()]
    leaders = {each.figure.name: each.leaders for each in standings}
    details = [finding for each in standings for finding in _figure_findings(each)]
    return [*_overall(workload, judged, leaders), *failed, *details] if leaders else failed


def figures(facts: ReplayFacts) -> Iterator[ComparedFigure]:
    """The compared figures: goodput of sessions under each SLO, TTFT, TPOT and normalised interactivity."""
    for index, slo in enumerate(facts.within):
        name = f"goodput of sessions ({bounds_of_one(slo.slo)})"
        scatters: tuple[ScatteredFigure, ...] = ("throughput", *of_slo(slo.slo))
        yield ComparedFigure(
            name, "sessions/s", _goodput(index), _why_goodput(index), scatters, higher=True, hits=_hits(index)
        )
    yield ComparedFigure("TTFT p50", "ms", _percentile("ttft", "p50"), _why_ttft("p50"), ("ttft",))
    yield ComparedFigure("TTFT p90", "ms", _percentile("ttft", "p90"), _why_ttft("p90"), ("ttft",))
    yield ComparedFigure("TPOT p50", "ms", _percentile("tpot", "p50"), _why_tpot, ("tpot",))
    yield ComparedFigure(
        "normalised interactivity at P90",
        "tokens/s",
        lambda _, each: each.interactivity_p90,
        _why_slow,
        ("e2el",),
        higher=True,
    )


def _scores(figure: ComparedFigure, deployments: Sequence[ReplayedDeployment]) -> Iterator[ReplayScore]:
    """Of the deployments whose figure is known."""
    for each in deployments:
        values = [value for run, facts in each.replays if (value := figure.of(run, facts)) is not None]
        if len(values) > 1:
            score = of_repeats(values)
        elif values:
            error = single_repeat_sd(each.device, *figure.scatters) * values[0]
            score = Estimate(values[0], error, math.inf, "assumed")
        else:
            continue
        least = _counting_error(figure, each) * score.value
        yield ReplayScore(each, score._replace(standard_error=max(score.standard_error or 0.0, least)))


def _counting_error(figure: ComparedFigure, deployment: ReplayedDeployment) -> float:
    """Relative standard error of a share of all counted sessions; 0 of a figure that counts none."""
    if figure.hits is None:
        return 0.0
    counts = [figure.hits(facts) for _, facts in deployment.replays]
    hits, sessions = sum(each for each, _ in counts), sum(each for _, each in counts)
    return share_error(hits, sessions) * sessions / hits if hits else 0.0


def _standings(figure: ComparedFigure, scores: Sequence[ReplayScore], looks: int) -> Standings:
    """``looks``: the number of comparisons that share the error."""
    best, *others = sorted(scores, key=lambda each: -each.figure.value if figure.higher else each.figure.value)
    return Standings(figure, best, tuple(_lead(figure, best, other, looks) for other in others))


def _lead(figure: ComparedFigure, best: ReplayScore, other: ReplayScore, looks: int) -> ReplayLead:
    high, low = (best.figure, other.figure) if figure.higher else (other.figure, best.figure)
    compared = compare(high, low, CONFIDENCE, looks)
    if compared is not None:
        limit = compared.ratio / compared.low if compared.low else math.inf
        return ReplayLead(other, compared.ratio, limit, compared.verdict == "better", compared.basis)
    # The lower figure is 0 in every replay: is the higher one above 0?
    interval = high.interval(1 - (1 - CONFIDENCE) / looks)
    if interval is None or not interval.low:
        return ReplayLead(other, math.inf if high.value else 1.0, math.inf, False, high.basis or "assumed")
    return ReplayLead(other, math.inf, high.value / interval.low, True, interval.basis)


def _figure_findings(standings: Standings) -> Iterator[Finding]:
    figure, best, leads = standings.figure, standings.best, standings.leads
    scores = [best, *(lead.other for lead in leads)]
    values = listed([f"{each.deployment.label} {number(each.figure.value)} {figure.unit}" for each in scores])
    # Of those that are tied, the one whose figure is worst; of those behind, the nearest.
    lead = standings.tied[-1] if standings.tied else standings.behind[0]
    numbers = {
        "figure": figure.name,
        "lead": "without limit" if math.isinf(lead.factor) else number(lead.factor),
        "limit": f"more than {WIDE:g}" if lead.limit > WIDE else number(lead.limit),
        "scatter": SCATTER["repeats" if lead.basis == "repeats" else "assumed"],
        "values": values,
    }
    if standings.tied:
        yield found("replay_figure_tie", names=listed(standings.leaders), **numbers)
    else:
        yield found("replay_best_by", best=best.deployment.label, other=lead.other.deployment.label, **numbers)
    if standings.behind and (why := figure.why(best.deployment, standings.behind[0].other.deployment)) is not None:
        yield why


def _overall(
    workload: str, deployments: Sequence[ReplayedDeployment], leads: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    never_behind = [each.label for each in deployments if all(each.label in names for names in leads.values())]
    decided = {name: names for name, names in leads.items() if len(names) < len(deployments)}
    counts = {each.gpus for each in deployments}
    sizes = ", ".join(f"{each.label} {each.gpus}" for each in deployments) if len(counts) > 1 else ""
    if not decided:
        yield found("replay_tie", workload=workload, names=listed([each.label for each in deployments]))
    elif len(never_behind) == 1:
        yield found("replay_best", workload=workload, best=never_behind[0], figures=listed([*decided]))
    elif never_behind:
        behind = [each.label for each in deployments if each.label not in never_behind]
        yield found("replay_best_of_several", workload=workload, names=listed(never_behind), behind=listed(behind))
    else:
        parts = "; ".join(f"{listed(names)} by {name}" for name, names in decided.items())
        yield found("replay_none_best", workload=workload, parts=parts)
    if sizes:
        yield found("replay_sizes_differ", sizes=sizes)


def _percentile(metric: Literal["ttft", "tpot"], statistic: str) -> Callable[[Run, ReplayFacts], float | None]:
    def of(_: Run, facts: ReplayFacts) -> float | None:
        values: Distribution | None = getattr(facts.every, metric)
        return None if values is None else 1e3 * values.percentiles_s[statistic]

    return of


def _goodput(index: int) -> Callable[[Run, ReplayFacts], float | None]:
    return lambda _, facts: facts.within[index].per_s


def _hits(index: int) -> Callable[[ReplayFacts], tuple[int, int]]:
    return lambda facts: (facts.within[index].sessions, facts.sessions)


def _why_goodput(index: int) -> Callable[[ReplayedDeployment, ReplayedDeployment], Finding | None]:
    def why(best: ReplayedDeployment, other: ReplayedDeployment) -> Finding | None:
        ours, theirs = (_first(each).within[index].missed for each in (best, other))
        bound = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0), default=None)
        if bound is None:
            return None
        numbers = {"ours": ours.get(bound, 0), "theirs": theirs[bound]}
        return found("replay_by_bound", bound=bound, best=best.label, other=other.label, **numbers)

    return why


def _why_ttft(statistic: str) -> Callable[[ReplayedDeployment, ReplayedDeployment], Finding | None]:
    def why(best: ReplayedDeployment, other: ReplayedDeployment) -> Finding | None:
        ours, theirs = (_parts_around(each, statistic) for each in (best, other))
        if ours is None or theirs is None:
            return found("replay_parts_unknown", figure=f"TTFT {statistic}")
        gaps_s = {code: _sum(theirs, parts) - _sum(ours, parts) for code, parts in CAUSES.items()}
        code = max(gaps_s, key=lambda name: gaps_s[name])
        ours_s, theirs_s = (_sum(each, CAUSES[code]) for each in (ours, theirs))
        hits = [_first(each).hit_share for each in (best, other)]
        if code == "replay_by_prefill" and _hits_explain(hits, ours_s, theirs_s):
            code = "replay_by_hits"
        percents = [None if share is None else f"{100 * share:.1f} %" for share in hits]
        return found(
            code,
            figure=f"TTFT {statistic}",
            best=best.label,
            other=other.label,
            ours_ms=1e3 * ours_s,
            theirs_ms=1e3 * theirs_s,
            gap_ms=1e3 * (theirs.ttft_s - ours.ttft_s),
            ours_hits=percents[0] or "unknown",
            theirs_hits=percents[1] or "unknown",
        )

    return why


def _hits_explain(shares: Sequence[float | None], ours_s: float, theirs_s: float) -> bool:
    ours, theirs = shares
    if ours is None or theirs is None or ours >= 1 or ours_s <= 0:
        return False
    return (1 - theirs) / (1 - ours) - 1 >= DUE_TO_HITS * (theirs_s / ours_s - 1) > 0


def _why_tpot(best: ReplayedDeployment, other: ReplayedDeployment) -> Finding | None:
    ours, theirs = (each.replays[0][0].whole.itl for each in (best, other))
    if ours is None or theirs is None or ours.mean_s is None or theirs.mean_s is None:
        return None
    steps_s = theirs.percentiles_s["p50"] - ours.percentiles_s["p50"]
    stalls_s = theirs.mean_s - ours.mean_s - steps_s
    return found(
        "replay_by_steps" if steps_s >= stalls_s else "replay_by_stalls",
        best=best.label,
        other=other.label,
        ours_ms=1e3 * ours.percentiles_s["p50"],
        theirs_ms=1e3 * theirs.percentiles_s["p50"],
        ours_mean_ms=1e3 * ours.mean_s,
        theirs_mean_ms=1e3 * theirs.mean_s,
    )


def _why_slow(best: ReplayedDeployment, other: ReplayedDeployment) -> Finding | None:
    ours, theirs = (_first(each).slowest for each in (best, other))
    if ours is None or theirs is None:
        return None
    before, after = theirs.ttft_s - ours.ttft_s, theirs.decode_s - ours.decode_s
    first = before >= after
    return found(
        "replay_by_first_token" if first else "replay_by_later_tokens",
        best=best.label,
        other=other.label,
        ours_ms=1e3 * (ours.ttft_s if first else ours.decode_s),
        theirs_ms=1e3 * (theirs.ttft_s if first else theirs.decode_s),
    )


def _first(each: ReplayedDeployment) -> ReplayFacts:
    return each.replays[0][1]


def _parts_around(each: ReplayedDeployment, statistic: str) -> PartsAround | None:
    around = each.parts.around if each.parts else ()
    return next((one for one in around if one.statistic == statistic), None)


def _sum(around: PartsAround, parts: Sequence[str]) -> float:
    return sum(around.parts_s.get(name, 0.0) for name in parts)
