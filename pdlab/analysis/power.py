"""The scatter that a single repeat is taken to have, and the difference that a number of repeats can resolve.

Without heavy imports: a dry run prints both.

**On GPUs** the scatter comes from published repeats of one configuration of gpt-oss-120b on different days (H100). The
median differences of two days are in the hardware file `pdlab.core.defaults.HARDWARE` (configs/catalog/), which
predictions read too: 4.1 % in requests/s, 8.1 % in mean TTFT and 4.8 % in TPOT. `sd_of_pairs` converts them into the
standard deviation of one repeat: 4.3, 8.5 and 5.0 %. Output tokens/s are taken to scatter as requests/s, and the
percentiles of a latency as its mean.

**On CPUs** engines share cores with everything else. The scatter is that of 24 levels with 2 or 3 repeats in
bm_results/: the standard deviation of logarithms within a level, pooled.

ITL on GPUs scatters as TPOT, which is the mean of a request's gaps. E2EL on GPUs was not measured. It is the sum of
TTFT and of TPOT times the later tokens, so it scatters by no larger a share than the larger of these two.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import Literal

from pydantic import ConfigDict, Field

from pdlab.core import defaults
from pdlab.core.bounds import Metric
from pdlab.core.catalog import find_config
from pdlab.core.normal_errors import sd_of_pairs
from pdlab.core.schema import Frozen, load_yaml
from pdlab.core.workload import Slo
from pdlab.results.metrics import student_t

ScatteredFigure = Literal["throughput"] | Metric

# Standard deviations of logarithms; `tests/analysis/test_power.py` pools the repeats again.
CPU_SD: dict[ScatteredFigure, float] = {"throughput": 0.12, "ttft": 0.10, "tpot": 0.17, "itl": 0.14, "e2el": 0.12}
POWER, CONFIDENCE = 0.8, 0.95
DRAWS, STEPS = 2000, 20


class _DayDifferences(Frozen):
    """Median differences of two days, in percent."""

    model_config = ConfigDict(extra="ignore")

    requests_per_s_days_percent: float = Field(gt=0)
    ttft_days_percent: float = Field(gt=0)
    tpot_days_percent: float = Field(gt=0)


class _PublishedRepeats(Frozen):
    """The part of a hardware file that states how repeats differ."""

    model_config = ConfigDict(extra="ignore")

    error: _DayDifferences


def single_repeat_sd(device: Literal["gpu", "cpu"], *figures: ScatteredFigure) -> float:
    """Standard deviation between starts of the logarithm of a figure with one repeat: the largest of ``figures``."""
    of_device = CPU_SD if device == "cpu" else _gpu_sd()
    return max(of_device[figure] for figure in figures)


@lru_cache
def _gpu_sd() -> dict[ScatteredFigure, float]:
    days = load_yaml(find_config("catalog", defaults.HARDWARE, "hardware"), _PublishedRepeats).error
    throughput, ttft, tpot = (
        sd_of_pairs(percent / 100)
        for percent in (days.requests_per_s_days_percent, days.ttft_days_percent, days.tpot_days_percent)
    )
    return {"throughput": throughput, "ttft": ttft, "tpot": tpot, "itl": tpot, "e2el": max(ttft, tpot)}


def of_slo(slo: Slo) -> tuple[ScatteredFigure, ...]:
    """The latencies that an SLO bounds."""
    bounds: dict[ScatteredFigure, bool] = {
        "ttft": slo.ttft_s is not None,
        "tpot": slo.tpot_s is not None,
        "e2el": slo.e2el_s is not None,
        "itl": slo.of_gaps,
    }
    return tuple(figure for figure, bounded in bounds.items() if bounded)


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
    return math.exp(min(sd * _detectable_sds(repeats, level, comparisons), 100.0))


@lru_cache(maxsize=4096)
def _detectable_sds(repeats: int, level: float, comparisons: int) -> float:
    """The logarithm of that ratio, in standard deviations of one repeat."""
    tail = (1 - level) / 2 / max(1, comparisons)
    if repeats < 2:
        return (student_t(1 - tail, math.inf) + student_t(POWER, math.inf)) * math.sqrt(2)
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
    return least[math.ceil(POWER * DRAWS) - 1]


def repeats_for(ratio: float, sd: float, level: float, comparisons: int = 1, most: int = 1000) -> int | None:
    """The fewest repeats, at least two, that resolve a ratio; None if ``most`` do not."""
    if detectable(sd, most, level, comparisons) > ratio:
        return None
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(sd, middle, level, comparisons) <= ratio else (middle, high)
    return high
