"""Where a label fits: boxes in one plane (pixels, y up), without a drawing library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, hypot
from typing import NamedTuple


class Box(NamedTuple):
    """Axis-aligned box, x0 <= x1 and y0 <= y1."""

    x0: float
    y0: float
    x1: float
    y1: float

    def hits(self, other: Box) -> bool:
        """Whether the insides overlap; touching edges do not."""
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def within(self, other: Box) -> bool:
        return self.x0 >= other.x0 and self.y0 >= other.y0 and self.x1 <= other.x1 and self.y1 <= other.y1

    def distance(self, point: tuple[float, float]) -> float:
        """From its nearest edge to a point; 0 inside."""
        x, y = point
        return hypot(max(self.x0 - x, 0.0, x - self.x1), max(self.y0 - y, 0.0, y - self.y1))


def around(center: tuple[float, float], radius: float) -> Box:
    """The square of half-width ``radius`` around a point."""
    x, y = center
    return Box(x - radius, y - radius, x + radius, y + radius)


def along(path: Sequence[tuple[float, float]], radius: float) -> Iterable[Box]:
    """Squares that cover the segments of a path, at most two radii apart."""
    for (x0, y0), (x1, y1) in pairwise(path):
        steps = max(1, ceil(hypot(x1 - x0, y1 - y0) / (2 * radius)))
        for i in range(steps + 1):
            yield around((x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps), radius)


def fit(
    anchor: tuple[float, float],
    size: tuple[float, float],
    occupied: Sequence[Box],
    inside: Box,
    gaps: Sequence[float],
    others: Sequence[tuple[float, float]] = (),
) -> Box | None:
    """First free place for a box of ``size`` (width, height) beside the anchor; None if there is none.

    Tries right, above, below, left and the corners between, at each gap in turn. The box is never nearer to one of
    ``others`` than to the anchor, because it would be read as theirs.
    """
    width, height = size
    x, y = anchor
    for gap in gaps:
        lefts = {"right": x + gap, "center": x - width / 2, "left": x - gap - width}
        bottoms = {"above": y + gap, "middle": y - height / 2, "below": y - gap - height}
        for across, up in _SIDES:
            box = Box(lefts[across], bottoms[up], lefts[across] + width, bottoms[up] + height)
            if not box.within(inside) or any(box.hits(blocker) for blocker in occupied):
                continue
            distance = box.distance(anchor)
            if all(box.distance(other) >= distance for other in others):
                return box
    return None


_SIDES = (
    ("right", "middle"),
    ("right", "above"),
    ("right", "below"),
    ("center", "above"),
    ("center", "below"),
    ("left", "above"),
    ("left", "below"),
    ("left", "middle"),
)
