#!/usr/bin/env python3
"""What could make KV transfers slow or wrong: `python -m pdlab doctor`; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())
