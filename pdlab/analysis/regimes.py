"""The best of several curves of TPOT over throughput in each range of throughput, in few ranges. Pure.

At a throughput a curve offers its lowest TPOT at that throughput or more, straight between neighbouring points. Beyond
its last point it offers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pdlab.analysis.polylines import highest

REGIME_STEPS = 80


class ThroughputPoint(NamedTuple):
    """A level of a curve; output tokens/s are per node."""

    tokens_per_s: float
    tpot_s: float


ThroughputCurve = Sequence[ThroughputPoint]  # by throughput


@dataclass(frozen=True, slots=True)
class Regime:
    """A range of throughput (output tokens/s per node) in which ``label`` has the lowest TPOT, or one within the error.

    ``rivals``: others that are within the error over the whole range.
    """

    label: str
    from_tokens_per_s: float
    to_tokens_per_s: float
    from_tpot_s: float
    to_tpot_s: float
    rivals: tuple[str, ...]


def stretches(curves: Mapping[str, ThroughputCurve], tolerance: float) -> list[Regime]:
    """The fewest ranges of throughput so that one curve is within ``tolerance`` of the lowest TPOT in each."""
    drawn = {label: curve for label, curve in curves.items() if curve}
    if not drawn:
        return []
    low = min(curve[0].tokens_per_s for curve in drawn.values())
    top = max(curve[-1].tokens_per_s for curve in drawn.values())
    grid = [*(low + (top - low) * step / REGIME_STEPS for step in range(REGIME_STEPS)), top]
    offered = dict(zip(drawn, tpots_at(list(drawn.values()), grid), strict=True))
    tpots = [
        {label: t for label, tpots_s in offered.items() if (t := tpots_s[i]) is not None} for i in range(len(grid))
    ]
    close = [{label for label, t in at.items() if t <= (1 + tolerance) * min(at.values())} for at in tpots]
    regimes: list[Regime] = []
    start = 0
    while start < len(grid):

        def reach(label: str, start: int = start) -> tuple[int, float]:
            end = start
            while end < len(grid) and label in close[end]:
                end += 1
            return end, -sum(tpots[i][label] for i in range(start, end)) / max(end - start, 1)

        label = max(sorted(close[start]), key=reach)
        end, _ = reach(label)
        rivals = set.intersection(*close[start:end]) - {label}
        regimes.append(
            Regime(label, grid[start], grid[end - 1], tpots[start][label], tpots[end - 1][label], tuple(sorted(rivals)))
        )
        start = end
    return regimes


def tpots_at(curves: Sequence[ThroughputCurve], least_throughput: Sequence[float]) -> list[list[float | None]]:
    """Of each curve the lowest TPOT at each of these throughputs or more, straight between neighbours; None beyond the
    curve."""
    count = max(map(len, curves))
    # Curves of fewer points repeat the last one, which changes nothing.
    points = np.array([[*curve, *[curve[-1]] * (count - len(curve))] for curve in curves])
    throughput, tpot_s = points[..., 0], points[..., 1]
    lowest_s = -highest(-throughput[..., None], -tpot_s, -np.array(least_throughput)[:, None])
    return [[None if np.isnan(each) else float(each) for each in of_curve] for of_curve in lowest_s]
