"""How often the search for an SLO's highest rate holds the truth, with the real search, windows and gates in the loop.

    python benchmarks/slo_coverage.py [--searches 100] [--seed 0] [--only NAME] [--hold-s 60]

M/D/1 queues, whose truth is known in closed form, at four bounds on TTFT and one on TPOT alone, and the project's
simulator at four workloads of E2EL from 0.1 to 20 s, whose truth is read off long runs. All in virtual time. One line
per case: how often the truth was inside the bracket, how often the lower end was above it, the median width of the
brackets, and how many levels and seconds of load a search took.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.bench.slo_offline import Drive, search_over  # noqa: E402
from pdlab.bench.slo_search import SloSearchOptions  # noqa: E402
from pdlab.core.catalog import known_models, load_shape  # noqa: E402
from pdlab.core.deployment import Deployment, parse_label  # noqa: E402
from pdlab.core.workload import Level, Open, Slo, Workload  # noqa: E402
from pdlab.results import slo as judging  # noqa: E402
from pdlab.results.level_data import LevelData  # noqa: E402
from pdlab.results.schema import SloSearch  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import columns  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402

SERVICE_S = 0.1
TRUTH_REQUESTS, PRINT_EVERY = 20_000, 10


@dataclass(frozen=True)
class Case:
    """One truth to be found. ``above``: no answer may lie above this rate."""

    name: str
    slo: Slo
    workload: Workload
    drive: Drive
    truth_rps: float
    above_rps: float
    start_rps: float


def md1(level: Level) -> LevelData:
    """Poisson arrivals before one server of constant service time, behind which the second token takes 10 ms. TTFT is
    the wait and the service."""
    import numpy as np

    assert isinstance(level.load, Open)
    gaps_s = np.random.default_rng(level.seed).exponential(1 / level.load.rate_rps, level.num_requests)
    arrival_s = gaps_s.cumsum() - gaps_s[0]
    number = np.arange(level.num_requests)
    first_s = np.maximum.accumulate(arrival_s - number * SERVICE_S) + (number + 1) * SERVICE_S
    return LevelData.of_times(arrival_s, first_s, first_s + 0.01, np.full(level.num_requests, 2.0))


def waits_at_most(t: float, rate: float, service: float = SERVICE_S) -> float:
    """P(W <= t) of an M/D/1 queue (Erlang, 1909), for t up to some tens of service times."""
    terms = (
        (-rate * (t - k * service)) ** k / math.factorial(k) * math.exp(rate * (t - k * service))
        for k in range(math.floor(t / service + 1e-9) + 1)
    )
    return (1 - rate * service) * math.fsum(terms)


def md1_truth(bound_s: float, quantile: float) -> float:
    low, high = 0.0, 1 / SERVICE_S
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if waits_at_most(bound_s - SERVICE_S, middle) >= quantile else (low, middle)
    return low


def md1_case(bound_s: float | None) -> Case:
    """None: a bound on TPOT alone, which waiting does not touch: what is served is the truth."""
    slo = Slo(tpot_s=0.05) if bound_s is None else Slo(ttft_s=bound_s)
    return Case(
        name="M/D/1 TPOT alone" if bound_s is None else f"M/D/1 TTFT {bound_s:g} s",
        slo=slo,
        workload=Workload(input_tokens=1, output_tokens=2),
        drive=md1,
        truth_rps=1 / SERVICE_S if bound_s is None else md1_truth(bound_s, slo.quantile),
        above_rps=1 / SERVICE_S,
        start_rps=1.0,
    )


def simulated(label: str, workload: Workload) -> Drive:
    deployment, hardware, shape = Deployment(topology=parse_label(label)), *PARTS

    def drive(level: Level) -> LevelData:
        (done,) = simulate(deployment, [level], workload, hardware, shape, seed=level.seed)
        return columns(done)

    return drive


PARTS = (load_hardware("h100-vllm-0.11"), load_shape(known_models()["gpt-oss-120b"]))
SIMULATED = {
    "4000:2": ("collocated-1xtp2", Workload(input_tokens=4000, output_tokens=2), Slo(ttft_s=0.5)),
    "5000:250": ("collocated-1xtp2", Workload(), Slo(tpot_s=0.015)),
    "10000:250 PD": ("pd-spread-p1xtp1-d1xtp2", Workload(input_tokens=10_000), Slo(ttft_s=3.0, tpot_s=0.015)),
    "3000:1000": ("collocated-1xtp1", Workload(input_tokens=3000, output_tokens=1000), Slo(tpot_s=0.02)),
}


def simulated_case(name: str) -> Case:
    """The truth by halving, with `TRUTH_REQUESTS` at each rate, of which the first fifth and the last
    tenth are left out."""
    label, workload, slo = SIMULATED[name]
    drive = simulated(label, workload)

    def share(rate_rps: float) -> float:
        level = Level(load=Open(rate_rps=rate_rps), num_requests=TRUTH_REQUESTS, seed=99)
        requests = drive(level)
        part = slice(len(requests) // 5, len(requests) * 9 // 10)
        return float((judging.stresses(requests, slo)[part] <= 1).mean())

    high = 1.0
    while share(high) >= slo.quantile:
        high *= 2
    low = high / 2
    for _ in range(8):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle) >= slo.quantile else (low, middle)
    truth = math.sqrt(low * high)
    return Case(f"{name} {label}", slo, workload, drive, truth, math.inf, truth / 4)


def held(search: SloSearch, truth_rps: float) -> tuple[bool, bool]:
    """(the truth is inside the bracket, the lower end is above it)."""
    above = search.low_rps is not None and search.low_rps > truth_rps
    return not above and (search.high_rps is None or search.high_rps >= truth_rps), above


def trial(case: Case, searches: int, seed: int, hold_s: float) -> None:
    """One line of the table; what it would be so far on standard error, now and then."""
    seconds = [0.0]

    def drive(level: Level) -> LevelData:
        requests = case.drive(level)
        seconds[0] += float(requests.arrival_s[-1])
        return requests

    search = SloSearchOptions(slo=case.slo, start_rps=case.start_rps)
    began_s, inside, above, beyond, finished, widths, counts = time.process_time(), 0, 0, 0, 0, [], []
    for number in range(searches):
        answer = search_over(drive, search, case.workload, label=case.name, seed=seed + number, hold_s=hold_s)
        within, over = held(answer, case.truth_rps)
        inside, above, finished = inside + within, above + over, finished + answer.finished
        beyond += answer.low_rps is not None and answer.low_rps > case.above_rps
        counts.append(sum(point.looks for point in answer.points))
        if answer.low_rps and answer.high_rps:
            widths.append(answer.high_rps / answer.low_rps)
        if (number + 1) % PRINT_EVERY == 0 or number + 1 == searches:
            width = f"{median(widths):.2f}" if widths else "-"
            over_capacity = "-" if math.isinf(case.above_rps) else str(beyond)
            row = (
                f"| {case.name} | {case.truth_rps:.3g} | {inside} of {number + 1} | {above} | {over_capacity} | "
                f"{finished} | {width} | {median(counts):g} | {seconds[0] / (number + 1):.0f} | "
                f"{time.process_time() - began_s:.0f} |"
            )
            print(row, file=sys.stderr if number + 1 < searches else sys.stdout, flush=True)


def cases(only: str) -> list[Callable[[], Case]]:
    bounds = (0.3, 0.5, 1.0, 2.0, None)
    made: dict[str, Callable[[], Case]] = {f"M/D/1 {bound}": partial(md1_case, bound) for bound in bounds}
    made |= {name: partial(simulated_case, name) for name in SIMULATED}
    return [make for name, make in made.items() if only in name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hold-s", type=float, default=60.0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    head = "case", "truth /s", "inside", "low above truth", "low above capacity", "finished", "high / low"
    print("| " + " | ".join((*head, "levels", "s of load", "CPU s")) + " |", flush=True)
    print("|---" * (len(head) + 3) + "|", flush=True)
    for make in cases(args.only):
        trial(make(), args.searches, args.seed, args.hold_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
