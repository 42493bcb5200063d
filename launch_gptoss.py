#!/usr/bin/env python3
"""Serve a deployment: `python -m pdlab launch`; see --help and README.md."""

from pdlab.__main__ import script

if __name__ == "__main__":
    script("launch")
