"""``python -m tests.support.short_hour LEVEL first-hour ...``: the first hour with one level a sweep."""

from __future__ import annotations

import sys

from pdlab.__main__ import main
from pdlab.first_hour import steps

if __name__ == "__main__":
    steps.LEVELS["local"] = (int(sys.argv[1]),)
    sys.exit(main(sys.argv[2:]))
