"""The search for an SLO's highest rate over any source of requests: a simulator, a queue in closed form.

Search, windows and gates are those of a measured search; only the requests come from elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pdlab.bench import gates, levels, slo_search
from pdlab.bench.slo_search import Sample, Search
from pdlab.core.workload import Level, Open, Workload
from pdlab.results import metrics
from pdlab.results.schema import RequestRecord, Run, SloSearch

Drive = Callable[[Level], Sequence[RequestRecord]]
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
    samples: list[Sample] = []
    shortest_s: float | None = None
    while True:
        looks = dict(Counter(found.rate_rps for found in samples))
        points = slo_search.points(samples, search)
        step = slo_search.next_step(points, search, guess_rps, looks)
        if step is None:
            return slo_search.result(points, search, label=label, repeat=0, looks=looks)
        load = Open(rate_rps=step.rate_rps, burstiness=search.burstiness)
        held = levels.num_requests(load, hold_s=hold_s, e2el_s=shortest_s or 0.0)
        count = step.longer * (step.requests if search.requests is not None else max(step.requests, held))
        drawn = levels.derive_seed(workload, "offline", seed, step.rate_rps, step.look)
        level = Level(load=load, look=step.look, num_requests=count, seed=drawn)
        records = drive(level)
        run = run_of(level, records, workload, label)
        samples.append(slo_search.sample(run, records, search.slo))
        if run.whole.e2el is not None:
            shortest_s = min(run.whole.e2el.p50_s, shortest_s or run.whole.e2el.p50_s)


def run_of(level: Level, records: Sequence[RequestRecord], workload: Workload, label: str) -> Run:
    """The level as a `Run`, through every gate that needs no engine and no load generator."""
    answered = sum(record.ok for record in records)
    run = Run(
        origin="simulated",
        label=label,
        key=level.key,
        workload=workload,
        load=level.load,
        num_requests=len(records),
        seed=level.seed,
        completed=answered,
        failed=len(records) - answered,
        whole=metrics.whole(records),
        steady=metrics.steady(records, level.load),
        steady_window_s=metrics.steady_window(records, level.load),
        trend=metrics.trend(records, level.load),
    )
    evidence = gates.Evidence(run=run, records=tuple(records))
    return run.model_copy(update={"validity": gates.validate_level(evidence, moves_kv=False)})
