"""How many points a band holds, and how many a right band would hold by chance. Pure.

Levels of a stack are off together, and so are stacks of a model that nobody measured. So a right band, one that holds
90 % of all new points, holds nearly all points of one group and few of another. How few is drawn from the error
components (`pdlab.plan.stack_prior.ErrorComponents`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np

from pdlab.plan.correction_fit import Array, LevelSetting
from pdlab.plan.error_catalog import NEAR
from pdlab.plan.prediction_intervals import NORMAL_90
from pdlab.plan.stack_prior import ErrorComponents, Stack, group_of

DRAWS = 2000


class BandedLevel(NamedTuple):
    """One figure that has a band. ``unseen``: of model, gpu and engine of its stack."""

    stack: Stack
    unseen: tuple[str, ...]
    setting: LevelSetting
    components: ErrorComponents
    predicted_s: float


class PointsInBand(NamedTuple):
    """``inside``: points in a band; ``drawn``: as many times as was drawn, those in a right band."""

    inside: int
    of: int
    drawn: Array

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.inside / self.of

    @property
    def by_chance(self) -> tuple[float, float]:
        """The shares between which 95 of 100 right bands are."""
        low, high = np.quantile(self.drawn / self.of, (0.025, 0.975))
        return float(low), float(high)

    @property
    def near_by_chance(self) -> float:
        """How often a right band has a share in `NEAR`."""
        shares = self.drawn / self.of
        return float(np.mean((shares >= NEAR[0]) & (shares <= NEAR[1])))


def points_in_band(inside: Sequence[bool], levels: Sequence[BandedLevel]) -> PointsInBand:
    """``inside``: whether each of the levels is."""
    return PointsInBand(sum(inside), len(levels), drawn_inside(levels))


def sum_of(held: Sequence[PointsInBand]) -> PointsInBand:
    """Of all their points, as if groups were independent."""
    drawn = np.sum([each.drawn for each in held], axis=0)
    return PointsInBand(sum(each.inside for each in held), sum(each.of for each in held), drawn)


def drawn_inside(levels: Sequence[BandedLevel]) -> Array:
    """How many of the levels are inside of a right band, `DRAWS` times: errors are normal and have these parts."""
    rng = np.random.default_rng(crc32("; ".join(sorted({each.stack.label for each in levels})).encode()))
    common: dict[Hashable, Array] = {}
    for place, each in enumerate(levels):
        parts = each.components
        sds: dict[Hashable, float] = {each.stack: parts.stack}
        sds |= {(kind, group_of(each.stack, kind)): getattr(parts, kind) for kind in each.unseen}
        for field, label in zip(LevelSetting._fields, each.setting, strict=True):
            sds[each.stack, field, label] = getattr(parts, field)
        for key, sd in sds.items():
            common.setdefault(key, np.zeros(len(levels)))[place] = sd
    own = np.array(
        [math.hypot(each.components.level, each.components.fixed_ms / 10 / each.predicted_s) for each in levels]
    )
    errors = rng.normal(size=(DRAWS, len(levels))) * own
    for of_levels in common.values():
        errors += rng.normal(size=(DRAWS, 1)) * of_levels
    reach = [100 * NORMAL_90 * each.components.sd(unseen=each.unseen, predicted_s=each.predicted_s) for each in levels]
    inside: Array = np.sum(np.abs(errors) <= np.array(reach), axis=1).astype(float)
    return inside
