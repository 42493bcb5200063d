"""How often 95 % intervals over repeats hold the truth: Student's t against the percentile bootstrap, and tails.

    python benchmarks/interval_coverage.py [--trials 4000]

Normal repeats around a known mean, seeded; then the tails of TTFT in an M/D/1 queue, whose slow requests come in
bursts, by how many requests of each of three repeats lie beyond the percentile. Figures of docs/decisions come from
here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.queues import md1_tail  # noqa: E402

from pdlab.analysis.intervals import MIN_BEYOND, SURE_BEYOND, of_repeats  # noqa: E402

LEVEL, TRUTH, SD, DRAWS = 0.95, 100.0, 8.0, 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    trials = parser.parse_args().trials
    rng = np.random.default_rng(12345)
    print("repeats  Student's t  percentile bootstrap")
    for repeats in (2, 3, 5, 10):
        drawn = rng.normal(TRUTH, SD, (trials, repeats))
        student = [interval.holds(TRUTH) for row in drawn if (interval := of_repeats(row.tolist()).interval(LEVEL))]
        resampled = []
        for row in drawn:
            low, high = np.quantile(rng.choice(row, (DRAWS, repeats)).mean(axis=1), [0.025, 0.975])
            resampled.append(low <= TRUTH <= high)
        print(f"{repeats:7}  {100 * np.mean(student):9.1f} %  {100 * np.mean(resampled):18.1f} %")
    tails(max(20, trials // 10))
    return 0


def tails(trials: int) -> None:
    """Share of trials in which the interval of three repeats holds the true percentile; mean error of the figure."""
    steps = (0.5, 5 / 3, MIN_BEYOND, SURE_BEYOND, 50)
    print(
        "\nTTFT of an M/D/1 queue, 3 repeats: coverage (mean error), by requests beyond the percentile in each repeat"
    )
    print("utilisation  percentile  " + "  ".join(f"{beyond:>12.3g}" for beyond in steps))
    for utilisation in (0.5, 0.7, 0.85):
        for quantile in (0.9, 0.95, 0.99):
            cells = []
            for beyond in steps:
                ratios = md1_tail(utilisation, quantile, round(beyond / (1 - quantile)), 3, trials, seed=7)
                held = np.mean([interval.holds(1.0) for row in ratios if (interval := of_repeats(row).interval(LEVEL))])
                cells.append(f"{100 * held:4.0f} % ({100 * (np.mean(ratios) - 1):+3.0f} %)")
            print(f"{utilisation:11g}  {f'p{100 * quantile:g}':>10}  " + "  ".join(cell.rjust(12) for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
