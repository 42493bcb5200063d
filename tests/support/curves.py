"""Curves made up on the spot, from a few numbers or for what only looks at their configuration; what they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdlab.analysis.curves import Curve, Figures, Gpus, Point, Sample, workloads_name
from pdlab.analysis.intervals import Estimate
from pdlab.analysis.ranking import BoundsRanking, bounds_rankings, throughput_within
from pdlab.analysis.view import View
from pdlab.core.bounds import Bounds, parse_bounds
from pdlab.core.deployment import Deployment
from pdlab.core.workload import Workload
from pdlab.report.verdicts import bound_answers


def figures(
    output_per_s: float, latency_ms: Mapping[str, float], statistic: str = "p50", **more: Any
) -> dict[str, Any]:
    """Requests of 100 input and 10 output tokens; ``latency_ms``: metric -> that statistic. ``more``: other values."""
    usual = {
        "requests_per_s": output_per_s / 10,
        "input_tokens_per_s": output_per_s * 10,
        "output_tokens_per_s": output_per_s,
        "latency_ms": {metric: {statistic: ms} for metric, ms in latency_ms.items()},
    }
    return usual | more


def sample(output_per_s: float, latency_ms: Mapping[str, float], repeat: int = 0, **more: Any) -> Sample:
    return Sample(repeat=repeat, **figures(output_per_s, latency_ms, **more))


def point(load: float, *samples: Sample, **more: Any) -> Point:
    """A level in a closed loop, with the means of its repeats."""

    def mean(of: Callable[[Figures], float]) -> float:
        return math.fsum(map(of, samples)) / len(samples)

    usual: dict[str, Any] = {
        "kind": "concurrency",
        "window": "steady",
        "requests_per_s": mean(lambda each: each.requests_per_s),
        "input_tokens_per_s": mean(lambda each: each.input_tokens_per_s),
        "output_tokens_per_s": mean(lambda each: each.output_tokens_per_s),
        "latency_ms": {
            metric: {name: mean(lambda each, m=metric, n=name: each.latency_ms[m][n]) for name in statistics}  # type: ignore[misc]
            for metric, statistics in samples[0].latency_ms.items()
        },
    }
    return Point(value=load, samples=samples, **usual | more)


def curve(label: str, *points: Point, gpus: int | Gpus = 8, **more: Any) -> Curve:
    usual = {"gpus": Gpus(total=gpus) if isinstance(gpus, int) else gpus, "workload": "100:10"}
    return Curve(name=label, label=label, points=points, **usual | more)


def made_up(deployment: Deployment) -> Curve:
    """A curve without points."""
    return curve(deployment.label, gpus=deployment.gpus, deployment=deployment, workload="512:64")


def within(tpot_ms: float, ttft_ms: float | None = None) -> Bounds:
    """Bounds on medians."""
    return parse_bounds(f"tpot_ms={tpot_ms!r}" + (f",ttft_ms={ttft_ms!r}" if ttft_ms else ""), "p50")


def most(curve: Curve, tpot_ms: float, view: View | None = None) -> Estimate | None:
    """What a curve of one kind of load gives at that median TPOT."""
    found = throughput_within(curve, curve.points, within(tpot_ms), view or View())
    return found and found.estimate


def sentences(curves: Sequence[Curve], bounds: Bounds, view: View) -> list[str]:
    """What the report tells of these bounds."""
    return [str(each) for each in bound_answers(bounds_rankings(curves, bounds, view), curves, view)]


def read(curves: Sequence[Curve], tpot_ms: float, ttft_ms: float | None = None) -> BoundsRanking:
    """The only ranking of curves that have one kind of load."""
    (bounds_ranking,) = bounds_rankings(curves, within(tpot_ms, ttft_ms), View())
    return bounds_ranking


LOADS = (1.0, 4.0, 16.0, 64.0)


def one(label: str, factor: float, output_tokens: int = 100, settings: dict[str, str] | None = None) -> Curve:
    """More load, more throughput and a longer TPOT; ``factor`` times the throughput."""
    workload = Workload(input_tokens=1000, output_tokens=output_tokens)
    rates = [factor * 100 * load**0.5 for load in LOADS]
    points = (
        point(
            load,
            sample(
                rate,
                {"ttft": 100 + load, "tpot": 5 + load**0.5 + factor % 5},
                requests_per_s=rate / output_tokens,
                input_tokens_per_s=rate,
            ),
            window="whole",
            workloads=(workload,),
        )
        for load, rate in zip(LOADS, rates, strict=True)
    )
    return curve(label, *points, workload=workloads_name([workload]), model="m", settings=settings or {})


def many(count: int, output_tokens: int = 100, prefix: str = "c") -> list[Curve]:
    return [one(f"{prefix}{i}", 1 + i, output_tokens) for i in range(count)]
