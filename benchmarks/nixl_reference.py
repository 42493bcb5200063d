#!/usr/bin/env python3
"""The KV-transfer check against the shortest use of NIXL itself: two processes, one agent each, DRAM, same node.

Both read 256 MiB in random 64 KiB blocks. The reference has nothing else in it: no Ray, no codes, no checks. It
tries NIXL with vLLM's worker threads, with none and with two, and the best of the three counts. Both lie in huge
pages where the kernel has some. Prints every round, and the check's median over that of the best kind of reference.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.rank_processes import ProcessRanks  # noqa: E402

from pdlab.transfer.check import run_backend  # noqa: E402
from pdlab.transfer.plan import RequestSize, TransferPlan, cache_blocks  # noqa: E402
from pdlab.transfer.rank.layout import plain_kv_shape  # noqa: E402

BYTES, BLOCK = 256 << 20, 64 << 10
REPEATS = 7
PR_SET_THP_DISABLE = 41  # linux/prctl.h


def pages() -> np.ndarray:
    block = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint64)


def agent(name: str, threads: int):  # type: ignore[no-untyped-def]
    from nixl._api import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(num_threads=threads))
    memory = pages()
    memory[:] = 1
    made.register_memory([(memory.ctypes.data, BYTES, 0, "")], "DRAM", backends=["UCX"])
    return made, memory


def blocks(base: int) -> np.ndarray:
    count = BYTES // BLOCK
    out = np.zeros((count, 3), np.uint64)
    out[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(BLOCK)
    out[:, 1] = BLOCK
    return out


def source(pipe: Connection, threads: int) -> None:
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    made, memory = agent("source", threads)
    pipe.send((made.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()


def measure(threads: int) -> list[float]:
    """GB/s of each warm read."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    peer = context.Process(target=source, args=(theirs, threads), daemon=True)
    peer.start()
    try:
        made, memory = agent("target", threads)
        metadata, base = mine.recv()
        name = made.add_remote_agent(metadata)
        local = made.prep_xfer_dlist("NIXL_INIT_AGENT", blocks(memory.ctypes.data), "DRAM")
        remote = made.prep_xfer_dlist(name, blocks(base), "DRAM")
        rng = np.random.default_rng(0)
        to, out = (rng.permutation(BYTES // BLOCK).astype(np.int32) for _ in range(2))
        rates = []
        for number in range(REPEATS + 1):
            began = time.perf_counter()
            handle = made.make_prepped_xfer("READ", local, to, remote, out, notif_msg=b"%d" % number)
            state = made.transfer(handle)
            while state == "PROC":
                state = made.check_xfer_state(handle)
            rates.append(BYTES / (time.perf_counter() - began) / 1e9)
            assert state == "DONE", state
            made.release_xfer_handle(handle)
        return rates[1:]
    finally:
        peer.kill()
        peer.join()


def child(threads: int) -> None:
    """One measurement in a process of its own, so that every agent starts fresh."""
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    rates = measure(threads)
    print("RATES " + json.dumps(rates), flush=True)
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


def reference(threads: int) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(threads)], capture_output=True, text=True, timeout=120, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RATES "))
    return float(statistics.median(json.loads(line.removeprefix("RATES "))))


def tool() -> dict[str, Any]:
    """What was found by debug/test_nixl_connector_ray.py with the same bytes in the same blocks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable, str(ROOT / "debug/test_nixl_connector_ray.py"), "--local", "--strategy", "pack",
            "--num-layers", "1", "--block-len-bytes", str(BLOCK), "--blocks", str(BYTES // BLOCK), "--random-blocks",
            "--repeats", str(REPEATS), "--json", str(out),
        ]  # fmt: skip
        subprocess.run(command, capture_output=True, timeout=300)
        run: dict[str, Any] = json.loads(out.read_text())["runs"][0]
        return run


def without_ray() -> float:
    """GB/s of the check's ranks as plain processes: what Ray around them costs is the difference to `tool`."""
    plan = TransferPlan(
        shape=plain_kv_shape(1, BLOCK, 1, 16), sizes=(RequestSize(BYTES // BLOCK),), strategy="pack", repeats=REPEATS,
        num_blocks=cache_blocks((RequestSize(BYTES // BLOCK),), 1), timeout_s=60.0, seed=0, scattered=True,
    )  # fmt: skip
    options = plan.ranks("UCX", vram=False)
    with ProcessRanks(options) as ranks:
        return run_backend(plan, options, ranks).sizes[-1].gb_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default %(default)s)")
    parser.add_argument("--only", action="store_true", help="the reference alone")
    parser.add_argument("--small-pages", action="store_true", help="without huge pages, for both")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
    if args.small_pages:
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # every process started from here inherits it
    ours, plain, memcpy, startups, checks = [], [], [], [], []
    theirs: dict[int, list[float]] = {4: [], 2: [], 0: []}
    for number in range(1, args.rounds + 1):
        # Before and after the check, for other work on the machine comes and goes.
        report = None
        for place, threads in enumerate((4, 2, 0, 4)):
            if place == 2 and not args.only:
                report = tool()
                plain.append(without_ray())
            theirs[threads].append(reference(threads))
        first, again = theirs[4][-2:]
        text = f"4 threads {first:.2f} and {again:.2f}, 2 threads {theirs[2][-1]:.2f}, 0 threads {theirs[0][-1]:.2f}"
        if report is not None:
            ours.append(report["sizes"][0]["gb_per_s"])
            memcpy.append(report["memcpy_gb_per_s"])
            startups.append(report["startup_s"])
            checks.append(report["check_s"] / report["checked_bytes"] * 2**30)
            text += f"; the check {ours[-1]:.2f}, without Ray {plain[-1]:.2f}; memcpy {memcpy[-1]:.2f}"
        print(f"round {number}: {text} GB/s", flush=True)
    # One median per kind: the best of several noisy numbers would be more than any of them can do again.
    best, threads = max((statistics.median(rates), threads) for threads, rates in theirs.items())
    print(f"medians of all rounds: the best reference {best:.2f} GB/s, with {threads} threads")
    if ours:
        mine = statistics.median(ours)
        share = statistics.median(rate / copy for rate, copy in zip(ours, memcpy, strict=True))
        bare = statistics.median(plain)
        print(
            f"the check {mine:.2f} GB/s = {mine / best:.2f} of it, without Ray around its ranks {bare:.2f} = "
            f"{bare / best:.2f}; {share:.2f} of memcpy in its own run"
        )
        print(
            f"its start-up without Ray's takes {statistics.median(startups):.1f} s, checking 1 GiB "
            f"{statistics.median(checks):.2f} s (medians)"
        )


if __name__ == "__main__":
    main()
