#!/usr/bin/env python3
"""What the niceness of processes that answer requests does (`pdlab.cluster.priority`), in pairs on one deployment.

A pair has one level with niceness 0 and one with `ANSWERING`, in turn the one or the other first. The deployment is PD
on two hosts as `serving_path.py --two-hosts` has it, or with --bare the bare pair of it. The ratios of tokens/s, median
TTFT and CPU per request that are printed are geometric means of the pairs, with two standard errors. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator

import serving_path
from bare_pair import ROOT, BarePair
from process_cpu import cpu_s, pids_of, used_s

from pdlab.bench.client.processes import LoadClient
from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import hold_port
from pdlab.cluster.priority import ANSWERING, set_niceness
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Closed, Level, Workload
from pdlab.deploy.endpoint import reach

FRONT = ("HAProxy", "prefill", "decode", "API server")
FIGURES = ("tokens/s", "TTFT", "CPU per request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--concurrency", type=int, default=4, help="requests at a time (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=8, help="of levels (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=10, help="a level, per request at a time (default %(default)s)")
    parser.add_argument("--bare", action="store_true", help="the bare pair")
    args = parser.parse_args()
    lengths = parse_lengths("uniform:0.8-1.0")
    workload = Workload(input_tokens=512, output_tokens=64, lengths=lengths)
    load = Closed(concurrency=args.concurrency)
    count = args.concurrency * args.prompts
    ratios: list[list[float]] = []
    with bare() if args.bare else served() as server, LoadClient() as client:

        def measure(seed: int) -> tuple[float, float, float]:
            before = cpu_s(server.pids())
            figures = serving_path.measure_level(
                client, server, workload, Level(load=load, num_requests=count, seed=seed)
            )
            used = sum(used_s(before, cpu_s(server.pids())).values())
            return figures.tokens_per_s, figures.ttft_ms, used / count

        measure(1)
        for pair in range(args.pairs):
            levels = {}
            for turn, niceness in enumerate((0, ANSWERING) if pair % 2 else (ANSWERING, 0)):
                for pid in pids_of(server.pids(), FRONT):
                    set_niceness(niceness, pid)
                levels[niceness] = measure(2 + 2 * pair + turn)
            ratios.append([math.log(new / old) for new, old in zip(levels[ANSWERING], levels[0], strict=True)])
    for name, logs in zip(FIGURES, zip(*ratios, strict=True), strict=True):
        error = 2 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        print(f"{name}, niceness {ANSWERING} over 0: {math.exp(statistics.mean(logs)):.3f} (within {error:.3f})")


@contextlib.contextmanager
def bare() -> Iterator[serving_path.Server]:
    with BarePair(tuned=True, on_two_hosts=True) as pair, pair.network():
        urls = {"backend": "pd-bare", "prefill_url": pair.urls["producer"], "decode_url": pair.urls["consumer"]}
        yield serving_path.Server(urls, pair.pids)


@contextlib.contextmanager
def served() -> Iterator[serving_path.Server]:
    held, port = hold_port()
    launch = [sys.executable, str(ROOT / "launch_gptoss.py"), "--port", str(port)]
    with held:
        start = [*launch, "--pd-spread", "--local", "--two-hosts", "--detach"]
        subprocess.run(start, check=True, capture_output=True)
        try:
            nodes = local_nodes.running()
            assert nodes is not None
            base_url = f"http://127.0.0.1:{port}"
            with reach(base_url):
                yield serving_path.Server({"base_url": base_url}, lambda: local_nodes.processes(nodes))
        finally:
            subprocess.run([*launch, "--shutdown"], check=True, capture_output=True)


if __name__ == "__main__":
    main()
