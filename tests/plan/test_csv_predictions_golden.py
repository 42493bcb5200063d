"""What the shipped constants predict, kept as text: a change of the model shows here, line by line, and nowhere else.

PDLAB_UPDATE_GOLDEN=1 rewrites the stored table; read the difference before keeping it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import Closed, Level, Workload
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate

pytestmark = pytest.mark.golden


STORED = Path(__file__).parent / "golden" / "predictions.txt"
LABELS = (
    "collocated-1xtp8",
    "collocated-4xtp2",
    "collocated-8xtp1",
    "collocated-1xtp8ep",
    "pd-pack-p1xtp2-d1xtp2",
    "pd-pack-p1xtp2-d3xtp2",
    "pd-pack-p3xtp1-d1xtp4",
    "pd-spread-p1xtp4-d1xtp4",
)
LEVELS = tuple(Level(load=Closed(concurrency=n), num_requests=5 * n, seed=0) for n in (8, 32, 64))


def predicted() -> str:
    hardware, shape = load_hardware("h100-vllm-0.11"), require_shape("gpt-oss-120b")
    lines = []
    for label in LABELS:
        deployment = Deployment(topology=parse_label(label))
        done = simulate(deployment, LEVELS, Workload(), hardware, shape, prompts="repeated")
        for level in done:
            tpot_s, ttft_s, rate = figures(level)
            assert tpot_s is not None
            lines.append(
                f"{label} at concurrency {level.level.load.value:g}: TPOT {1e3 * tpot_s:.2f} ms, "
                f"mean TTFT {1e3 * ttft_s:.0f} ms, {rate:.2f} requests/s"
            )
    return "\n".join(lines) + "\n"


def test_predictions_are_the_stored_ones() -> None:
    rows = predicted()
    if os.environ.get("PDLAB_UPDATE_GOLDEN") == "1":
        STORED.write_text(rows, encoding="utf-8")
    stored = STORED.read_text(encoding="utf-8") if STORED.exists() else ""
    changed = "\n".join(difflib.unified_diff(stored.splitlines(), rows.splitlines(), "stored", "now", n=0, lineterm=""))
    assert not changed, f"predictions changed; keep them with `make golden` if that is meant:\n{changed}"
