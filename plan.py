#!/usr/bin/env python3
"""Predict before a GPU is booked: `python -m pdlab plan`; see --help."""

import sys

from pdlab.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
