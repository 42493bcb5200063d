"""When an axis is logarithmic by default: one slow curve or one high load must not press the others together."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 20.0  # times between the lowest and the highest value of an axis
BEYOND = 3.0  # times that one curve reaches beyond the highest of all others
CROWDED = 0.1  # of a load axis
LOGARITHMIC = "log scale"


def logarithmic(values: Sequence[Sequence[float]]) -> bool:
    """Whether an axis that shows these, one sequence per curve, reads better in powers."""
    positive_by_curve = [sorted(value for value in curve_values if value > 0) for curve_values in values]
    positive_by_curve = [curve_values for curve_values in positive_by_curve if curve_values]
    if not positive_by_curve:
        return False
    lowest, *_ = sorted(curve_values[0] for curve_values in positive_by_curve)
    highest, *others = sorted((curve_values[-1] for curve_values in positive_by_curve), reverse=True)
    return highest > SPAN * lowest or bool(others and highest > BEYOND * others[0])


def spans(values: Sequence[Sequence[float]]) -> bool:
    """Whether the throughput axis reads better in powers: the best level of one curve is far above that of another."""
    positive = [best for curve_values in values if (best := max(curve_values, default=0.0)) > 0]
    return bool(positive) and max(positive) > SPAN * min(positive)


def loads_are_logarithmic(loads: Sequence[float], forced: bool | None) -> bool:
    """Whether a load axis is logarithmic; ``forced`` overrides it (None: where half of the loads or more would lie in
    the first tenth of a linear axis)."""
    if forced is not None:
        return forced
    return sum(load <= CROWDED * max(loads) for load in loads) >= len(loads) / 2
