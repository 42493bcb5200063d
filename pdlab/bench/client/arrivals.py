"""Computes when the requests of an open loop are due. vLLM's benchmark draws these times too, but does not return
them.
"""

from __future__ import annotations

from pdlab.bench.client.protocol import ClientLevel


def scheduled(level: ClientLevel) -> bool:
    """Whether requests are sent by a schedule, as in every open loop. Lateness is measured against the schedule, vLLM's
    ramps have only whole numbers of requests/s, and several processes need one common schedule.
    """
    return level.concurrency is None


def due_s(level: ClientLevel) -> list[float]:
    """When each request of the whole level is due, in seconds since the level's start.

    Gaps are gamma-distributed with shape ``burstiness`` around the rate of the moment. At a constant rate their sum is
    scaled to requests / rate, as vLLM does. All processes of a level compute the same list and each takes its own
    requests, so that the arrivals are those of one process. If the level has times (a workload whose mix changes with
    time), these are the result.
    """
    if level.due_s is not None:
        return list(level.due_s)
    import numpy as np

    rng = np.random.default_rng(level.seed)
    total = level.num_requests
    if level.ramp is None:
        assert level.rate_rps is not None
        rates = np.full(total, level.rate_rps)
    else:
        start, end, x = level.ramp.start_rps, level.ramp.end_rps, np.arange(total) / max(1, total - 1)
        rates = start + (end - start) * x if level.ramp.shape == "linear" else start * (end / start) ** x
    due = np.cumsum(rng.gamma(level.burstiness, 1 / (rates * level.burstiness)))
    if level.rate_rps is not None:
        due *= total / level.rate_rps / due[-1]
    return [float(moment) for moment in due]
