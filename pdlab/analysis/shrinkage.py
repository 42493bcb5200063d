"""Three repeats estimate their own scatter poorly; all levels together estimate the common scatter well.

The standard deviation of three values is wrong by a factor of two half of the time. By chance one level then seems
exact and the next one useless. Smyth's moderated variance (Linear Models and Empirical Bayes Methods, 2004, sections 3
and 6.2; known from the R package limma) takes the relative variances s_g^2 of all levels. It estimates from their
spread how alike the true variances are, and moves each one towards the common one:

    s~^2 = (d0 s0^2 + d s^2) / (d0 + d)        with d0 + d degrees of freedom

The result is never below a level's own variance, because a level that truly scatters more must not count as quiet. That
widens some intervals and keeps their coverage (tests/analysis/test_ranking.py has the trials). If the levels scatter
alike, d0 is large and this is the pooled variance of an analysis of variance. If they do not, d0 is small and each
level keeps its own.

Levels of one curve share its repeats, so they are not independent. The degrees of freedom are therefore at most those
of the independent repeats: the sum over curves of repeats - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from pdlab.analysis.intervals import Estimate, of_repeats

S = TypeVar("S")
# With fewer levels their likeness cannot be estimated: coverage is one or two per cent below nominal.
LEAST = 5


class VariancePrior(NamedTuple):
    """``variance`` (relative, s0^2) with the weight of ``dof`` (d0, may be infinite) degrees of freedom."""

    variance: float
    dof: float


class RepeatStudy(Generic[S]):
    """The repeats of all levels in one comparison: per curve, per level, one sample per repeat."""

    def __init__(self, curves: Sequence[Sequence[Sequence[S]]]) -> None:
        self._levels = [level for curve in curves for level in curve if len(level) > 1]
        self._dof = sum(max((len(level) - 1 for level in curve), default=0) for curve in curves)
        self._priors: dict[Hashable, VariancePrior | None] = {}

    def moderate(self, estimate: Estimate, key: Hashable, value_of: Callable[[S], float | None]) -> Estimate:
        """``estimate`` (of repeats) with its scatter moderated. ``key`` identifies the figure ``value_of`` a sample."""
        if estimate.standard_error is None or estimate.dof is None or estimate.basis != "repeats" or not estimate.value:
            return estimate
        if key not in self._priors:
            self._priors[key] = self._prior(value_of)
        prior = self._priors[key]
        return estimate if prior is None else _shrunk(estimate, prior, self._dof)

    def _prior(self, value_of: Callable[[S], float | None]) -> VariancePrior | None:
        variances = []
        for level in self._levels:
            values = [value for sample in level if (value := value_of(sample)) is not None]
            if len(values) == len(level) and (variance := repeat_variance(of_repeats(values))):
                variances.append(LevelVariance(variance, len(values) - 1))
        return estimate_prior(variances)


def moderate_all(estimates: Sequence[Estimate | None]) -> list[Estimate | None]:
    """One figure of several independent configurations, such as throughput at a bound: each moderated by all.

    Unchanged for fewer than five, for estimates without repeats, and at the edge of what was measured.
    """
    usable = [e for e in estimates if e is not None and _rests_on_repeats(e)]
    witnesses = [LevelVariance(repeat_variance(e), round(e.dof or 1)) for e in usable if repeat_variance(e) > 0]
    prior = estimate_prior(witnesses)
    if prior is None:
        return list(estimates)
    independent = math.fsum(e.dof or 0.0 for e in usable)
    return [_shrunk(e, prior, independent) if e is not None and _rests_on_repeats(e) else e for e in estimates]


def _rests_on_repeats(estimate: Estimate) -> bool:
    """Whether its scatter is known, and from repeats."""
    error = estimate.relative_error
    known = error is not None and not math.isinf(error) and bool(estimate.dof)
    return estimate.basis == "repeats" and known and not estimate.edge


def repeat_variance(estimate: Estimate) -> float:
    """Relative variance of one repeat, from the error of the mean of dof + 1."""
    return (estimate.relative_error or 0.0) ** 2 * ((estimate.dof or 0.0) + 1)


def _shrunk(estimate: Estimate, prior: VariancePrior, most_dof: float) -> Estimate:
    assert estimate.dof is not None
    if math.isinf(prior.dof):
        variance, dof = prior.variance, math.inf
    else:
        dof = prior.dof + estimate.dof
        variance = (prior.dof * prior.variance + estimate.dof * repeat_variance(estimate)) / dof
    return estimate._replace(
        standard_error=math.sqrt(max(variance, repeat_variance(estimate)) / (estimate.dof + 1)) * abs(estimate.value),
        dof=max(estimate.dof, min(dof, most_dof)),
    )


class LevelVariance(NamedTuple):
    """A level's variance, above 0, and its degrees of freedom."""

    variance: float
    dof: int


def estimate_prior(variances: Sequence[LevelVariance]) -> VariancePrior | None:
    """Smyth's moments of log variances; None for too few."""
    count = len(variances)
    if count < LEAST:
        return None
    from scipy.special import digamma

    logs = [math.log(v) - digamma(d / 2) + math.log(d / 2) for v, d in variances]
    mean = math.fsum(logs) / count
    spread = math.fsum((e - mean) ** 2 for e in logs) / (count - 1)
    excess = spread - math.fsum(trigamma(d / 2) for _, d in variances) / count
    if excess <= 0:
        # They differ only by chance: the pooled variance, because the mean of logs is too low.
        pooled = math.fsum(v * d for v, d in variances) / sum(d for _, d in variances)
        return VariancePrior(pooled, math.inf)
    half = inverse_trigamma(excess)
    return VariancePrior(math.exp(mean + digamma(half) - math.log(half)), 2 * half)


def trigamma(x: float) -> float:
    """Second derivative of ln gamma, for x > 0: Hurwitz's zeta function of 2."""
    from scipy.special import zeta

    return float(zeta(2, x))


def inverse_trigamma(value: float) -> float:
    """The x > 0 with trigamma(x) = value, by bisection on a logarithmic scale."""
    low, high = 1e-8, 1e8
    for _ in range(200):
        middle = math.sqrt(low * high)
        if trigamma(middle) > value:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
