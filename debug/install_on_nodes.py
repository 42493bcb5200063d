#!/usr/bin/env python3
"""Install a wheel on every node: `python -m pdlab install-wheel`; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.__main__ import script

if __name__ == "__main__":
    script("install-wheel")
