"""Which deployment to choose: candidates, simulated and ranked; calibration of the simulator; predictions."""

from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
