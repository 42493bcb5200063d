"""One load held for long: latencies over time, and whether they changed. Pure.

A change compares the last third of the time with the first (`load_window`). Neighbouring requests are correlated, so
each third is cut into blocks of time, whose means are the sample (batch means; A. M. Law, Simulation Modeling and
Analysis, chapter 9). The result is the difference of the means of their logarithms, with Student's t. Its variance is
that around a line through each third, increased by the correlation of neighbouring blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from pdlab.core.workload import Closed, Load
from pdlab.results import metrics
from pdlab.results.schema import Change, Soak, SoakWindow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pdlab.results.level_data import Column, LevelData

WINDOW_S = 60.0
BLOCKS, FEWEST_BLOCKS = 10, 4  # in a third
PER_BLOCK = 3  # requests
PER_E2EL = 2.0  # shortest block, in median E2ELs: requests in flight together are correlated
SAME = 0.05  # an interval that holds 1 and is within this of 1 shows no change
NOTHING = 0.01  # so does any interval within this of 1
MOST_ALIKE = 0.8  # upper limit of the correlation of neighbouring blocks
LEAST_FREEDOM = 6  # by trials: with fewer, a change inside a third hides the one between thirds
BIAS = 3.0  # by trials on queues that do not change
LATENCIES = ("ttft", "tpot")


def soak(requests: LevelData, load: Load, requested_s: float) -> Soak:
    """The change over time of a load that was meant to be held for ``requested_s``."""
    import numpy as np

    window = load_window(requests, load)
    changes = {}
    for name in LATENCIES:
        values_s: Column = getattr(requests, f"{name}_s")
        judged = window.judges(requests, load) & requests.ok if window else requests.ok
        known = judged & ~np.isnan(values_s)
        if window is None or not known.any():
            changes[name] = Change(verdict="undecided", reason="no answers while the load is kept up")
            continue
        e2el_s = float(np.median(requests.e2el_s[judged]))
        values = list(zip(requests.arrival_s[known].tolist(), values_s[known].tolist(), strict=True))
        changes[name] = change(values, window.opens_s, window.closes_s, PER_E2EL * e2el_s)
    return Soak(requested_s=requested_s, windows=windows(requests), changes=changes)


def load_window(requests: LevelData, load: Load) -> metrics.LoadWindow | None:
    """The time in which the load is kept up.

    Closed loop: the steady window. Open loop: from 2 times the 95th percentile of E2EL on, to the last arrival before
    the first request that was in flight when the last one arrived. The steady window of an open loop begins where E2EL
    stops growing (MSER-5), which would hide what a soak is to show.
    """
    if isinstance(load, Closed):
        return metrics.steady_window(requests, load)
    return metrics.open_window(requests, until_level=False)


def windows(requests: LevelData, width_s: float = WINDOW_S) -> tuple[SoakWindow, ...]:
    """Latencies of the answered requests that arrived in each minute, and tokens of the answers that ended in it.

    A rest of up to half a minute at the end belongs to the last window; a longer one is a window of its own.
    """
    ends_s = float(requests.arrival_s[-1]) if len(requests) else 0.0
    count = max(1, round(ends_s / width_s))
    edges = [number * width_s for number in range(count)] + [max(ends_s, 1e-9)]
    answered = requests.answered

    def minutes(moment_s: Column) -> NDArray[np.int64]:
        return (moment_s / width_s).astype("int64").clip(max=count - 1)

    arrived, ended = minutes(answered.arrival_s), minutes(answered.finish_s)
    found = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        ones = answered.part(arrived == number)
        made = float(answered.output_tokens[(ended == number) & (answered.finish_s <= ends_s)].sum())
        found.append(
            SoakWindow(
                begins_s=begin,
                ends_s=end,
                requests=len(ones),
                output_tokens_per_s=made / (end - begin),
                ttft=metrics.distribution(ones.ttft_s),
                tpot=metrics.distribution(ones.tpot_s),
            )
        )
    return tuple(found)


def change(known: Sequence[tuple[float, float]], opens_s: float, closes_s: float, least_s: float) -> Change:
    """The last third of (moment, value) between two moments against the first. ``least_s``: shortest block."""
    third_s = (closes_s - opens_s) / 3
    blocks = min(BLOCKS, int(third_s / least_s) if least_s > 0 else BLOCKS)
    thirds: list[list[list[float]]] = []
    while blocks >= FEWEST_BLOCKS:
        thirds = [_cut(known, begin, third_s, blocks) for begin in (opens_s, closes_s - third_s)]
        if all(len(block) >= PER_BLOCK for third in thirds for block in third):
            break
        blocks -= 1
    if blocks < FEWEST_BLOCKS:
        return Change(verdict="undecided", reason="too few requests for a verdict: hold the load longer")
    first, last = ([math.log(fmean(block)) for block in third] for third in thirds)
    # Without its line: a steady change inside a third is not scatter.
    off = [metrics.fitted_line(third).rest for third in (first, last)]
    alike = _neighbour_correlation(off)
    longer = (1 + alike) / (1 - alike)
    freedom = 2 * (blocks - 2)
    error = math.sqrt(longer * 2 / blocks * math.fsum(value**2 for third in off for value in third) / freedom)
    difference = fmean(last) - fmean(first)
    half = metrics.student_t(0.975, max(LEAST_FREEDOM, int(freedom / longer))) * error
    low, high = math.exp(difference - half), math.exp(difference + half)
    verdict = "undecided"
    if low >= 1 - NOTHING and high <= 1 + NOTHING:
        verdict = "same"
    elif low > 1:
        verdict = "longer"
    elif high < 1:
        verdict = "shorter"
    elif low >= 1 - SAME and high <= 1 + SAME:
        verdict = "same"
    return Change.model_validate(
        {
            "first_s": fmean(value for block in thirds[0] for value in block),
            "last_s": fmean(value for block in thirds[1] for value in block),
            "ratio": math.exp(difference), "low": low, "high": high, "blocks": blocks, "verdict": verdict,
        }
    )  # fmt: skip


def _cut(known: Sequence[tuple[float, float]], begins_s: float, lasts_s: float, blocks: int) -> list[list[float]]:
    parts: list[list[float]] = [[] for _ in range(blocks)]
    for moment_s, value in known:
        if begins_s <= moment_s <= begins_s + lasts_s:
            parts[min(blocks - 1, int((moment_s - begins_s) / lasts_s * blocks))].append(value)
    return parts


def _neighbour_correlation(thirds: Sequence[Sequence[float]]) -> float:
    """Correlation of neighbouring blocks, both thirds together, from 0 to MOST_ALIKE.

    Few values underestimate it by about BIAS / their number, which is added.
    """
    squares = math.fsum(value**2 for third in thirds for value in third)
    pairs = math.fsum(a * b for third in thirds for a, b in pairwise(third))
    return min(MOST_ALIKE, max(0.0, pairs / squares + BIAS / len(thirds[0]))) if squares else 0.0
