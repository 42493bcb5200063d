#!/usr/bin/env python3
"""What the KV guard costs: two bare pairs of vLLM servers, one with it and one without, under the same load in turn.

Both pairs stay up, so that what drifts on this machine drifts for both; rounds alternate (with, without, without, with,
...) and each is compared with its neighbour. The tiny model, no GPU. Wants an idle machine: the noise of a round
is printed, and the interval of the ratio is over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from faulty_pair import PREFILL, Client, FaultyPair, client, each  # noqa: E402

from pdlab.results.metrics import student_t  # noqa: E402


class Figures(NamedTuple):
    """Of one round."""

    requests_per_s: float
    e2el_mean_s: float
    e2el_p50_s: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--concurrency", type=int, default=16, help="default %(default)s")
    parser.add_argument("--requests", type=int, default=160, help="per round (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="rounds with and without it (default %(default)s)")
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("--otl", type=int, default=64, help="output tokens (default %(default)s)")
    args = parser.parse_args(argv)
    logs = Path(tempfile.mkdtemp(prefix="pdlab-kv-guard-cost-"))
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(FaultyPair(logs / name, guarded=name == "with", lease_s=30, kv_bytes=192 * 2**20))
            for name in ("with", "without")
        }
        rounds = asyncio.run(measure(pairs, args))
    for at, field in enumerate(Figures._fields):
        ratios = [both["with"][at] / both["without"][at] for both in rounds]
        mean, spread = statistics.fmean(ratios), statistics.stdev(ratios)
        half = student_t(0.975, len(ratios) - 1) * spread / len(ratios) ** 0.5
        print(f"with / without: {field} {mean:.4f} +- {half:.4f} (95 %, {len(ratios)} pairs of rounds)")


async def measure(pairs: dict[str, FaultyPair], args: argparse.Namespace) -> list[dict[str, Figures]]:
    """Rounds in turn, a first one of each thrown away."""
    found: list[dict[str, Figures]] = []
    async with client(pairs["with"], seed=1) as first, client(pairs["without"], seed=2) as second:
        clients = {"with": first, "without": second}
        for to in clients.values():
            await load(to, args)
        for number in range(args.pairs):
            both: dict[str, Figures] = {}
            for name in ("with", "without") if number % 2 == 0 else ("without", "with"):
                both[name] = await load(clients[name], args)
                figures = ", ".join(f"{key} {value:.4f}" for key, value in both[name]._asdict().items())
                print(f"{name:8} {figures}", flush=True)
            found.append(both)
    recomputed = pairs["with"].actions()["recomputed"]
    if recomputed:
        raise SystemExit(f"the guard computed {recomputed} prompts anew: these rounds compare something else")
    return found


async def load(to: Client, args: argparse.Namespace) -> Figures:
    """New prompts, each through prefill and decode."""
    prompts = to.prompts(args.requests, tokens=args.itl)

    async def one(prompt: tuple[int, ...]) -> float:
        began = time.perf_counter()
        _, body = await to.post("prefill", 600, prompt=list(prompt), max_tokens=1, kv_transfer_params=PREFILL)
        params = body["kv_transfer_params"]
        status, _ = await to.post("decode", 600, prompt=list(prompt), max_tokens=args.otl, kv_transfer_params=params)
        if status != 200:
            raise SystemExit(f"HTTP {status}")
        return time.perf_counter() - began

    began = time.perf_counter()
    taken = await each(one, prompts, args.concurrency)
    return Figures(len(taken) / (time.perf_counter() - began), statistics.fmean(taken), statistics.median(taken))


if __name__ == "__main__":
    main()
