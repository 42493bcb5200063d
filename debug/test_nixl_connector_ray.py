#!/usr/bin/env python3
"""Prove the KV transfer: `python -m pdlab check-transfer`; see readme_nixl_ray.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.__main__ import script

if __name__ == "__main__":
    script("check-transfer")
