#!/usr/bin/env python3
"""The report of many experiments: how long it takes to make, and in Chromium to open, to filter and to hover.

The experiments are made up, each with its loads and repeats. Opening is from the navigation's begin to the
plots being drawn; filtering and hovering are from the event to the layout that follows it, in the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import support.browser as browser  # noqa: E402
import support.folders as folders  # noqa: E402

FILTER = """(() => {
  const node = document.getElementById('filter'), times = [];
  for (const text of %s) {
    const begin = performance.now();
    node.value = text; node.dispatchEvent(new Event('input')); document.body.offsetHeight;
    times.push(performance.now() - begin);
  }
  return times;
})()"""
HOVER = """(() => {
  const svg = document.querySelector('figure.main svg'), times = [];
  svg.scrollIntoView();
  const box = svg.getBoundingClientRect();
  for (let i = 0; i < %d; i++) {
    const clientX = box.x + box.width * (0.1 + 0.8 * ((i * 0.618) %% 1));
    const clientY = box.y + box.height * ((i * 0.382) %% 1);
    const begin = performance.now();
    svg.dispatchEvent(new PointerEvent('pointermove', { clientX, clientY, pointerType: 'mouse' }));
    document.body.offsetHeight;
    times.push(performance.now() - begin);
  }
  return times;
})()"""
OPENED = "performance.getEntriesByName('pdlab-drawn')[0].startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=30, help="how many (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="openings and filters (default %(default)s)")
    args = parser.parse_args()
    executable = browser.find()
    if executable is None:
        sys.exit(f"no browser of {', '.join(browser.NAMES)} is installed")
    with tempfile.TemporaryDirectory(prefix="pdlab-report-") as name:
        made = [
            folders.write(
                Path(name) / f"experiment-{i}", deployment, loads=(1, 2, 4, 8, 16, 32, 48, 64), faster=1 + i / 50
            )
            for i, deployment in enumerate(folders.deployments(args.experiments))
        ]
        file = Path(name) / "report.html"
        begin = time.perf_counter()
        command = [sys.executable, str(ROOT / "viz.py"), "--exps", *map(str, made), "--report", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made_s = time.perf_counter() - begin
        size_mb = file.stat().st_size / 1e6
        print(f"{args.experiments} experiments, 8 loads, 3 repeats: made in {made_s:.1f} s, {size_mb:.2f} MB")
        with browser.page(executable) as page:
            page.size(1280, 900)
            opened = []
            for _ in range(args.rounds):
                page.open(file)
                opened.append(page.evaluate(OPENED))
            print_times("open, until drawn", opened)
            texts = ["collocated", "spread", "", "experiment-1", "", "tp4", "nothing", ""] * (args.rounds // 4 or 1)
            print_times("filter, until laid out", page.evaluate(FILTER % json.dumps(texts)))
            print_times("hover, until laid out", page.evaluate(HOVER % (10 * args.rounds)))
            assert page.messages == [], page.messages


def print_times(name: str, times_ms: list[float]) -> None:
    print(f"{name}: median {statistics.median(times_ms):.1f} ms, worst of {len(times_ms)} {max(times_ms):.1f} ms")


if __name__ == "__main__":
    main()
