#!/usr/bin/env python3
"""Result folders to tables, plots and a reading: `python -m pdlab viz`; see --help."""

from pdlab.__main__ import script

if __name__ == "__main__":
    script("viz")
