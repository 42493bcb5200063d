#!/usr/bin/env python3
"""Result folders to tables, plots and a reading: `python -m pdlab viz`; see --help."""

import sys

from pdlab.cli.viz import main

if __name__ == "__main__":
    sys.exit(main())
