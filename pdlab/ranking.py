"""Do predictions put configurations in the measured order? Spearman's rank correlation at equal TPOT. Pure.

At a TPOT target every configuration has one throughput per node, read off its curve of levels. The
predicted and the measured throughputs of all configurations are ranked, and the ranks are correlated
(Pearson's coefficient of the ranks, ties sharing their mean rank: Spearman 1904). 1 is the same order,
0 no relation, -1 the reverse.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TARGETS_S = (0.007, 0.008, 0.009, 0.010, 0.011, 0.012)
FEWEST = 3  # configurations: two are in order or in reverse, whatever the model

Curve = Sequence[tuple[float, float]]  # (TPOT s, throughput per node) of each level, by load


class AtTarget(NamedTuple):
    """Rank correlation of the configurations that reach one TPOT target."""

    tpot_s: float
    configurations: tuple[str, ...]
    correlation: float


def throughput_at(curve: Curve, tpot_s: float) -> float | None:
    """Most throughput at that TPOT, straight between neighbouring levels; None where no part of the curve has it."""
    found = []
    for (tpot0_s, rate0), (tpot1_s, rate1) in pairwise(curve):
        if min(tpot0_s, tpot1_s) <= tpot_s <= max(tpot0_s, tpot1_s):
            share = (tpot_s - tpot0_s) / (tpot1_s - tpot0_s) if tpot1_s != tpot0_s else 1.0
            found.append(rate0 + share * (rate1 - rate0))
    return max(found, default=None)


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation of two equally long sequences; None where one of them is all ties or has fewer than two."""
    first, second = _ranks(one), _ranks(other)
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0, equal values share the mean of theirs."""
    _, group, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts + 1) / 2
    return means[group]


def rank_correlations(
    predicted: Mapping[str, Curve], measured: Mapping[str, Curve], targets_s: Sequence[float] = TARGETS_S
) -> list[AtTarget]:
    """Spearman's rank correlation of the configurations by throughput per node at each TPOT target.

    A configuration counts at a target where its predicted and its measured curve both pass through it: one
    that never reaches the target, or only beyond its lowest or highest level, is left out there, for
    nothing is extended. A target with fewer than three configurations, or where all are equal, is left out.
    """
    found = []
    for tpot_s in targets_s:
        rates = {
            name: (ours, theirs)
            for name in predicted
            if (ours := throughput_at(predicted[name], tpot_s)) is not None
            and (theirs := throughput_at(measured[name], tpot_s)) is not None
        }
        if len(rates) < FEWEST:
            continue
        correlation = spearman(*zip(*rates.values(), strict=True))
        if correlation is not None:
            found.append(AtTarget(tpot_s, tuple(rates), correlation))
    return found


def mean_correlation(found: Sequence[AtTarget]) -> float | None:
    """Mean over the targets; None without any."""
    return statistics.fmean(at.correlation for at in found) if found else None
