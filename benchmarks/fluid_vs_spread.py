#!/usr/bin/env python3
"""What moving roles cost while they do not move: fluid engines with a fixed split against `--pd-spread` of the same
split, launched in turn (A B B A ...) in one run. CPU engines, the tiny model, no GPU; one client for all.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from serving_path import Figures, measure  # noqa: E402

from pdlab.bench.client.processes import LoadClient  # noqa: E402
from pdlab.cluster.local_nodes import hold_port  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--concurrency", type=int, default=8, help="default %(default)s")
    parser.add_argument(
        "--prompts", type=int, default=20, help="requests per unit of concurrency (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="launches of each (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="levels per launch (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=1, help="engines that prefill (default %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="engines that decode (default %(default)s)")
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("--lengths", default="fixed", help="of requests, as run_bm.sh takes them (default %(default)s)")
    parser.add_argument("--otl", type=int, default=64, help="output tokens (default %(default)s)")
    args = parser.parse_args()
    held, free = hold_port()  # nobody else is given it meanwhile
    port = str(free)
    common = ["--local", "--detach", "--port", port]
    engines = args.prefill + args.decode
    launches = {
        "spread": ["--pd-spread", "--p-num", str(args.prefill), "--d-num", str(args.decode)],
        "fluid": ["--pd-fluid", "--num", str(engines), "--roles", f"{args.prefill}:{args.decode}"],
    }
    figures_by_launch: dict[str, list[Figures]] = {name: [] for name in launches}
    try:
        for number in range(args.rounds):
            for name in list(launches) if number % 2 == 0 else list(launches)[::-1]:
                words = [sys.executable, "launch_gptoss.py", *launches[name], *common]
                subprocess.run(words, check=True, cwd=ROOT, capture_output=True)
                with LoadClient() as client:
                    target = {"base_url": f"http://127.0.0.1:{port}"}
                    (figures,) = measure(client, target, [args.concurrency], args)
                figures_by_launch[name].append(figures)
                line = ", ".join(f"{key} {value:.2f}" for key, value in figures._asdict().items())
                print(f"{name:8} {line}", flush=True)
    finally:
        stop = [sys.executable, "launch_gptoss.py", "--port", port, "--shutdown"]
        subprocess.run(stop, check=True, cwd=ROOT, capture_output=True)
        held.close()
    for name in Figures._fields:
        values = {launch: [getattr(f, name) for f in made] for launch, made in figures_by_launch.items()}
        ratios = [fluid / spread for fluid, spread in zip(values["fluid"], values["spread"], strict=True)]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"fluid / spread  {name}: {statistics.fmean(ratios):.3f} (each {each})")


if __name__ == "__main__":
    main()
