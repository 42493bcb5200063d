#!/usr/bin/env python3
"""How fast the simulator is: one sweep, the story's list with start-up, tokens per second, growth, a large system.

Prints one line per figure; CPU time of one core, and for the list wall time too. With --plan instead the CPU time of a
plan for 16 GPUs by two checkouts in turn, and the ratio with its interval over pairs.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.analysis.intervals import of_repeats  # noqa: E402
from pdlab.core.catalog import known_models, load_deployment, load_shape  # noqa: E402
from pdlab.core.deployment import Deployment, Pool, parse_label  # noqa: E402
from pdlab.core.workload import Closed, Level, Open, Workload  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import SimulatedLevel  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402

HARDWARE = load_hardware("h100-vllm-0.11")
SHAPE = load_shape(known_models()["gpt-oss-120b"])
SWEEP = [Level(load=Closed(concurrency=n), num_requests=5 * n, seed=0) for n in (4, 8, 16, 32, 48, 64)]
PLAN = ("--gpus", "16", "--itl", "5000", "--otl", "250", "--slo-tpot-ms", "12")
LEVEL = 0.95
STORY = """
import sys, time
sys.path.insert(0, {root!r})
from tests.support.deployments import STORY; from pdlab.core.catalog import load_deployment, load_model
from pdlab.sim.hardware import load_hardware
from pdlab.sim.simulator import simulate
from pdlab.sim.level import to_run
from pdlab.core.workload import Closed, Level, Workload
hardware, shape, workload = load_hardware("h100-vllm-0.11"), load_model("gpt-oss-120b"), Workload()
levels = [Level(load=Closed(concurrency=n), num_requests=5 * n, seed=0) for n in (4, 8, 16, 32, 48, 64)]
names = STORY
best = {{}}
for name in names:
    deployment = load_deployment(name)
    done = simulate(deployment, levels, workload, hardware, shape, prompts="repeated")
    runs = [to_run(level, name, workload) for level in done]
    best[name] = max(run.whole.requests_per_s / deployment.gpus for run in runs)
print(len(names), sorted(best, key=best.get)[-1])
"""


def timed(work: Callable[[], list[SimulatedLevel]], repeats: int = 5) -> tuple[float, list[SimulatedLevel]]:
    """(least CPU seconds of a few, result)."""
    best_s, levels = float("inf"), []
    for _ in range(repeats):
        began_s = time.process_time()
        levels = work()
        best_s = min(best_s, time.process_time() - began_s)
    return best_s, levels


def sweep(deployment: Deployment) -> Callable[[], list[SimulatedLevel]]:
    return lambda: simulate(deployment, SWEEP, Workload(), HARDWARE, SHAPE, prompts="repeated")


def open_loop(deployment: Deployment, rate_rps: float, count: int) -> Callable[[], list[SimulatedLevel]]:
    level = Level(load=Open(rate_rps=rate_rps), num_requests=count, seed=0)
    return lambda: simulate(deployment, [level], Workload(), HARDWARE, SHAPE)


def short_prompts(deployment: Deployment, count: int) -> Callable[[], list[SimulatedLevel]]:
    """A long queue, and a prefix cache that forgets."""
    level = Level(load=Closed(concurrency=count // 4), num_requests=count, seed=0)
    return lambda: simulate(deployment, [level], Workload(input_tokens=16, output_tokens=1), HARDWARE, SHAPE)


def children_cpu_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planned(checkout: Path) -> tuple[float, str]:
    """(CPU seconds of one plan by that checkout, what it printed)."""
    before_s = children_cpu_s()
    command = [sys.executable, "plan.py", *PLAN]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    printed = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=True).stdout
    return children_cpu_s() - before_s, printed


def compare_plans(before: Path, after: Path, pairs: int) -> None:
    """Both in turn, the first of a pair second in the next; a plan of each beforehand, which compiles its modules."""
    same = planned(before)[1] == planned(after)[1]
    ratios, spent_s = [], {before: 0.0, after: 0.0}
    for number in range(pairs):
        order = (before, after) if number % 2 == 0 else (after, before)
        took_s = {checkout: planned(checkout)[0] for checkout in order}
        ratios.append(math.log(took_s[after] / took_s[before]))
        for checkout in order:
            spent_s[checkout] += took_s[checkout] / pairs
    estimate = of_repeats(ratios)
    interval = estimate.interval(LEVEL)
    low, high = (math.exp(interval.low), math.exp(interval.high)) if interval else (math.nan, math.nan)
    print(f"plan.py {' '.join(PLAN)}: {spent_s[before]:.2f} s before, {spent_s[after]:.2f} s after (means)")
    print(f"after / before: {math.exp(estimate.value):.3f} ({low:.3f} to {high:.3f}: {LEVEL:.0%}, {pairs} pairs)")
    print(f"they print {'the same' if same else 'NOT the same'}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="a million requests too")
    parser.add_argument("--plan", nargs=2, type=Path, metavar="CHECKOUT", help="compare plans by these two, alone")
    parser.add_argument("--pairs", type=int, default=20, help="of plans (default %(default)s)")
    args = parser.parse_args(argv)
    if args.plan:
        before, after = args.plan
        compare_plans(before, after, args.pairs)
        return
    for label in ("pd-spread-p1xtp4-d1xtp4", "collocated-8xtp1", "pd-pack-p2xtp1-d3xtp2"):
        took_s, done = timed(sweep(load_deployment(label)))
        tokens = sum(sum(level.output_tokens) for level in done)
        rate = tokens / took_s / 1e6
        print(f"six levels of {label}: {1e3 * took_s:.0f} ms, {rate:.1f} million output tokens/s")
    began_s, before_s = time.perf_counter(), children_cpu_s()
    program = STORY.format(root=str(ROOT))
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    wall_s, cpu_s = time.perf_counter() - began_s, children_cpu_s() - before_s
    print(f"{printed[0]} deployments x 6 levels and the best, start-up included: {wall_s:.2f} s, CPU {cpu_s:.2f} s")
    for count in (2_000, 4_000, 8_000):
        took_s, _ = timed(open_loop(load_deployment("collocated-4xtp2"), 10, count), 2)
        print(f"{count} requests on 4 replicas: {1e6 * took_s / count:.0f} us per request")
    for replicas in (8, 32, 128):
        deployment = Deployment(topology=parse_label(f"collocated-{replicas}xtp2"))
        took_s, _ = timed(open_loop(deployment, 2.0 * replicas, 4_000), 2)
        print(f"4000 requests on {replicas} replicas: {1e6 * took_s / 4000:.0f} us per request")
    for count in (20_000, 40_000, 80_000):
        took_s, _ = timed(short_prompts(Deployment(topology=parse_label("collocated-1xtp1")), count), 1)
        print(f"{count} prompts of 16 tokens, a quarter of them at once: {1e6 * took_s / count:.0f} us per request")
    if args.large:
        pool = Pool(replicas=256, tp=4)
        deployment = Deployment(topology=parse_label("collocated-1xtp4").model_copy(update={"pool": pool}))
        took_s, done = timed(open_loop(deployment, 1500, 1_000_000), 1)
        print(f"{pool.gpus} GPUs, 1,000,000 requests: {took_s:.0f} s for {done[0].duration_s:.0f} simulated seconds")


if __name__ == "__main__":
    main()
