"""Queues whose answer is known in closed form."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from pdlab.core.workload import Level, Open
from pdlab.results.level_data import LevelData


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
    return float(brentq(lambda rate: waits_at_most(t, rate, service) - quantile, 0.0, 1 / service))


def served(
    level: Level, service_s: float, decode_s: float = 0.0, tokens: int = 2, *, arrivals: float = 1.0
) -> LevelData:
    """Poisson arrivals before one server of that service time (0: a server without any limit), behind which each
    answer takes ``decode_s``. An answer begins where its service ends. ``arrivals``: per s, over the load's rate."""
    assert isinstance(level.load, Open)
    gaps_s = np.random.default_rng(level.seed).exponential(1 / level.load.rate_rps / arrivals, level.num_requests)
    arrival_s = gaps_s.cumsum() - gaps_s[0]
    number = np.arange(level.num_requests)
    # Who ends the n-th service: it began when he, or whoever came before him and found it idle, arrived.
    first_s = np.maximum.accumulate(arrival_s - number * service_s) + (number + 1) * service_s
    return LevelData.of_times(arrival_s, first_s, first_s + decode_s, np.full(level.num_requests, float(tokens)))


def md1_tail(
    utilisation: float, quantile: float, requests: int, repeats: int, trials: int, seed: int
) -> list[list[float]]:
    """(trials, repeats) of a percentile of the time to the end of service, over that of the queue itself: each repeat
    has ``requests`` after the queue has filled."""
    service, filling = 1.0, 400
    low, high = 0.0, 1.0
    while waits_at_most(high, utilisation, service) < quantile:  # far beyond it the terms of the sum cancel badly
        low, high = high, 1.2 * high
    wait = brentq(lambda t: waits_at_most(t, utilisation, service) - quantile, low, high, xtol=1e-12)
    rng = np.random.default_rng([seed, round(1000 * utilisation), round(1000 * quantile), requests])
    number = np.arange(requests + filling)
    quantiles_s = []
    for _ in range(trials):
        arrival = rng.exponential(service / utilisation, (repeats, len(number))).cumsum(axis=1)
        ends = np.maximum.accumulate(arrival - number * service, axis=1) + (number + 1) * service
        stays = (ends - arrival)[:, filling:]
        quantiles_s.append((np.quantile(stays, quantile, axis=1) / (wait + service)).tolist())
    return quantiles_s
