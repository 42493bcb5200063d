"""The search for an SLO's highest rate with any source of requests, such as a simulator or a queue in closed form.

Search, windows and gates are those of a measured search; only the requests come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from pdlab.bench import gates, levels, slo_search
from pdlab.bench.slo_search import LevelSample, SloSearchOptions
from pdlab.core.workload import Level, Open, Workload
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import Run, SloSearch

Drive = Callable[[Level], LevelData]
"""All requests of one level."""


def search_over(
    drive: Drive,
    search: SloSearchOptions,
    workload: Workload,
    *,
    label: str,
    seed: int = 0,
    hold_s: float = levels.HOLD_S,
    guess_rps: float | None = None,
) -> SloSearch:
    """The finished search. Each level has its own seed, derived from ``seed``."""
    samples: list[LevelSample] = []
    shortest_s: float | None = None
    while True:
        answer, step = slo_search.evaluate(
            samples, search, label=label, repeat=0, guess_rps=guess_rps, mean_rate=workload.mean_rate
        )
        if step is None:
            return answer
        load = Open(rate_rps=step.rate_rps, burstiness=search.burstiness)
        held = levels.num_requests(load, workload, hold_s=hold_s, e2el_s=shortest_s or 0.0)
        count = step.longer * (step.requests if search.requests is not None else max(step.requests, held))
        drawn = levels.derive_seed(workload, "offline", seed, step.rate_rps, step.look)
        level = Level(load=load, look=step.look, num_requests=count, seed=drawn)
        requests = drive(level)
        run = run_of(level, requests, workload, label)
        samples.append(slo_search.sample(run, requests, search.slo))
        if run.whole.e2el is not None:
            shortest_s = min(run.whole.e2el.percentiles_s["p50"], shortest_s or run.whole.e2el.percentiles_s["p50"])


def run_of(level: Level, requests: LevelData, workload: Workload, label: str) -> Run:
    """The level as a `Run`, judged by the gates that need only arrival and end times."""
    window = metrics.steady_window(requests, level.load)
    completed = int(requests.ok.sum())
    run = Run(
        origin="simulated",
        label=label,
        key=level.key,
        workload=workload,
        load=level.load,
        num_requests=len(requests),
        seed=level.seed,
        completed=completed,
        failed=len(requests) - completed,
        whole=metrics.whole(requests),
        steady=metrics.steady(requests, level.load, window),
        steady_window_s=window,
        trend=metrics.trend(requests, level.load, window),
    )
    evidence = gates.Evidence(run=run, requests=requests)
    return run.model_copy(update={"validity": gates.validate_level(evidence, only=gates.TIMING_GATES)})
