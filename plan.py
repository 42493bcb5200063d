#!/usr/bin/env python3
"""Predict before a GPU is booked: `python -m pdlab plan`; see --help."""

from pdlab.__main__ import script

if __name__ == "__main__":
    script("plan")
