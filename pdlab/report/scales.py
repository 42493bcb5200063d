"""When an axis is logarithmic by default: one slow curve or one high load must not compress the others."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 20.0  # times between the lowest and the highest value of an axis
BEYOND = 3.0  # times the highest value of all other curves
CROWDED = 0.1  # share of a linear load axis
LOGARITHMIC = "log scale"


def logarithmic(values: Sequence[Sequence[float]]) -> bool:
    """Whether an axis with these values, one sequence per curve, is easier to read in powers."""
    positive_by_curve = [sorted(value for value in curve_values if value > 0) for curve_values in values]
    positive_by_curve = [curve_values for curve_values in positive_by_curve if curve_values]
    if not positive_by_curve:
        return False
    lowest, *_ = sorted(curve_values[0] for curve_values in positive_by_curve)
    highest, *others = sorted((curve_values[-1] for curve_values in positive_by_curve), reverse=True)
    return highest > SPAN * lowest or bool(others and highest > BEYOND * others[0])


def spans(values: Sequence[Sequence[float]]) -> bool:
    """Whether the throughput axis is easier to read in powers: the best levels of two curves are far apart."""
    positive = [best for curve_values in values if (best := max(curve_values, default=0.0)) > 0]
    return bool(positive) and max(positive) > SPAN * min(positive)


def loads_are_logarithmic(loads: Sequence[float], forced: bool | None) -> bool:
    """Whether a load axis is logarithmic; ``forced`` overrides it.

    None: if half of the loads or more would be in the first tenth of a linear axis.
    """
    if forced is not None:
        return forced
    return sum(load <= CROWDED * max(loads) for load in loads) >= len(loads) / 2
