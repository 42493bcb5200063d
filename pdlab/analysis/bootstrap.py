"""A curve and its bootstrap draws: its value at any bound, with a standard error.

A curve is the straight line through its valid levels, in the order of load. It is never extended beyond them. A draw
moves every level by resampled repeats (`intervals.resample`). The levels of one curve share the weights of a repeat, so
that the effect of one repeat moves them together. The draws have the repeats' own scatter. A figure read off several
curves is moderated as a whole (`shrinkage.moderate_all`), because the relation of latency and throughput is as
uncertain as each of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pdlab.analysis.curves import Curve, Point
from pdlab.analysis.intervals import Array, Basis, Estimate, multipliers, resample
from pdlab.analysis.polylines import highest
from pdlab.analysis.power import ScatteredFigure, single_repeat_sd

# The standard error of a standard error is then 1 / sqrt(2 * 500), 3 %.
DRAWS = 500
SEED = 20251113
# A bound is at the edge of the measurement if more than this share of the draws does not reach it.
MAX_UNREACHED = 0.05

PointFigure = Callable[[Point], Estimate | None]
RepeatValues = Callable[[Point], Sequence[float]]


class LevelFigure(NamedTuple):
    """A figure of a level: its estimate, and its values in the level's repeats.

    ``scatters``: of a single repeat, it is taken to scatter as the one of these that scatters most. ``at_factors``:
    the figure in starts whose latencies are multiplied by each of (draws,); None: it is multiplied itself."""

    estimate: PointFigure
    repeats: RepeatValues
    scatters: tuple[ScatteredFigure, ...]
    at_factors: Callable[[Point, Array], Array] | None = None


@dataclass(frozen=True, eq=False)
class DrawnLine:
    """One line of a curve: ``y`` (1 + draws, points) against figures that are better when lower, ``x`` (1 + draws,
    points, figures). Row 0 is the estimate."""

    x: Array
    y: Array
    dof: float
    basis: Basis | None

    def mirrored(self) -> DrawnLine:
        """x (of one figure) and y exchanged and negated: "highest y at most x" then answers "lowest x at least y"."""
        return DrawnLine(-self.y[:, :, None], -self.x[:, :, 0], self.dof, self.basis)

    def reach(self, bounds: Array) -> Array:
        """Highest y where every x is within its bound: (n, figures), or (n,) of one figure -> (1 + draws, n)."""
        return highest(self.x, self.y, bounds.reshape(len(bounds), -1))

    def open_ended(self, bounds: Array) -> bool:
        """Whether the last point is within the bounds (figures,), or is so in more than `MAX_UNREACHED` of the draws: y
        may be higher beyond the line."""
        within = np.all(self.x[:, -1] <= bounds, axis=1)
        return bool(within[0] or within[1:].mean() > MAX_UNREACHED)

    def estimates(self, reached: Array) -> list[Estimate | None]:
        """One per column of the result of `reach` (or a function of it); None if the estimate is NaN."""
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
    x: Sequence[LevelFigure],
    y: LevelFigure,
    x_factor: float = 1.0,
    y_factor: float = 1.0,
) -> DrawnLine | None:
    """The line through ``points``, all figures known at each; None without points.

    If any level has a single repeat, an assumed scatter between repeats is added: one draw for the latencies, scaled to
    each, and one for the rates, common to all levels of the curve.
    """
    if not points:
        return None
    most_repeats = max(sample.repeat for point in points for sample in point.samples) + 1
    seed = (SEED, zlib.crc32(curve.label.encode()))
    weights = multipliers(seed, DRAWS, most_repeats)
    generator = np.random.default_rng([*seed, 1])
    columns = [_draws(point, each.estimate, each.repeats, weights, generator) for each in (*x, y) for point in points]
    single = min(point.repeats for point in points) < 2
    dof = math.inf if single else float(min(point.repeats for point in points) - 1)
    drawn = np.stack(columns, axis=1).reshape(-1, len(x) + 1, len(points))
    if single:  # Another start would shift all latencies together, and all rates.
        common = generator.standard_normal((len(weights), 2))[:, [*(0 for _ in x), 1]]
        sd = np.array([single_repeat_sd(curve.gpus.device, *each.scatters) for each in (*x, y)])
        factors = np.maximum(1 + sd * common, 0.0)
        for i, each in enumerate((*x, y)):
            if each.at_factors is None:
                drawn[1:, i] *= factors[:, i, None]
                continue
            for j, point in enumerate(points):
                drawn[1:, i, j] += each.at_factors(point, factors[:, i]) - drawn[0, i, j]
    if not np.ptp(drawn, axis=0).any():
        drawn = drawn[:2]  # Without a known scatter all draws are equal.
    return DrawnLine(
        x=drawn[:, :-1].swapaxes(1, 2) * x_factor,
        y=drawn[:, -1] * y_factor,
        dof=dof,
        basis="assumed" if single else "repeats",
    )


def _draws(
    point: Point, figure: PointFigure, values: RepeatValues, weights: Array, generator: np.random.Generator
) -> Array:
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
