"""Uncertainty of figures: standard errors, Student intervals, and whether two figures differ. Pure; numpy only.

**Repeats** are the unit. A figure is measured once per repeat. Its estimate is the mean, its interval is mean +- t * s
/ sqrt(R), with Student's t of R - 1 degrees of freedom. A percentile bootstrap of three repeats covers far less than
its nominal level (docs/decisions has the measured rates), because resampled values never exceed the smallest and the
largest. So the bootstrap here gives the standard error, also of figures that are no means (throughput at a bound, a
crossover), and Student's t gives the width. Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015),
sections 4 and 5: bootstrap t with bootstrap standard errors, and the factor R / (R - 1) that a resampled variance
lacks.

The scatter between repeats already contains the scatter of requests within each. Requests are therefore not resampled
beneath repeats (Davison and Hinkley, Bootstrap Methods, 1997, section 3.8).

**One repeat** has no measured scatter. Blocks of its neighbouring requests, because neighbours are correlated, give the
precision of this run. They give no information about another run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdlab.core.schema import Frozen
from pdlab.core.text import ROUNDING
from pdlab.results.metrics import student_t

Array = NDArray[np.float64]
Basis = Literal["repeats", "requests", "assumed", "search", "search_assumed"]
"""The scatter that an interval covers.

- ``repeats``: between repeats of the level, including changes from start to start
- ``requests``: one repeat, only the scatter within that run
- ``assumed``: one repeat, with an unmeasured scatter between repeats
- ``search``: brackets of searches for the highest rate, with a measured scatter between starts
- ``search_assumed``: the same with an unmeasured scatter between starts
"""
ComparisonVerdict = Literal["better", "worse", "not distinguishable"]

MAX_BLOCKS = 20
MIN_BLOCKS = 5
# With fewer requests beyond a quantile, single requests determine it and it is mostly too low.
MIN_BEYOND = 5
# Requests of a queue are slow in bursts: with fewer beyond it the interval of a tail would not hold
# (docs/decisions/011).
SURE_BEYOND = 20


class Interval(Frozen):
    """From ``low`` to ``high`` at a confidence ``level``."""

    low: float
    high: float
    level: float
    basis: Basis

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Estimate(NamedTuple):
    """A figure with its standard error, in the figure's unit, and the degrees of freedom of that error.

    These are None if the scatter is unknown. ``dof`` may be infinite. ``edge``: read off the end of a curve; more draws
    than by chance do not reach the bound, so the figure may not exist.
    """

    value: float
    standard_error: float | None = None
    dof: float | None = None
    basis: Basis | None = None
    edge: bool = False

    def interval(self, level: float) -> Interval | None:
        """value +- t * standard error; None if the scatter is unknown; not below 0 for a figure above 0."""
        if self.standard_error is None or self.dof is None or self.basis is None:
            return None
        half = student_t((1 + level) / 2, self.dof) * self.standard_error
        low = max(0.0, self.value - half) if self.value >= 0 else self.value - half
        return Interval(low=low, high=self.value + half, level=level, basis=self.basis)

    def scaled(self, factor: float) -> Estimate:
        """The same figure in another unit."""
        error = None if self.standard_error is None else self.standard_error * abs(factor)
        return self._replace(value=self.value * factor, standard_error=error)

    @property
    def relative_error(self) -> float | None:
        """Standard error / value; None if unknown or if the value is 0."""
        return None if self.standard_error is None or not self.value else self.standard_error / abs(self.value)


class Comparison(Frozen):
    """``first`` against ``second`` as a ratio with its interval; ``better``: first is higher."""

    ratio: float
    low: float
    high: float
    level: float
    verdict: ComparisonVerdict
    basis: Basis


def of_repeats(values: Sequence[float]) -> Estimate:
    """Mean of one value per repeat. A single value has no measured scatter."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(value=mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(value=mean, standard_error=math.sqrt(variance / count), dof=count - 1, basis="repeats")


