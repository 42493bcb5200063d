#!/usr/bin/env python3
"""What could make KV transfers slow or wrong: `python -m pdlab doctor`; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.__main__ import script

if __name__ == "__main__":
    script("doctor")
