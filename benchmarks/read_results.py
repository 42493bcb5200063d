"""How long viz.py and the audit take for large and for many result files of other clients.

    python benchmarks/read_results.py [--megabytes 110] [--small 3000]

Writes two detailed files of `vllm bench serve` of that size, and a folder of small ones, into a temporary place (not
timed). Prints the CPU seconds of `json.load` of one large file, and of reading it as pdlab does in the same process, as
a ratio; then the seconds of viz.py and of its audit in processes of their own, from start to exit, and the CPU seconds
of each, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.results.published_folders import load_experiments  # noqa: E402

MOST_RATIO = 2.0
TTFT_S, TPOT_S, INPUT, OUTPUT = 0.1, 0.04, 1000, 250


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=110)
    parser.add_argument("--small", type=int, default=3000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdlab-read-") as name:
        place = Path(name)
        large = [write_large(place / f"large-{i}_{i}xtp2", 100 * i, args.megabytes) for i in (1, 2)]
        small = write_small(place / "small_1xtp2", args.small)
        size_mb = next(large[0].iterdir()).stat().st_size / 1e6
        for parsed in (1, 2, 3):  # the first is of a cold page cache
            plain_s = timed(lambda: json.loads(next(large[0].iterdir()).read_bytes()))
            read_s = timed(lambda: load_experiments(large[0]))
            print(f"{parsed}: {size_mb:.0f} MB: json.load {plain_s:.2f} s, read {read_s:.2f} s: {read_s / plain_s:.2f}")
        print(f"orjson is {'' if importlib.util.find_spec('orjson') else 'not '}installed")
        exps = viz(["--exps", *map(str, large), "--no-plot"])
        audit = viz(["--audit", *map(str, large)])
        few = viz(["--exps", str(small), "--no-plot"])
        took = {"--exps of two such files": exps, "--audit of them": audit, f"--exps of {args.small} small files": few}
        for what, (elapsed_s, cpu_s) in took.items():
            print(f"{what}: {elapsed_s:.1f} s, of CPU {cpu_s:.1f} s")
    print(f"{'within' if read_s <= MOST_RATIO * plain_s else 'NOT within'} {MOST_RATIO:g} times json.load")
    return 0


def timed(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class Took(NamedTuple):
    """Seconds from start to exit, and of CPU."""

    elapsed_s: float
    cpu_s: float


def viz(words: list[str]) -> Took:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, str(ROOT / "viz.py"), *words], capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(time.monotonic() - began, cpu_s)


def summary(concurrency: int, requests: int) -> dict[str, Any]:
    stays_s = TTFT_S + TPOT_S * (OUTPUT - 1)
    return {
        "backend": "openai", "model_id": "org/model", "num_prompts": requests, "request_rate": "inf",
        "max_concurrency": concurrency, "duration": requests * stays_s / concurrency, "completed": requests,
        "request_throughput": concurrency / stays_s,
        "total_input_tokens": INPUT * requests, "total_output_tokens": OUTPUT * requests,
        "mean_ttft_ms": 1000 * TTFT_S, "median_ttft_ms": 1000 * TTFT_S,
        "mean_tpot_ms": 1000 * TPOT_S, "median_tpot_ms": 1000 * TPOT_S,
    }  # fmt: skip


def write_large(folder: Path, concurrency: int, megabytes: float) -> Path:
    """One detailed file of about that size: some 20 bytes for the gap before a token."""
    chance = random.Random(folder.name)
    requests = max(10, round(megabytes * 1e6 / (22.0 * OUTPUT)))
    gaps = [[TPOT_S * chance.uniform(0.5, 1.5) for _ in range(OUTPUT - 1)] for _ in range(requests)]
    content = summary(concurrency, requests) | {
        "ttfts": [TTFT_S * chance.uniform(0.5, 1.5) for _ in range(requests)], "itls": gaps,
        "input_lens": [INPUT] * requests, "output_lens": [OUTPUT] * requests, "errors": [""] * requests,
        "generated_texts": ["word " * 20] * requests,
    }  # fmt: skip
    folder.mkdir()
    (folder / f"conc{concurrency}.json").write_text(json.dumps(content))
    return folder


def write_small(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        content = summary(1 + i // 3, 20 * (1 + i // 3)) | {"mean_ttft_ms": 100.0 + i % 7}
        (folder / f"conc{1 + i // 3}_r{i % 3}.json").write_text(json.dumps(content))
    return folder


if __name__ == "__main__":
    sys.exit(main())
