"""What tokens cost, from the price of a GPU hour."""

from __future__ import annotations

from pdlab.analysis import Curve, Point, ThroughputMetric
from pdlab.statistics import Estimate


def per_million_tokens(price_per_gpu_hour: float, gpus: int, tokens_per_s: Estimate) -> Estimate:
    """price * GPUs / (tokens/s * 3600) * 10^6, in the price's currency; infinite at no throughput.

    The relative standard error is that of the throughput.
    """
    if tokens_per_s.value <= 0:
        return Estimate(value=float("inf"))
    value = price_per_gpu_hour * gpus / (tokens_per_s.value * 3600) * 1e6
    error = tokens_per_s.relative_error
    return tokens_per_s._replace(value=value, standard_error=None if error is None else error * value)


def of_point(curve: Curve, point: Point, metric: ThroughputMetric, price_per_gpu_hour: float) -> Estimate:
    """Cost per million tokens of that kind at one level; all of the deployment's GPUs are paid for."""
    return per_million_tokens(price_per_gpu_hour, curve.gpus.total, point.rate_estimate(metric))
