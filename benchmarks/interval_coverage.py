"""How often 95 % intervals over repeats hold the truth: Student's t against the percentile bootstrap.

    python benchmarks/interval_coverage.py [--trials 4000]

Normal repeats around a known mean, seeded. Figures of docs/decisions come from here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.analysis.intervals import of_repeats  # noqa: E402

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
    return 0


if __name__ == "__main__":
    sys.exit(main())
