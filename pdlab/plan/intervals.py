"""Where 90 % of measured values are expected around a prediction, in logarithms; the parts add in squares.

- **Constants and structure**: the error on experiments left out of the fit. That share is common to a configuration.
- **Days**: how far two measurements of one configuration on different days differ, over the square root of two; runs
  left out of a fit to runs of the same days do not show it.
- **Chance**: the scatter between the seeds of this very prediction, large near saturation.
- **Pool**: where scattered blocks of a wrapped KV pool may be copied one by one, a share of what that changes.

Medians of absolute errors become standard deviations as those of a normal distribution do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pdlab.sim.hardware import TO_90, TO_SD, FitError

# What a block that is copied alone costs: the two levels with a wrapped pool ask for 0.7 and 1.5 of the value used.
POOL = 0.4


def scatter(values: Sequence[float], merged: float | None = None) -> float:
    """Standard deviation of the logarithm of one prediction that is known without a measurement: ``values`` of the
    seeds (their mean is predicted, one of them is measured), ``merged`` the mean where scattered blocks merge."""
    logs = [math.log(value) for value in values]
    chance = statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs)) if len(logs) > 1 else 0.0
    gap = 0.0 if merged is None else math.log(statistics.fmean(values) / merged)
    return math.hypot(chance, POOL * gap)


def half_width(error_percent: float, days_percent: float = 0.0, known: float = 0.0) -> float:
    """Of the interval, in logarithms: median errors on runs left out and between days, and the `scatter`."""
    medians = math.hypot(error_percent, days_percent / math.sqrt(2)) / 100
    return TO_90 * math.hypot(medians, known / TO_SD)


def of(error: FitError, metric: str, known: float) -> float:
    """`half_width` of TPOT, mean TTFT or requests/s."""
    return half_width(*error.percent(metric), known)
