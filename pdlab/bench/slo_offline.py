"""The search for an SLO's highest rate over any source of requests: a simulator, a queue in closed form.

Search, windows and gates are those of a measured search; only the requests come from elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pdlab.bench import gates, levels, slo_search
from pdlab.bench.slo_search import LevelSample, Search
from pdlab.core.workload import Level, Open, Workload
from pdlab.results import metrics, slo
from pdlab.results.metrics import Columns
from pdlab.results.schema import PERCENTILES, Distribution, Run, SloSearch, Summary

Drive = Callable[[Level], Columns]
"""All requests of one level."""


def search_over(
    drive: Drive,
    search: Search,
    workload: Workload,
    *,
    label: str,
    seed: int = 0,
    hold_s: float = levels.HOLD_S,
    guess_rps: float | None = None,
) -> SloSearch:
    """The finished search. Each level has a seed of its own, derived from ``seed``."""
    samples: list[LevelSample] = []
    shortest_s: float | None = None
    while True:
        looks = dict(Counter(requests.rate_rps for requests in samples))
        points = slo_search.points(samples, search)
        step = slo_search.next_step(points, search, guess_rps, looks)
        if step is None:
            return slo_search.result(points, search, label=label, repeat=0, looks=looks)
        load = Open(rate_rps=step.rate_rps, burstiness=search.burstiness)
        held = levels.num_requests(load, hold_s=hold_s, e2el_s=shortest_s or 0.0)
        count = step.longer * (step.requests if search.requests is not None else max(step.requests, held))
        drawn = levels.derive_seed(workload, "offline", seed, step.rate_rps, step.look)
        level = Level(load=load, look=step.look, num_requests=count, seed=drawn)
        requests = drive(level)
        run = run_of(level, requests, workload, label)
        samples.append(slo_search.sample_of(run, requests, slo.stresses(requests, search.slo), search.slo))
        if run.whole.e2el is not None:
            shortest_s = min(run.whole.e2el.percentiles_s["p50"], shortest_s or run.whole.e2el.percentiles_s["p50"])


def run_of(level: Level, requests: Columns, workload: Workload, label: str) -> Run:
    """The level as a `Run`, through the gates that need nothing but when requests came and went. Of its figures it has
    those that a search and these gates ask for: requests and E2EL."""
    window = metrics.window_over(requests, level.load)
    answered = requests.part(requests.finish_s == requests.finish_s)
    steady = None
    if window is not None:
        judged = answered.part(window.judges(answered.arrival_s, answered.finish_s, level.load))
        finished = int(window.holds(answered.finish_s).sum())
        if not metrics.is_short(level.load, finished, len(judged)):
            steady = _figures(window.closes_s - window.opens_s, finished, judged)
    run = Run(
        origin="simulated",
        label=label,
        key=level.key,
        workload=workload,
        load=level.load,
        num_requests=len(requests),
        seed=level.seed,
        completed=len(answered),
        failed=len(requests) - len(answered),
        whole=_figures(float(answered.finish_s.max(initial=0.0)), len(answered), answered),
        steady=steady,
        steady_window_s=window,
        trend=metrics.trend_over(requests, level.load, window=window),
    )
    evidence = gates.Evidence(run=run, request_columns=requests)
    return run.model_copy(update={"validity": gates.validate_level(evidence, only=gates.OF_TIMES)})


def _figures(duration_s: float, completed: int, judged: Columns) -> Summary:
    import numpy as np

    e2el = None
    if len(judged):
        values = np.percentile(judged.e2el_s, PERCENTILES)
        e2el = Distribution(
            mean_s=float(judged.e2el_s.mean()),
            percentiles_s={f"p{q}": float(value) for q, value in zip(PERCENTILES, values, strict=True)},
        )
    return Summary(
        duration_s=duration_s,
        completed=completed,
        requests_per_s=completed / duration_s if duration_s else 0.0,
        input_tokens_per_s=0.0,
        output_tokens_per_s=0.0,
        e2el=e2el,
    )
