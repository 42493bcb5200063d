"""``python run_with_fake.py FILE [FLAGS]``: ``python -m pdlab experiment`` with the launcher replaced."""

from __future__ import annotations

import sys
from pathlib import Path

from pdlab.bench.experiment import run
from pdlab.cli import experiment

run.LAUNCHER = [str(Path(__file__).parent / "fake_launcher.py")]
sys.exit(experiment.main(sys.argv[1:]))
