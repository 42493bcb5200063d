"""A curve and its bootstrap draws: what it gives at any bound, with a standard error.

A curve is the straight line through its valid levels, in the order of load, and is never extended
beyond them. A draw moves every level by resampled repeats (`intervals.resample`); the levels of one
curve share the weights of a repeat, so that what one repeat has in common moves them together. The draws
have the repeats' own scatter; a figure read off several curves is moderated as a whole
(`shrinkage.moderate_all`), because how latency and throughput go together is as uncertain as each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdlab.analysis.curves import Curve, Point
from pdlab.analysis.intervals import Array, Basis, Estimate, multipliers, resample

# The standard error of a standard error from so many draws is 1 / sqrt(2 * 500), 3 %.
DRAWS = 500
SEED = 20251113
# Repeats of one configuration on different days differed by 4 % in requests/s and 5 % in TPOT (medians,
# published H100 runs of gpt-oss-120b). The median of |a - b| of two normal values is 0.954 standard
# deviations of one, so a single repeat is taken as one draw with a standard deviation of 5 %. On CPUs, which
# engines share with everything else: 9 % in output tokens/s and 15 % in median TPOT, pooled over the 24 levels of
# three repeats in bm_results/; the larger is taken.
SINGLE_REPEAT_SD: dict[str, float] = {"gpu": 0.05, "cpu": 0.15}
# A bound that this share of the draws does not reach is at the edge of what was measured.
MAX_UNREACHED = 0.05

Figure = Callable[[Point], Estimate | None]
Values = Callable[[Point], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a curve. ``x`` and ``y`` are (1 + draws, points); row 0 is the estimate, lower x is better."""

    x: Array
    y: Array
    dof: float
    basis: Basis | None

    def mirrored(self) -> Line:
        """x and y exchanged, so that "highest y at most x" answers "lowest x at least y" with its sign turned."""
        return Line(-self.y, -self.x, self.dof, self.basis)

    def reach(self, bounds: Array) -> Array:
        """Highest y where x <= bound: (1 + draws, bounds); NaN if the line does not reach the bound."""
        best = np.full((self.x.shape[0], len(bounds)), -np.inf)
        for i in range(self.x.shape[1]):
            x0, y0 = self.x[:, i, None], self.y[:, i, None]
            best = np.maximum(best, np.where(x0 <= bounds, y0, -np.inf))
            if i + 1 < self.x.shape[1]:
                x1, y1 = self.x[:, i + 1, None], self.y[:, i + 1, None]
                between = (np.minimum(x0, x1) < bounds) & (bounds < np.maximum(x0, x1))
                with np.errstate(divide="ignore", invalid="ignore"):
                    y = y0 + (y1 - y0) * (bounds - x0) / (x1 - x0)
                best = np.maximum(best, np.where(between, y, -np.inf))
        return np.where(np.isinf(best), np.nan, best)

    def estimates(self, reached: Array) -> list[Estimate | None]:
        """One per column of what `reach` (or a function of it) gave; None if the estimate is NaN."""
        estimates: list[Estimate | None] = []
        for column in reached.T:
            value, draws = float(column[0]), column[1:]
            if math.isnan(value):
                estimates.append(None)
                continue
            known_draws = draws[~np.isnan(draws)]
            if self.basis is None:
                estimates.append(Estimate(value=value))
            else:
                edge = len(known_draws) < (1 - MAX_UNREACHED) * len(draws)
                error = math.sqrt(float(np.mean((known_draws - value) ** 2))) if len(known_draws) else math.inf
                estimates.append(Estimate(value, error, self.dof, self.basis, edge))
        return estimates


def line(
    curve: Curve,
    points: Sequence[Point],
    x: tuple[Figure, Values],
    y: tuple[Figure, Values],
    x_factor: float = 1.0,
    y_factor: float = 1.0,
) -> Line | None:
    """The line through ``points``, both figures known at each; None without points.

    A figure is its estimate at a level, and its values in the level's repeats. With a single repeat
    anywhere, a scatter between repeats is assumed, of latencies and of rates, common to all levels of the curve.
    """
    if not points:
        return None
    highest = max(sample.repeat for point in points for sample in point.samples) + 1
    seed = (SEED, zlib.crc32(curve.label.encode()))
    weights = multipliers(seed, DRAWS, highest)
    generator = np.random.default_rng([*seed, 1])
    columns = [_draws(point, figure, values, weights, generator) for figure, values in (x, y) for point in points]
    single = min(point.repeats for point in points) < 2
    dof = math.inf if single else float(min(point.repeats for point in points) - 1)
    drawn = np.stack(columns, axis=1)
    if single:  # Another start would shift all latencies together, and all rates.
        starts = 1 + SINGLE_REPEAT_SD[curve.gpus.device] * generator.standard_normal((len(weights), 2))
        drawn[1:] *= np.repeat(np.maximum(starts, 0.0), len(points), axis=1)
    if not np.ptp(drawn, axis=0).any():
        drawn = drawn[:2]  # No scatter is known: one draw stands for all.
    return Line(
        x=drawn[:, : len(points)] * x_factor,
        y=drawn[:, len(points) :] * y_factor,
        dof=dof,
        basis="assumed" if single else "repeats",
    )


def _draws(point: Point, figure: Figure, values: Values, weights: Array, generator: np.random.Generator) -> Array:
    """(1 + draws,): the estimate, then its draws."""
    estimate = figure(point)
    assert estimate is not None, "only points with both figures are drawn"
    if point.repeats > 1:
        repeat_values = np.array(values(point), dtype=np.float64)
        drawn = (
            resample(repeat_values, weights[:, [sample.repeat for sample in point.samples]])
            - repeat_values.mean()
            + estimate.value
        )
    else:
        drawn = estimate.value + generator.standard_normal(len(weights)) * (estimate.standard_error or 0.0)
    return np.concatenate([[estimate.value], drawn])
