#!/usr/bin/env python3
"""How long until 1P+1D is ready: `launch_gptoss.py --pd-spread --local` against two bare vLLM servers.

Alternates the two, and prints seconds, the ratio of each pair and the memory of the deployment.
Both sides include everything from the command to readiness; pdlab's also the warmed pair, the
canary and the transfer counters.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bare_pair import ROOT, BarePair, tiny_model

from pdlab.cluster import local_nodes

LAUNCH = [sys.executable, str(ROOT / "launch_gptoss.py")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of starts (default %(default)s)")
    args = parser.parse_args()
    tiny_model()
    rows = []
    print("round  bare, as vLLM ships  bare, pdlab's engine settings  pdlab  ratio to shipped  pdlab's memory")
    for number in range(1, args.rounds + 1):
        with BarePair(tuned=False) as pair:
            shipped_s = pair.ready_s
        with BarePair(tuned=True) as pair:
            tuned_s = pair.ready_s
        launch_s, memory_gb = launch()
        rows.append((shipped_s, tuned_s, launch_s))
        print(
            f"{number:5}  {shipped_s:17.1f} s  {tuned_s:27.1f} s  {launch_s:3.1f} s  {launch_s / shipped_s:16.2f}  "
            f"{memory_gb:.1f} GB",
            flush=True,
        )
    ratios = [launch_s / shipped_s for shipped_s, _, launch_s in rows]
    tuned = [launch_s / tuned_s for _, tuned_s, launch_s in rows]
    print(f"median ratio: {statistics.median(ratios):.2f} to vLLM as it ships, {statistics.median(tuned):.2f} to tuned")


def launch() -> tuple[float, float]:
    """(seconds until ready, memory in GB of all its processes: proportional set size)."""
    began = time.monotonic()
    subprocess.run([*LAUNCH, "--pd-spread", "--local", "--detach"], check=True, capture_output=True)
    ready_s = time.monotonic() - began
    nodes = local_nodes.running()
    assert nodes is not None
    memory = sum(proportional_kb(pid) for pid in local_nodes.processes(nodes))
    subprocess.run([*LAUNCH, "--shutdown"], check=True, capture_output=True)
    return ready_s, memory / 1e6


def proportional_kb(pid: int) -> int:
    """Proportional set size: memory shared by n processes counts 1/n for each."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
