"""``python benchmarks/ray_routing.py``: held closed loops behind the routers of Ray 2.51 and of Ray 2.60, simulated.

Prints requests/s (by Little's law) and mean TTFT of waves 4 to 18 of 20, as means over four seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import require_shape  # noqa: E402
from pdlab.core.deployment import Deployment, parse_label  # noqa: E402
from pdlab.core.workload import Closed, Level, Workload  # noqa: E402
from pdlab.sim.hardware import Hardware, load_hardware  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402

LABELS = ("collocated-2xtp4", "collocated-4xtp2", "pd-pack-p2xtp2-d2xtp2", "pd-spread-p2xtp4-d2xtp4")
SEEDS, WAVES, JUDGED = range(4), 20, (4, 18)


def held(hardware: Hardware, label: str, concurrency: int) -> tuple[float, float]:
    """Requests/s and mean TTFT in seconds."""
    deployment, shape = Deployment(topology=parse_label(label)), require_shape("gpt-oss-120b")
    level = Level(load=Closed(concurrency=concurrency), num_requests=WAVES * concurrency, seed=0)
    part = slice(*(wave * concurrency for wave in JUDGED))
    e2el_s, ttft_s = [], []
    for seed in SEEDS:
        (done,) = simulate(deployment, [level], Workload(), hardware, shape, seed=seed)
        came_s = done.arrival_s[part]
        e2el_s.append(fmean(end - came for came, end in zip(came_s, done.finish_s[part], strict=True)))
        ttft_s.append(fmean(first - came for came, first in zip(came_s, done.first_token_s[part], strict=True)))
    return concurrency / fmean(e2el_s), fmean(ttft_s)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    home = load_hardware("h100-vllm-0.11")
    print("| deployment | in flight | Ray 2.51: requests/s, TTFT ms | Ray 2.60 |\n|---|---|---|---|")
    for label in LABELS:
        for concurrency in (32, 64, 96):
            rows = [held(home.with_ray(version), label, concurrency) for version in ("2.51", "2.60")]
            cells = [f"{rate:.1f}, {1e3 * ttft_s:,.0f}" for rate, ttft_s in rows]
            print(f"| {label} | {concurrency} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
