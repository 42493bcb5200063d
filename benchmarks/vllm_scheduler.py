#!/usr/bin/env python3
"""The simulator beside vLLM's own scheduler with a simulated executor: same requests, arrivals, step times and links.

    python benchmarks/vllm_scheduler.py [--hardware h100-vllm-0.11] [--requests 5] [--workloads 8]

Prints a table of means, one step at a time and with asynchronous scheduling: the simulator with as many steps in
flight, and how far vLLM's scheduler is off it. With --workloads: the mean of that difference over several workloads,
with its interval, where KV memory is short. Needs vLLM; neither a GPU nor a model. Everything is simulated.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pdlab.analysis.intervals import of_repeats  # noqa: E402
from pdlab.core.catalog import ModelShape, load_model  # noqa: E402
from pdlab.core.deployment import Deployment, parse_label  # noqa: E402
from pdlab.core.lengths import parse_lengths  # noqa: E402
from pdlab.core.workload import Closed, Level, Open, Workload  # noqa: E402
from pdlab.sim.hardware import STEPS_UNIT, Constant, Hardware, load_hardware  # noqa: E402
from pdlab.sim.level import figures  # noqa: E402
from pdlab.sim.simulator import Prompts, simulate  # noqa: E402
from pdlab.sim.vllm_engine import simulate_with_vllm  # noqa: E402


class Case(NamedTuple):
    """A deployment under some loads, and what its prompts share."""

    label: str
    loads: Sequence[Closed | Open]
    workload: Workload
    note: str = ""
    prompts: Prompts = "fresh"
    prefix_hit_rate: float = 0.0
    hybrid: bool = False


CLOSED = tuple(Closed(concurrency=n) for n in (4, 16, 48))
LONG = Workload(input_tokens=5000, output_tokens=250)
GROWING = Workload(input_tokens=500, output_tokens=2000)
ANSWERS = Workload(input_tokens=4000, output_tokens=500)
CASES = (
    Case("collocated-1xtp2", CLOSED, LONG),
    Case("collocated-1xtp2", (Open(rate_rps=2), Open(rate_rps=3)), LONG),
    Case("pd-spread-p1xtp2-d1xtp2", CLOSED, LONG),
    Case("pd-spread-p1xtp2-d1xtp2", (Open(rate_rps=2), Open(rate_rps=4)), LONG),
    Case("collocated-1xtp2", CLOSED, LONG, ", half of every prompt shared", prefix_hit_rate=0.5),
    Case("pd-spread-p1xtp2-d1xtp2", CLOSED, LONG, ", half of every prompt shared", prefix_hit_rate=0.5),
    Case("collocated-1xtp2", CLOSED, LONG, ", prompts of earlier levels again", prompts="repeated"),
    Case("collocated-1xtp1", (Closed(concurrency=16),), LONG, ", KV memory is short"),
    Case("collocated-1xtp1", (Closed(concurrency=16), Closed(concurrency=32)), LONG, ", hybrid KV cache", hybrid=True),
    Case("collocated-1xtp1", (Closed(concurrency=48),), GROWING, ", 500:2000, KV memory is short"),
    Case("collocated-1xtp1", (Closed(concurrency=48),), GROWING, ", 500:2000, hybrid KV cache", hybrid=True),
    Case(
        "collocated-1xtp1",
        tuple(Closed(concurrency=n) for n in (4, 8, 16)),
        LONG,
        ", prompts of earlier levels again, hybrid KV cache",
        prompts="repeated",
        hybrid=True,
    ),
    Case("pd-spread-p1xtp1-d1xtp1", (Closed(concurrency=32),), ANSWERS, ", 4000:500, KV memory is short"),
    Case("pd-spread-p1xtp1-d1xtp1", (Closed(concurrency=48),), ANSWERS, ", 4000:500, hybrid KV cache", hybrid=True),
)


# The cases with fresh prompts; those with long answers would take most of the time.
SHORT = tuple(
    case for case in CASES if "1xtp1" in case.label and case.prompts == "fresh" and case.workload is not GROWING
)
LEVEL = 0.95
LENGTHS = parse_lengths("uniform:0.8-1.0")


def off_by(ratios: Sequence[float]) -> str:
    """The mean difference and its interval."""
    estimate = of_repeats(ratios)
    interval = estimate.interval(LEVEL)
    assert interval is not None
    mean, low, high = (100 * (each - 1) for each in (estimate.value, interval.low, interval.high))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def compare_workloads(hardware: Hardware, shape: ModelShape, model: str, workloads: int, requests: int) -> None:
    """The cases of short KV memory with lengths that vary, by workloads of other seeds."""
    names = [f"{name}, {how}" for how in ("sync", "async") for name in ("TTFT", "TPOT", "requests/s")]
    print(f"| deployment | level | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for case in SHORT:
        deployment = Deployment(topology=parse_label(case.label), model=model)
        system = hardware.model_copy(update={"hybrid_kv": True}) if case.hybrid else hardware
        for load in case.loads:
            assert isinstance(load, Closed)
            row = []
            for steps in (1, 2):
                found: list[list[float]] = []
                for seed in range(workloads):
                    workload = case.workload.model_copy(update={"lengths": LENGTHS, "seed": seed})
                    levels = [Level(load=load, num_requests=requests * load.concurrency, seed=seed)]
                    with_steps = with_steps_in_flight(system, steps)
                    one = simulate(deployment, levels, workload, with_steps, shape, seed=seed)
                    other = simulate_with_vllm(
                        deployment, levels, workload, system, shape, asynchronous=steps == 2, seed=seed
                    )
                    before, after = figures(one[0]), figures(other[0])
                    assert before.tpot_s and after.tpot_s
                    found.append(
                        [
                            after.ttft_s / before.ttft_s,
                            after.tpot_s / before.tpot_s,
                            after.requests_per_s / before.requests_per_s,
                        ]
                    )
                row += [off_by(ratios) for ratios in zip(*found, strict=True)]
            print(f"| {case.label}{case.note} | {name_of(load)} | {' | '.join(row)} |", flush=True)


def name_of(load: Closed | Open) -> str:
    return f"concurrency {load.concurrency}" if isinstance(load, Closed) else f"rate {load.rate_rps:g}"


def cell(one: float, other: float, digits: int) -> str:
    return f"{one:.{digits}f} / {100 * (other / one - 1):+.1f} %"


def with_steps_in_flight(hardware: Hardware, steps: int) -> Hardware:
    constant = Constant(value=steps, unit=STEPS_UNIT, basis="assumed", source="compared here")
    return hardware.model_copy(update={"constants": hardware.constants | {"steps_in_flight": constant}})


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--hardware", default="h100-vllm-0.11")
    flags.add_argument("--model", default="gpt-oss-120b")
    flags.add_argument("--requests", type=int, default=5, help="per sequence at once, or per 1/s of a rate x 16")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--workloads", type=int, metavar="N", help="only the cases of short KV memory, over N workloads")
    args = flags.parse_args()
    warnings.simplefilter("ignore")  # of vLLM's imports
    hardware, shape = load_hardware(args.hardware), load_model(args.model)
    assert shape is not None
    if args.workloads:
        compare_workloads(hardware, shape, args.model, args.workloads, args.requests)
        return 0
    names = [f"{name}, {how}" for how in ("sync", "async") for name in ("TTFT, ms", "TPOT, ms", "requests/s")]
    print(f"| deployment | level | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    took_s = {"simulator": 0.0, "vLLM's scheduler": 0.0}
    for case in CASES:
        deployment = Deployment(topology=parse_label(case.label), model=args.model)
        levels = [
            Level(
                load=load,
                num_requests=args.requests
                * (load.concurrency if isinstance(load, Closed) else round(16 * load.rate_rps)),
                seed=args.seed,
            )
            for load in case.loads
        ]
        system = hardware.model_copy(update={"hybrid_kv": True}) if case.hybrid else hardware
        common = {"seed": args.seed, "prompts": case.prompts, "prefix_hit_rate": case.prefix_hit_rate}
        rows: list[list[str]] = [[] for _ in levels]
        for asynchronous in (False, True):
            began_s = time.process_time()
            hardware_here = with_steps_in_flight(system, 2 if asynchronous else 1)
            fast = simulate(deployment, levels, case.workload, hardware_here, shape, **common)
            took_s["simulator"] += time.process_time() - began_s
            began_s = time.process_time()
            slow = simulate_with_vllm(
                deployment, levels, case.workload, system, shape, asynchronous=asynchronous, **common
            )
            took_s["vLLM's scheduler"] += time.process_time() - began_s
            for row, one, other in zip(rows, map(figures, fast), map(figures, slow), strict=True):
                row.append(cell(1e3 * one.ttft_s, 1e3 * other.ttft_s, 0))
                row.append(cell(1e3 * (one.tpot_s or 0.0), 1e3 * (other.tpot_s or 0.0), 2))
                row.append(cell(one.requests_per_s, other.requests_per_s, 2))
        for load, row in zip(case.loads, rows, strict=True):
            print(f"| {case.label}{case.note} | {name_of(load)} | {' | '.join(row)} |", flush=True)
    print("\nCPU time: " + ", ".join(f"{name} {each:.1f} s" for name, each in took_s.items()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
