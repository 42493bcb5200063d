#!/usr/bin/env python3
"""What decode's steps cost a first token, and what asynchronous scheduling, --kv-poll-ms and --reuse-first-token change
about it, with vLLM's scheduler in virtual time.

    python benchmarks/handover_steps.py [--hardware h100-vllm-0.11] [--overhead-ms 0,1,2]

With asynchronous scheduling two steps are in flight, so the scheduler hears two steps late that KV cache has arrived.
Without it the engine waits between two steps for what scheduling and the output cost on the CPU: ``--overhead-ms``, of
which nothing is known here, so it is varied. Prefill is asynchronous throughout. Needs vLLM, and neither a GPU nor a
model. Everything is simulated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.deployment import Deployment, Disaggregated, Pool, Transport, parse_label  # noqa: E402
from pdlab.core.workload import Closed, Level, Workload  # noqa: E402
from pdlab.sim.engine import Engine  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import SimulatedLevel, figures  # noqa: E402
from pdlab.sim.vllm_engine import VllmEngine, VllmSystem  # noqa: E402


class MixedSystem(VllmSystem):
    """Prefill with asynchronous scheduling, decode with or without it; ``overhead_s`` between two steps without it."""

    decode_asynchronous = True
    overhead_s = 0.0

    def _begin(self, *args: Any) -> None:
        super()._begin(*args)
        self.reads_s: list[float] = []

    def carry(self, decoder: Engine, request: int, tokens: float, now_s: float) -> tuple[float, float]:
        arrives_s, stall_s = super().carry(decoder, request, tokens, now_s)
        self.reads_s.append(arrives_s - now_s)
        return arrives_s, stall_s

    def _engines(self, pool: Pool, role: str) -> list[Engine]:
        self.asynchronous = role != "decode" or self.decode_asynchronous
        return super()._engines(pool, role)

    def _step_s(self, engine: VllmEngine, output: Any, begins_s: float) -> float:
        synchronous = not engine.prefills_only and not self.decode_asynchronous
        return super()._step_s(engine, output, begins_s) + (self.overhead_s if synchronous else 0.0)


def row(name: str, level: SimulatedLevel) -> str:
    """TTFT, TPOT, output tokens/s, and the steps from KV cache's arrival to decode's first token."""
    means = figures(level)
    step_s = statistics.median(level.gap_s)
    behind = [
        first - arrived for first, arrived in zip(level.first_token_s, level.kv_arrived_s, strict=True) if arrived
    ]
    shared = [(first - ended) for first, ended in zip(level.first_token_s, level.prefill_end_s, strict=True) if ended]
    tokens_s = sum(level.output_tokens) / level.duration_s
    early_ms = 1e3 * (means.ttft_s - statistics.fmean(shared))
    return (
        f"| {name} | {1e3 * means.ttft_s:.0f} | {1e3 * (means.tpot_s or 0):.2f} | {tokens_s:.0f} | {1e3 * step_s:.1f} "
        f"| {statistics.fmean(behind) / step_s:.2f} | {early_ms:.0f} |"
    )


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--hardware", default="h100-vllm-0.11")
    flags.add_argument("--model", default="gpt-oss-120b")
    flags.add_argument("--label", default="pd-spread-p1xtp2-d1xtp2")
    flags.add_argument("--concurrency", default="4,16,48")
    flags.add_argument("--overhead-ms", default="0,1,2", help="of a synchronous step (default %(default)s)")
    flags.add_argument("--requests", type=int, default=5, help="per sequence at once (default %(default)s)")
    flags.add_argument("--itl", type=int, default=5000)
    flags.add_argument("--otl", type=int, default=250)
    args = flags.parse_args()
    warnings.simplefilter("ignore")  # of vLLM's imports
    hardware, shape = load_hardware(args.hardware), load_model(args.model)
    assert shape is not None
    topology = parse_label(args.label)
    if not isinstance(topology, Disaggregated):
        flags.error(f"--label {args.label}: give a pd-pack or pd-spread, which hands over")
    workload = Workload(input_tokens=args.itl, output_tokens=args.otl)
    print("| decode's scheduler | TTFT, ms | TPOT, ms | tokens/s | step, ms | KV to first, steps | early TTFT, ms |")
    print("|---|---|---|---|---|---|---|")
    for number in map(int, args.concurrency.split(",")):
        level = Level(load=Closed(concurrency=number), num_requests=number * args.requests, seed=0)
        polls, reuses = {"kv_poll_s": 0.0005}, {"reuse_first_token": True}
        ways: list[tuple[str, bool, float, dict[str, Any]]] = [("asynchronous", True, 0.0, {})]
        ways += [("asynchronous, --kv-poll-ms", True, 0.0, polls)]
        ways += [("asynchronous, --reuse-first-token", True, 0.0, reuses)]
        ways += [("asynchronous, both", True, 0.0, polls | reuses)]
        ways += [(f"synchronous + {ms:g} ms", False, ms / 1e3, {}) for ms in numbers(args.overhead_ms)]
        for name, asynchronous, overhead_s, more in ways:
            transport = Transport(**more)
            deployment = Deployment(topology=topology.model_copy(update={"transport": transport}), model=args.model)
            own = {"decode_asynchronous": asynchronous, "overhead_s": overhead_s}
            kind = type("Mixed", (MixedSystem,), own)
            system = kind(deployment, hardware, shape, 0, "fresh", 0.0, None, asynchronous=True)
            system.scattered = None
            print(row(f"{name}, concurrency {number}", system.run(level, workload, None)), flush=True)
        print(f"a read takes {1e3 * statistics.median(system.reads_s):.2f} ms (median)", file=sys.stderr)
    return 0


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