def compare(first: Estimate, second: Estimate, level: float, comparisons: int = 1) -> Comparison | None:
    """Ratio first / second of two independent positive figures; None if either scatter is unknown.

    On the logarithm, with relative standard errors: ln(a/b) +- t * sqrt(ra^2 + rb^2), degrees of freedom after Welch
    and Satterthwaite (the two need not scatter alike). With ``comparisons`` > 1 for one statement each takes its share
    of the error (Bonferroni).
    """
    errors = first.relative_error, second.relative_error
    if None in errors or not first.dof or not second.dof or first.value <= 0 or second.value <= 0:
        return None
    a, b = (error or 0.0 for error in errors)
    if math.isinf(a) or math.isinf(b):
        return undecided(first.value / second.value, level, first.basis or "assumed")
    middle, error = math.log(first.value / second.value), math.hypot(a, b)
    dof = math.inf
    if error:
        shares = (a / error) ** 4 / first.dof + (b / error) ** 4 / second.dof
        dof = 1 / shares if shares else math.inf
    tail = (1 - level) / 2 / max(1, comparisons)
    half = student_t(1 - tail, dof) * error
    low, high = _exp(middle - half), _exp(middle + half)
    basis: Basis = "assumed" if "assumed" in (first.basis, second.basis) else first.basis or "assumed"
    return Comparison(ratio=_exp(middle), low=low, high=high, level=level, verdict=_verdict(low, high), basis=basis)


def undecided(ratio: float, level: float, basis: Basis = "assumed") -> Comparison:
    """A comparison whose interval has no ends."""
    return Comparison(ratio=ratio, low=0.0, high=math.inf, level=level, verdict="not distinguishable", basis=basis)


def _verdict(low: float, high: float) -> ComparisonVerdict:
    return "better" if low > 1 + ROUNDING else "worse" if high < 1 - ROUNDING else "not distinguishable"


class Between(NamedTuple):
    """A figure of about ``value`` whose ends are known: it is not below ``low`` and not above ``high``.

    Each end has its own scatter, and is None if the figure has no known end there.
    """

    value: float
    low: Estimate | None
    high: Estimate | None

    @classmethod
    def of(cls, estimate: Estimate) -> Between:
        """A figure that is known by itself: both ends are the estimate."""
        return cls(estimate.value, estimate, estimate)

    @property
    def edge(self) -> bool:
        """Whether an end may not exist, see `Estimate`."""
        return any(end is not None and end.edge for end in (self.low, self.high))


