"""Whether requests meet an SLO, the uncertainty of a share of them, and the verdicts of a search's points. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pdlab.core.text import plain
from pdlab.core.workload import Slo

if TYPE_CHECKING:
    from pdlab.results.level_data import Column, LevelData, Mask
    from pdlab.results.schema import SloPoint, SloSearch

PILED_UP = "requests piled up"
BLOCKS = 20
LEAST_BLOCK = 5  # requests
SERVED_SLICES, SERVED_T = 10, 2.82  # Student's t of 9 degrees of freedom, one-sided 99 %
CLEAR = 5.0  # standard deviations; Student's t of 19 degrees of freedom is 3.6 at 0.1 %

SloVerdict = Literal["meets", "misses", "undecided", "invalid"]


def bounds_text(slo: Slo) -> str:
    """``TTFT <= 2,000 ms and TPOT <= 50 ms for 95 % of requests``."""
    return f"{bounds_of_one(slo)} for {100 * slo.quantile:g} % of requests"


def bounds_of_one(slo: Slo) -> str:
    """``TTFT <= 2,000 ms and TPOT <= 50 ms``: for a single request."""
    bounds_s = {
        "TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "E2EL": slo.e2el_s,
        "ITL p99": slo.itl_p99_s, "longest stall": slo.stall_s,
    }  # fmt: skip
    bounds = [f"{name} <= {plain(1000 * bound_s)} ms" for name, bound_s in bounds_s.items() if bound_s is not None]
    return " and ".join(bounds)


def stresses(requests: LevelData, slo: Slo) -> Column:
    """The worst latency of each request over its bound: above 1 if it misses, infinite without an answer.

    One output token has no TPOT to miss, and an answer in one chunk has no gap.
    """
    import numpy as np

    worst = slo.stress(requests.ttft_s, np.nan_to_num(requests.tpot_s), requests.e2el_s)
    if slo.of_gaps:
        worst = np.maximum(worst, _gap_stresses(requests, slo))
    return np.where(requests.ok, worst, np.inf)


def _gap_stresses(requests: LevelData, slo: Slo) -> Column:
    """The worse of two ratios per request: 99th percentile of its gaps over its bound, longest gap over its bound."""
    import numpy as np

    from pdlab.results.columns import elements
    from pdlab.results.metrics import percentile

    worst, begin = np.zeros(len(requests)), 0
    for i, count in enumerate(elements(requests.gap_counts)):
        gaps_s = requests.gaps_s[begin : begin + count]
        begin += count
        if len(gaps_s):
            ordered = np.sort(gaps_s).tolist()
            worst[i] = max(
                percentile(ordered, 99) / slo.itl_p99_s if slo.itl_p99_s else 0.0,
                ordered[-1] / slo.stall_s if slo.stall_s else 0.0,
            )
    return worst


def within(slo: Slo, ttft_s: Column, tpot_s: Column, e2el_s: Column) -> Mask:
    """Which answers are within every bound on TTFT, TPOT and E2EL.

    NaN: one output token has no TPOT to miss. A request without E2EL was not answered. A bound on TTFT is missed
    without one.
    """
    import numpy as np

    answered: Mask = ~np.isnan(e2el_s)
    return answered & (slo.stress(ttft_s, np.nan_to_num(tpot_s), e2el_s) <= 1)


def effective(worst: Column, quantile: float) -> float:
    """Effective sample size of consecutive requests for the share that meets an SLO, from the `stresses` of each.

    n / tau, with the longer of two integrated autocorrelation times tau: that of "misses the SLO", and that of "is
    worse than the SLO's quantile of these requests". The second one shows how requests cluster if hardly any misses.
    """
    import numpy as np

    if not len(worst):
        return 0.0
    missed = (worst > 1).astype(np.float64)
    own = (worst > np.sort(worst)[max(math.ceil(quantile * len(worst)) - 1, 0)]).astype(np.float64)
    return len(worst) / max(correlation_time(missed), correlation_time(own))


def clearly_within(worst: Column, slo: Slo) -> bool:
    """True if bounds on TPOT and gaps hold by so wide a margin that autocorrelation cannot change the verdict.

    The mean over 20 consecutive blocks of the SLO's quantile, plus 5 standard deviations, must be within. False with a
    bound on TTFT or E2EL: there queues have tails that a quiet level does not show.
    """
    import numpy as np

    size = len(worst) // BLOCKS
    if size < LEAST_BLOCK or slo.ttft_s is not None or slo.e2el_s is not None or not slo.bounded:
        return False
    blocks = worst[: size * BLOCKS].reshape(BLOCKS, size)
    if not np.isfinite(blocks).all():
        return False
    quantiles = np.quantile(blocks, slo.quantile, axis=1)
    return bool(quantiles.mean() + CLEAR * quantiles.std(ddof=1) <= 1)


def correlation_time(values: Column) -> float:
    """Integrated autocorrelation time of consecutive values, in elements, at least 1: the longer of two estimates.

    The first is the sum of autocorrelations up to the first pair that is not positive (C. J. Geyer, Practical Markov
    Chain Monte Carlo, Statistical Science 7, 1992). The second is the variance of the means of 20 blocks over that of
    independent values.
    """
    import numpy as np

    n = len(values)
    off = values - values.mean()
    variance = float(off @ off) / n
    if n < 2 or variance <= 0:
        return 1.0
    spectrum = np.fft.rfft(off, 2 * n)
    rho = np.fft.irfft(spectrum * np.conj(spectrum), 2 * n)[:n] / (n * variance)
    pairs = rho[: n - n % 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    tau = 2 * float(pairs[: ends[0] if len(ends) else None].sum()) - 1
    size = n // BLOCKS
    if size >= 2:
        means = off[: size * BLOCKS].reshape(BLOCKS, size).mean(axis=1)
        tau = max(tau, size * float(means.var(ddof=1)) / variance)
    return max(1.0, tau)


class ShareBounds(NamedTuple):
    """Lower and upper bound of a share, 0 to 1."""

    low: float
    high: float


def share_bounds(met: int, judged: int, confidence: float) -> ShareBounds:
    """Clopper-Pearson bounds of a share: each holds by itself with ``confidence``; (0, 1) without requests.

    Lower: the share p at which ``met`` or more of ``judged`` has probability 1 - confidence. Upper: the share at which
    ``met`` or fewer has. Both are quantiles of a beta distribution.
    """
    from scipy.special import betaincinv

    if not judged:
        return ShareBounds(0.0, 1.0)
    low = float(betaincinv(met, judged - met + 1, 1 - confidence)) if met else 0.0
    high = float(betaincinv(met + 1, judged - met, confidence)) if met < judged else 1.0
    return ShareBounds(low, high)


def judge(point: SloPoint, quantile: float, confidence: float, error_shares: int) -> SloPoint:
    """The point with its bounds and its verdict; an invalid point stays invalid. ``error_shares`` looks share the
    allowed error, half of it for either side.

    It *meets* if the lower bound is at or above the quantile, or if it is clearly within (`clearly_within`), and every
    look was in a steady state. It *misses* if the upper bound is below the quantile, or if requests piled up in every
    look of several. It is undecided if only its latest look contradicts, and in all other cases.
    """
    one_sided = 1 - (1 - confidence) / 2 / error_shares
    # Whole requests, rounded so that either conclusion is harder to reach.
    low = share_bounds(math.floor(point.share * point.effective + 1e-9), point.effective, one_sided).low
    high = share_bounds(math.ceil(point.share * point.effective - 1e-9), point.effective, one_sided).high
    latest = point.share if point.latest is None else point.latest
    verdict: SloVerdict = "undecided"
    if point.verdict == "invalid":
        verdict = "invalid"
    elif (point.piled_up and point.looks > 1) or (high < quantile and latest < quantile):
        verdict = "misses"
    elif (low >= quantile or point.clear) and latest >= quantile and point.steady is True:
        verdict = "meets"
    return point.model_copy(update={"low": low, "high": high, "verdict": verdict})


def judge_all(
    points: Sequence[SloPoint], quantile: float, confidence: float, error_shares: int
) -> tuple[SloPoint, ...]:
    """`judge` each point; then no point above `most_served` *meets*.

    Just above a server's capacity the queue grows too slowly to be seen in one level, and TPOT and gaps do not show it.
    """
    judged = [judge(point, quantile, confidence, error_shares) for point in points]
    most_rps = most_served(judged)
    if most_rps is None:
        return tuple(judged)
    beyond = {"verdict": "undecided", "reason": f"not more than {most_rps:.4g} requests/s were served at a higher rate"}
    return tuple(
        point.model_copy(update=beyond) if point.verdict == "meets" and point.rate_rps > most_rps else point
        for point in judged
    )


def most_served(points: Sequence[SloPoint]) -> float | None:
    """Lower bound of what was served at the lowest rate at which requests piled up; None if they never did."""
    known = [(point.rate_rps, point.served_rps) for point in points if point.served_rps is not None]
    return min(known)[1] if known else None


def served_rps(requests: LevelData) -> float | None:
    """Lower bound of what is served while requests pile up, in requests/s; None without answers.

    Lower end of the one-sided 99 % interval (Student's t) of the mean answers/s, over 10 slices of the second half of
    the time in which the load lasts.
    """
    import numpy as np

    begin_s, end_s = (requests.arrival_s[0] + requests.arrival_s[-1]) / 2, requests.arrival_s[-1]
    counts, _ = np.histogram(requests.finish_s[requests.ok], SERVED_SLICES, (begin_s, end_s))
    if not counts.any():
        return None
    rates = counts * SERVED_SLICES / (end_s - begin_s)
    return max(0.0, float(rates.mean() - SERVED_T * rates.std(ddof=1) / math.sqrt(SERVED_SLICES)))


class Bracket(NamedTuple):
    """The ends of a search in requests/s: the highest rate that meets the SLO, below the lowest that misses it; None if
    there is none."""

    low_rps: float | None
    high_rps: float | None


def bracket_at(search: SloSearch, confidence: float) -> Bracket:
    """The ends of a finished search (`bracket`), with its requests judged at another confidence."""
    return bracket(judge_all(search.points, search.slo.quantile, confidence, search.error_shares))


def bracket(points: Sequence[SloPoint]) -> Bracket:
    """The bracket that the points of a search give."""
    high = min((point.rate_rps for point in points if point.verdict == "misses"), default=None)
    meeting = [point.rate_rps for point in points if point.verdict == "meets"]
    return Bracket(max((rate for rate in meeting if high is None or rate < high), default=None), high)
