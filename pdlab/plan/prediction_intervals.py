"""The interval around a prediction that holds 90 % of measured values. Its parts add in squares of logarithms.

- **Common**: what the levels of a configuration are off by together: structure of the model, constants.
- **Level**: what one level is off by beyond that and beyond what is known of it. A part of it may be a time in ms that
  does not grow with the figure (``fixed_ms``): short figures are off by a larger share.
- **Chance**: the scatter between the seeds of this very prediction, large near saturation.
- **Pool**: a share of the change if scattered blocks of a wrapped KV pool are copied one by one.
- **Days**: the difference of two measurements of one configuration on different days, over the square root of two.

The first two come from errors on experiments left out of the fit: a few configurations of several levels each. They
are the normal distributions that make these errors most likely, with known chance and pool of each level (a one-way
layout with random groups and known variances; Searle, Casella and McCulloch, Variance Components, 1992). So a level
with a large known variance has little weight. Medians of absolute errors become standard deviations by the ratio of a
normal distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.core.normal_errors import TO_SD, sd_of_pairs
from pdlab.sim.hardware import TO_90, ErrorParts, FitError

# The uncertainty of the cost of a block that is copied alone: the two levels with a wrapped pool fit 0.7 and 1.5 times
# the value that is used.
POOL = 0.4
NORMAL_90 = 1.6449
SEEDS = (0, 1, 2, 3)  # of the simulations whose mean is a prediction


def scatter(values: Sequence[float], merged: float | None = None) -> float:
    """The standard deviation of the logarithm of a prediction that is known without a measurement. ``values``: by each
    seed; their mean is predicted, and a measurement is like one of them. ``merged``: the mean if scattered blocks
    merge; None: that does not matter."""
    logs = [math.log(value) for value in values]
    chance = statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs)) if len(logs) > 1 else 0.0
    gap = 0.0 if merged is None else math.log(statistics.fmean(values) / merged)
    return math.hypot(chance, POOL * gap)


class LevelError(NamedTuple):
    """``error``: logarithm of measured over predicted; ``known``: its `scatter`."""

    error: float
    known: float


def error_parts(configurations: Sequence[Sequence[LevelError]]) -> ErrorParts | None:
    """The parts of the errors of the levels of each configuration. The mean error is taken as 0, because no prediction
    is corrected by it. None for fewer than two configurations, or if no configuration has two levels: the common part
    is unknown then."""
    groups = [group for group in configurations if group]
    if len(groups) < 2 or all(len(group) == 1 for group in groups):
        return None
    fits = []
    for level in TRIED:
        sums = [_sums(group, level) for group in groups]
        fits += [(sum(_unlikely(common, *each) for each in sums), common, level) for common in TRIED]
    _, common, level = min(fits)
    return ErrorParts(common_percent=round(100 * common, 2), level_percent=round(100 * level, 2))


def _sums(group: Sequence[LevelError], level: float) -> tuple[float, float, float]:
    """Three sums over a configuration's levels, with the inverse variances as weights. They are the sum of weights, the
    sum of weighted errors, and the rest of -2 times the logarithm of the likelihood."""
    variances = [level**2 + each.known**2 + LEAST**2 for each in group]
    weighted = [error / variance for (error, _), variance in zip(group, variances, strict=True)]
    rest = sum(math.log(variance) for variance in variances)
    rest += sum(error * each for (error, _), each in zip(group, weighted, strict=True))
    return sum(1 / variance for variance in variances), sum(weighted), rest


def _unlikely(common: float, weight: float, pulled: float, rest: float) -> float:
    """-2 times the logarithm of the likelihood of a configuration's errors, but for a constant."""
    grows = 1 + common**2 * weight
    return math.log(grows) + rest - common**2 * pulled**2 / grows


LEAST = 1e-4  # no figure is known better
TRIED = (0.0, *(0.002 * 1.15**step for step in range(40)))  # to 47 %


def half_width(
    parts: ErrorParts, days_percent: float = 0.0, known: float = 0.0, predicted_ms: float = math.inf
) -> float:
    """Of the interval, in logarithms: errors on runs left out, median difference between days, and the `scatter`.
    ``predicted_ms``: the figure, where the errors have a fixed time."""
    days = sd_of_pairs(days_percent / 100)
    shares = (parts.common_percent / 100, parts.level_percent / 100, days, parts.fixed_ms / predicted_ms)
    return NORMAL_90 * math.hypot(*shares, known)


class LatencyFactors(NamedTuple):
    """Factors on TPOT and TTFT."""

    tpot: float
    ttft: float


def factors_90(error: FitError, chance: tuple[float, float] = (0.0, 0.0)) -> LatencyFactors:
    """By which 90 % of TPOT and TTFT are longer or shorter than predicted at most: the median errors, widened.
    ``chance``: further median differences of TPOT and TTFT in percent, which the arrivals bring."""
    medians = zip((error.tpot_percent, error.ttft_percent), chance, strict=True)
    return LatencyFactors(*(math.exp(TO_90 * math.hypot(*each) / 100) for each in medians))


def of(error: FitError, metric: str, known: float, value: float) -> float:
    """`half_width` of TPOT, mean TTFT (ms) or requests/s, whose prediction is ``value``."""
    median, days = error.percent(metric)
    plain = ErrorParts(common_percent=0.0, level_percent=TO_SD * median)
    return half_width(error.parts.get(metric, plain), days, known, value)
