"""Curves made up on the spot, for what only looks at their configuration; what curves give within bounds."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.analysis.curves import Curve, Gpus
from pdlab.analysis.intervals import Estimate
from pdlab.analysis.ranking import Reading, estimate_at, readings
from pdlab.analysis.view import View
from pdlab.core.bounds import Bounds, parse_bounds
from pdlab.core.deployment import Deployment


def made_up(deployment: Deployment) -> Curve:
    """A curve without points."""
    return Curve(
        name=deployment.label,
        label=deployment.label,
        gpus=Gpus(total=deployment.gpus),
        deployment=deployment,
        workload="512:64",
        points=(),
    )


def within(tpot_ms: float, ttft_ms: float | None = None) -> Bounds:
    """Bounds on medians."""
    return parse_bounds(f"tpot_ms={tpot_ms!r}" + (f",ttft_ms={ttft_ms!r}" if ttft_ms else ""), "p50")


def most(curve: Curve, tpot_ms: float, view: View | None = None) -> Estimate | None:
    """What a curve of one kind of load gives at that median TPOT."""
    return estimate_at(curve, curve.points, within(tpot_ms), view or View())


def read(curves: Sequence[Curve], tpot_ms: float, ttft_ms: float | None = None) -> Reading:
    """The one reading of curves that have one kind of load."""
    (reading,) = readings(curves, within(tpot_ms, ttft_ms), View())
    return reading
