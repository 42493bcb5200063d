"""How long viz takes to load 1,000 result files with 1,000 requests each and to compute every table.

    python benchmarks/load_results.py [--files 1000] [--requests 1000] [--output-tokens 64] [--repeats 5]

Writes the folders into a temporary place (not timed), then runs viz in a process of its own with every table:
raw, per node with the frontier, crossovers, an SLO that needs every request, cost. Prints seconds of that process
from start to exit, interpreter and imports included, its CPU seconds and its peak memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.deployment import Deployment, parse_label  # noqa: E402
from pdlab.core.workload import Closed, RunKey, Workload  # noqa: E402
from pdlab.results.level_data import LevelData  # noqa: E402
from pdlab.results.metrics import steady, whole  # noqa: E402
from pdlab.results.schema import Manifest, RequestRecord, Run  # noqa: E402
from pdlab.results.store import Store  # noqa: E402

LOADS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
BUDGET_S, BUDGET_MB = 5.0, 500.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdlab-load-") as folder:
        folders = write(Path(folder), args.files, args.requests, args.output_tokens, args.repeats)
        size_mb = sum(path.stat().st_size for path in Path(folder).rglob("*")) / 1e6
        command = [sys.executable, str(ROOT / "viz.py"), "--exps", *map(str, folders), "--no-plot"]
        command += ["--slo", "ttft_ms=400,tpot_ms=30", "--price-per-gpu-hour", "2.5"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        took_s = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak_mb = used.ru_maxrss / 1024
    print(f"{args.files} files, {args.requests} requests each, {len(folders)} experiments, {size_mb:.0f} MB on disk")
    print(f"{len(done.stdout.splitlines())} lines of tables")
    print(f"{took_s:.2f} s ({used.ru_utime + used.ru_stime:.2f} s of CPU on {len(os.sched_getaffinity(0))} cores)")
    print(f"{peak_mb:.0f} MB at most")
    within = took_s <= BUDGET_S and peak_mb <= BUDGET_MB
    print(f"{'within' if within else 'NOT within'} {BUDGET_S:g} s and {BUDGET_MB:g} MB")
    return 0 if within else 1


def write(out: Path, files: int, requests: int, output_tokens: int, repeats: int) -> list[Path]:
    """Experiments of ten loads each, every level with its records; returns their folders.

    The levels of the first are drawn, the others' are copies of them: reading a copy takes as long.
    """
    rng = np.random.default_rng(1)
    each = len(LOADS) * repeats
    folders: list[Path] = []
    for first in range(0, files, each):
        label = f"collocated-{len(folders) + 1}xtp1"
        store = Store(out / label)
        workload = Workload(input_tokens=256, output_tokens=output_tokens)
        manifest = Manifest(
            origin="measured", label=label, deployment=Deployment(topology=parse_label(label)), workload=workload
        )
        store.write_manifest(manifest)
        for i in range(min(each, files - first)):
            load, repeat = LOADS[i // repeats], i % repeats
            if not folders:
                level(store, label, workload, load, repeat, requests, rng)
                continue
            key, drawn = RunKey(kind="concurrency", value=load, repeat=repeat), Store(folders[0])
            shutil.copy(drawn.path(key), store.path(key))
            shutil.copy(drawn.records_path(key), store.records_path(key))
        folders.append(store.folder)
    return folders


def level(
    store: Store, label: str, workload: Workload, load: int, repeat: int, requests: int, rng: np.random.Generator
) -> None:
    """One closed-loop level: each of ``load`` places serves one request after the other."""
    tokens = workload.output_tokens
    gaps = rng.exponential(0.004 + 0.0002 * load, (requests, tokens - 1))
    ttft = rng.gamma(20, (0.05 + 0.004 * load) / 20, requests)
    took = ttft + gaps.sum(axis=1)
    free = np.zeros(load)
    records = []
    for i in range(requests):
        place = int(np.argmin(free))
        arrival = float(free[place])
        free[place] += took[i]
        records.append(
            RequestRecord(
                arrival_s=round(arrival, 6),
                first_token_s=round(arrival + float(ttft[i]), 6),
                finish_s=round(arrival + float(took[i]), 6),
                input_tokens=workload.input_tokens,
                output_tokens=tokens,
                itl_s=tuple(np.round(gaps[i], 6).tolist()),
            )
        )
    closed, data = Closed(concurrency=load), LevelData.of(records)
    run = Run(
        origin="measured",
        label=label,
        key=RunKey(kind="concurrency", value=load, repeat=repeat),
        workload=workload,
        load=closed,
        num_requests=requests,
        completed=requests,
        failed=0,
        whole=whole(data),
        steady=steady(data, closed),
    )
    store.write(run, records)


if __name__ == "__main__":
    sys.exit(main())
