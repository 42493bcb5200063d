"""Queues whose answer is known in closed form."""

from __future__ import annotations

import math


def waits_at_most(t: float, rate: float, service: float) -> float:
    """P(W <= t) of an M/D/1 queue (Erlang, 1909): (1 - rho) * sum over k <= t / D of
    (-lambda (t - k D))^k / k! * exp(lambda (t - k D))."""
    terms = (
        (-rate * (t - k * service)) ** k / math.factorial(k) * math.exp(rate * (t - k * service))
        for k in range(math.floor(t / service) + 1)
    )
    return (1 - rate * service) * math.fsum(terms)


def highest_rate(t: float, service: float, quantile: float) -> float:
    """The rate at which that share of an M/D/1 queue's requests waits at most ``t``."""
    low, high = 0.0, 1 / service
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if waits_at_most(t, middle, service) >= quantile else (low, middle)
    return low
