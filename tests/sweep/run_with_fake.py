"""``python run_with_fake.py FILE [FLAGS]``: ``python -m pdlab.bench run`` with the launcher replaced."""

from __future__ import annotations

import sys
from pathlib import Path

from pdlab import bench, experiment_run

experiment_run.LAUNCHER = Path(__file__).parent / "fake_launcher.py"
sys.exit(bench.main(["run", *sys.argv[1:]]))
