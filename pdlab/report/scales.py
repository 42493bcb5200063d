"""When a latency axis is logarithmic by itself: one slow curve must not press the others flat."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.analysis.curves import Curve, View

SPAN = 20.0  # times between the lowest and the highest value of an axis
BEYOND = 3.0  # times that one curve reaches beyond the highest of all others
LOGARITHMIC = "log scale"


def logarithmic(values: Sequence[Sequence[float]]) -> bool:
    """Whether an axis that shows these, one sequence per curve, reads better in powers."""
    kept = [sorted(value for value in each if value > 0) for each in values]
    kept = [each for each in kept if each]
    if not kept:
        return False
    lowest, *_ = sorted(each[0] for each in kept)
    highest, *others = sorted((each[-1] for each in kept), reverse=True)
    return highest > SPAN * lowest or bool(others and highest > BEYOND * others[0])


def latency_is_logarithmic(curves: Sequence[Curve], view: View, asked: bool | None) -> bool:
    """The same for the latency of the throughput plot; ``asked`` decides where it is given."""
    if view.use_interactivity:
        return False
    if asked is not None:
        return asked
    found = [[point.latency(view) for point in curve.points if point.valid] for curve in curves]
    return logarithmic([[value for value in each if value is not None] for each in found])
