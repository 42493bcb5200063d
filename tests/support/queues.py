"""Queues whose answer is known in closed form."""

from __future__ import annotations

import math

import numpy as np

from pdlab.core.workload import Level, Open
from pdlab.results.metrics import Columns


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


def served(level: Level, service_s: float, decode_s: float = 0.0, tokens: int = 2) -> Columns:
    """Poisson arrivals before one server of that service time (0: a server without any limit), behind which each
    answer takes ``decode_s``. An answer begins where its service ends."""
    assert isinstance(level.load, Open)
    gaps_s = np.random.default_rng(level.seed).exponential(1 / level.load.rate_rps, level.num_requests)
    arrival_s = gaps_s.cumsum() - gaps_s[0]
    number = np.arange(level.num_requests)
    # Who ends the n-th service: it began when he, or whoever came before him and found it idle, arrived.
    first_s = np.maximum.accumulate(arrival_s - number * service_s) + (number + 1) * service_s
    return Columns(arrival_s, first_s, first_s + decode_s, np.full(level.num_requests, float(tokens)))
