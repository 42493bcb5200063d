"""The difference that a number of repeats can resolve, and how several looks share the error.

Pure, and without heavy imports: a dry run prints it.
"""

from __future__ import annotations

import math
import random

from pydantic import Field

from pdlab.core.schema import Frozen
from pdlab.results.metrics import student_t

# Repeats of one configuration on different days differed by 4 % in requests/s and 5 % in TPOT (medians,
# published H100 runs of gpt-oss-120b). The median of |a - b| of two normal values is 0.954 standard
# deviations of one, so a single repeat is taken as one draw with a standard deviation of 5 %. On CPUs, which
# engines share with everything else: 9 % in output tokens/s and 15 % in median TPOT, pooled over the 24 levels of
# three repeats in bm_results/; the larger is taken.
SINGLE_REPEAT_SD: dict[str, float] = {"gpu": 0.05, "cpu": 0.15}
POWER, CONFIDENCE = 0.8, 0.95
DRAWS, STEPS = 2000, 20


class LookSchedule(Frozen):
    """A look after ``first`` repeats and after each further one, up to ``cap``."""

    first: int = Field(ge=1)
    cap: int = Field(ge=1)

    @property
    def count(self) -> int:
        return max(1, self.cap - self.first + 1)

    def level(self, confidence: float) -> float:
        """Confidence of the interval at each look so that all of them together hold with ``confidence`` (union
        bound)."""
        return 1 - (1 - confidence) / self.count


def detectable(sd: float, repeats: int, level: float, comparisons: int = 1) -> float:
    """The smallest ratio above 1 of two deployments that `compare` distinguishes from 1 with probability `POWER`.

    ``sd``: standard deviation between starts of the logarithm of one repeat. The result is simulated with a fixed seed,
    because with three repeats the scatter of the scatter matters, which formulas with normal quantiles lack. With one
    repeat each, whose scatter is assumed, the quantiles are normal.
    """
    tail = (1 - level) / 2 / max(1, comparisons)
    if repeats < 2:
        return math.exp((student_t(1 - tail, math.inf) + student_t(POWER, math.inf)) * sd * math.sqrt(2))
    dof = repeats - 1
    # Welch's degrees of freedom lie between those of one and of both; t is smooth in their reciprocal.
    grid = [student_t(1 - tail, dof / (1 - step / (2 * STEPS))) for step in range(STEPS + 1)]
    draw = random.Random(repeats)
    least = []
    for _ in range(DRAWS):
        first, second = (draw.gammavariate(dof / 2, 2.0) / dof for _ in range(2))
        shares = (first**2 + second**2) / (first + second) ** 2  # 1 / Welch's degrees of freedom, times dof
        at = 2 * STEPS * (1 - shares)
        low = min(int(at), STEPS - 1)
        t = grid[low] + (grid[low + 1] - grid[low]) * (at - low)
        least.append(t * math.sqrt((first + second) / repeats) - draw.gauss(0, math.sqrt(2 / repeats)))
    least.sort()
    return math.exp(min(sd * least[math.ceil(POWER * DRAWS) - 1], 100.0))


def repeats_for(ratio: float, sd: float, level: float, comparisons: int = 1, most: int = 1000) -> int | None:
    """The fewest repeats, at least two, that resolve a ratio; None if ``most`` do not."""
    if detectable(sd, most, level, comparisons) > ratio:
        return None
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(sd, middle, level, comparisons) <= ratio else (middle, high)
    return high
