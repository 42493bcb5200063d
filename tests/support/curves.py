"""Curves made up on the spot, for what only looks at their configuration; what curves give within bounds."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.analysis.curves import Curve, Gpus, Point, Sample, workloads_name
from pdlab.analysis.intervals import Estimate
from pdlab.analysis.ranking import Reading, estimate_at, readings
from pdlab.analysis.view import View
from pdlab.core.bounds import Bounds, parse_bounds
from pdlab.core.deployment import Deployment
from pdlab.core.workload import Workload


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


LOADS = (1.0, 4.0, 16.0, 64.0)


def one(label: str, factor: float, output_tokens: int = 100, settings: dict[str, str] | None = None) -> Curve:
    """More load, more throughput and a longer TPOT; ``factor`` times the throughput."""
    workload = Workload(input_tokens=1000, output_tokens=output_tokens)
    rates = [factor * 100 * load**0.5 for load in LOADS]
    points = tuple(
        Point(
            kind="concurrency",
            value=load,
            window="whole",
            samples=(Sample(repeat=0, requests_per_s=1, input_tokens_per_s=1, output_tokens_per_s=rate),),
            workloads=(workload,),
            requests_per_s=rate / output_tokens,
            input_tokens_per_s=rate,
            output_tokens_per_s=rate,
            latency_ms={"ttft": {"p50": 100 + load}, "tpot": {"p50": 5 + load**0.5 + factor % 5}},
        )
        for load, rate in zip(LOADS, rates, strict=True)
    )
    name = workloads_name([workload])
    return Curve(
        name=label, label=label, gpus=Gpus(total=8), workload=name, points=points, model="m", settings=settings or {}
    )


def many(count: int, output_tokens: int = 100, prefix: str = "c") -> list[Curve]:
    return [one(f"{prefix}{i}", 1 + i, output_tokens) for i in range(count)]
