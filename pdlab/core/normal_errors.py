"""Standard deviations of normal errors, from medians."""

from __future__ import annotations

import math

TO_SD = 1.4826  # median absolute error -> standard deviation of a normal one


def sd_of_pairs(median_difference: float) -> float:
    """Standard deviation of one normal value, from the median absolute difference of two; in the same unit."""
    return TO_SD * median_difference / math.sqrt(2)
