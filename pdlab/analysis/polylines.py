"""Straight lines between neighbouring points, and the highest of them within bounds. Pure; numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pdlab.analysis.intervals import Array


def highest(x: Array, y: Array, bounds: Array) -> Array:
    """Highest y of the straight lines between neighbouring points where every x is within its bound.

    ``x`` (lines, points, figures), ``y`` (lines, points), ``bounds`` (n, figures) -> (lines, n); NaN if a line is
    nowhere within. A single point is a line.
    """
    best = np.full((y.shape[0], len(bounds)), -np.inf)
    for i in range(y.shape[1]):
        x0, y0 = x[:, i, None, :], y[:, i, None]
        best = np.maximum(best, np.where((x0 <= bounds).all(axis=2), y0, -np.inf))
        if i + 1 == y.shape[1]:
            break
        slope, rise = x[:, i + 1, None, :] - x0, y[:, i + 1, None] - y0
        # Between two points all figures are within their bounds on one interval, from `opens` to `closes`.
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = (bounds - x0) / slope
        opens = np.where(slope < 0, crossing, 0.0).max(axis=2)
        closes = np.where(slope > 0, crossing, np.where((slope == 0) & (x0 > bounds), -1.0, 1.0)).min(axis=2)
        opens, closes = np.maximum(opens, 0.0), np.minimum(closes, 1.0)
        ends = y0 + rise * np.where(rise > 0, closes, opens)
        best = np.maximum(best, np.where(opens <= closes, ends, -np.inf))
    return np.where(np.isinf(best), np.nan, best)