def compare_between(first: Between, second: Between, level: float, comparisons: int = 1) -> Comparison | None:
    """Ratio first / second of two independent figures by their ends, like `compare`; None if a scatter is unknown.

    Its interval reaches from the lowest that the first may be over the highest that the second may be, less the scatter
    of these two ends, to the other extreme. An end fails by the requests of its search, which are independent of the
    scatter between starts. Two independent errors rarely add up, so one share of the error is enough for both.
    """
    ratio = first.value / second.value if second.value else math.inf

    def of_ends(numerator: Estimate | None, denominator: Estimate | None) -> Comparison | None:
        if numerator is None or denominator is None:
            return undecided(ratio, level)
        return compare(numerator, denominator, level, comparisons)

    least, most = of_ends(first.low, second.high), of_ends(first.high, second.low)
    if least is None or most is None:
        return None
    if first.low is first.high and second.low is second.high:
        return least
    ends = (first.low, first.high, second.low, second.high)
    assumed = any(end is not None and end.basis == "assumed" for end in ends)
    return Comparison(
        ratio=ratio,
        low=least.low,
        high=most.high,
        level=level,
        verdict=_verdict(least.low, most.high),
        basis="search_assumed" if assumed else "search",
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def multipliers(seed: Sequence[int], draws: int, repeats: int) -> Array:
    """(draws, repeats) standard normal weights of a multiplier bootstrap: see `resample`."""
    return np.random.default_rng(list(seed)).standard_normal((draws, repeats))


def resample(values: Array, weights: Array) -> Array:
    """Draws of the mean over repeats. values: (R, ...), weights: (draws, R) -> (draws, ...).

    mean + sum over r of w_r (x_r - mean) / sqrt(R (R - 1)): its standard deviation is exactly the standard error s /
    sqrt(R). Unlike resampling of whole repeats it is smooth at R = 2 or 3, and a level that lacks one of the repeats
    still has draws. Figures that share the weights keep their correlation.
    """
    count = values.shape[0]
    mean = values.mean(axis=0)
    if count < 2:
        return np.broadcast_to(mean, (weights.shape[0], *mean.shape)).copy()
    drawn: Array = mean + np.tensordot(weights, values - mean, axes=1) / math.sqrt(count * (count - 1))
    return drawn


def blocks(count: int, least: int) -> int | None:
    """Number of blocks of neighbours for ``count`` requests of which ``least`` belong together; None: too few."""
    block_count = min(MAX_BLOCKS, count // max(1, least))
    return block_count if block_count >= MIN_BLOCKS else None


def of_requests(values: Array, percentiles: Sequence[float], least: int) -> dict[str, Estimate]:
    """Mean and percentiles of one run's requests, ordered in time, keyed ``mean``, ``p50``, ...

    The run is cut into at most 20 blocks of at least ``least`` neighbours. The block bootstrap's variance of a mean is
    known without drawing: the variance between block means over their number. For a percentile that mean is the share
    of requests at or below it; the ordered values convert the interval of the share back (Woodruff 1952). Percentiles
    with too few requests beyond them (`beyond`), and runs of fewer than 5 blocks, have an estimate without an error.
    """
    ordered = np.sort(values)
    count = len(ordered)
    block_count = blocks(count, least)
    shares = np.array(percentiles) / 100

    def at(share: Array) -> Array:
        """Percentiles of the ordered values, linear between neighbours."""
        position = np.clip(share, 0.0, 1.0) * (count - 1)
        low = position.astype(np.intp)
        high = np.minimum(low + 1, count - 1)
        between: Array = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
        return between

    names = [f"p{q:g}" for q in percentiles]
    middle = at(shares)
    estimates = {name: Estimate(value) for name, value in zip(names, middle.tolist(), strict=True)}
    estimates["mean"] = of_blocks(values, block_count, float(values.mean()))
    if block_count is None:
        return estimates
    edges = np.linspace(0, count, block_count + 1).astype(np.intp)
    below = (values <= middle[:, None]).astype(np.float64)
    errors = (np.add.reduceat(below, edges[:-1], axis=1) / np.diff(edges)).std(axis=1, ddof=1) / math.sqrt(block_count)
    halves = (at(shares + errors) - at(shares - errors)) / 2
    for name, half in zip(names, halves.tolist(), strict=True):
        if beyond(name, count) >= (SURE_BEYOND if is_tail(name) else MIN_BEYOND):
            estimates[name] = Estimate(estimates[name].value, half, block_count - 1, "requests")
    return estimates


def is_tail(statistic: str) -> bool:
    """Whether it is a percentile above the median."""
    return statistic.startswith("p") and float(statistic[1:]) > 50


def beyond(statistic: str, count: float) -> float:
    """How many of ``count`` requests lie beyond a percentile (``p95``), on the side with fewer."""
    share = float(statistic[1:]) / 100
    return round(min(share, 1 - share) * count, 6)


def carried(statistic: str, count: float, least: float = MIN_BEYOND) -> bool:
    """Whether ``count`` requests are enough for the statistic: a tail percentile takes ``least`` beyond it."""
    return not is_tail(statistic) or beyond(statistic, count) >= least


def requests_for(statistic: str) -> int:
    """Number of requests per repeat that a percentile above the median takes."""
    return math.ceil(round(MIN_BEYOND / (1 - float(statistic[1:]) / 100), 6))


def share_error(hits: int, count: int) -> float:
    """The least standard error of a share of ``count``: that of a share with two more hits and two more misses (Agresti
    and Coull 1998), because a share of 0 or 1 is not certain."""
    guess = (hits + 2) / (count + 4)
    return math.sqrt(guess * (1 - guess) / (count + 4))


def of_blocks(values: Array, block_count: int | None, value: float) -> Estimate:
    """``value`` with the standard error of the mean of ``values`` over ``block_count`` blocks of neighbours."""
    if block_count is None:
        return Estimate(value=value)
    edges = np.linspace(0, len(values), block_count + 1).astype(np.intp)
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    return Estimate(
        value=value,
        standard_error=float(means.std(ddof=1)) / math.sqrt(block_count),
        dof=block_count - 1,
        basis="requests",
    )
