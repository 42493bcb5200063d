"""Where 90 % of measured values are expected around a prediction, in logarithms; the parts add in squares.

- **Common**: what the levels of a configuration are off by together: structure of the model, constants.
- **Level**: what one level is off by beyond that and beyond what is known of it. A part of it may be a time in ms that
  does not grow with the figure (``fixed_ms``): short figures are off by a larger share.
- **Chance**: the scatter between the seeds of this very prediction, large near saturation.
- **Pool**: where scattered blocks of a wrapped KV pool may be copied one by one, a share of what that changes.
- **Days**: how far two measurements of one configuration on different days differ, over the square root of two.

The first two come from errors on experiments left out of the fit, a few configurations of several levels each: the
normal distributions that make them most likely, each level's chance and pool being known (a one-way layout with random
groups and known variances; Searle, Casella and McCulloch, Variance Components, 1992). So a level of which little was
to be expected says little. Medians of absolute errors become standard deviations as those of a normal distribution do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.sim.hardware import TO_SD, ErrorParts, FitError

# What a block that is copied alone costs: the two levels with a wrapped pool ask for 0.7 and 1.5 of the value used.
POOL = 0.4
NORMAL_90 = 1.6449
SEEDS = (0, 1, 2, 3)  # of the simulations whose mean is a prediction


def scatter(values: Sequence[float], merged: float | None = None) -> float:
    """Standard deviation of the logarithm of one prediction that is known without a measurement: ``values`` of the
    seeds (their mean is predicted, one of them is measured), ``merged`` the mean where scattered blocks merge."""
    logs = [math.log(value) for value in values]
    chance = statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs)) if len(logs) > 1 else 0.0
    gap = 0.0 if merged is None else math.log(statistics.fmean(values) / merged)
    return math.hypot(chance, POOL * gap)


class LevelError(NamedTuple):
    """``error``: logarithm of measured over predicted; ``known``: its `scatter`."""

    error: float
    known: float


def error_parts(configurations: Sequence[Sequence[LevelError]]) -> ErrorParts | None:
    """Of the errors of each configuration's levels.

    The mean error is taken to be 0, since no prediction is corrected by it. None for fewer than two configurations, or
    where none has two levels: what they have in common cannot be told from the rest then.
    """
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
    """Of a configuration's levels by their variances: sums of weights and of weighted errors, and the rest of -2 times
    the logarithm of the likelihood."""
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
    days = TO_SD * days_percent / math.sqrt(2)
    shares = (parts.common_percent / 100, parts.level_percent / 100, days / 100, parts.fixed_ms / predicted_ms)
    return NORMAL_90 * math.hypot(*shares, known)


def of(error: FitError, metric: str, known: float, value: float) -> float:
    """`half_width` of TPOT, mean TTFT (ms) or requests/s, whose prediction is ``value``."""
    median, days = error.percent(metric)
    plain = ErrorParts(common_percent=0.0, level_percent=TO_SD * median)
    return half_width(error.parts.get(metric, plain), days, known, value)
