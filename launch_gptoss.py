#!/usr/bin/env python3
"""Serve a deployment: `python -m pdlab launch`; see --help and README.md."""

import sys

from pdlab.cli.launch import main

if __name__ == "__main__":
    sys.exit(main())
