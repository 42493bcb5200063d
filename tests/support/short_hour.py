"""``python -m tests.support.short_hour LEVEL first-hour ...``: the first hour with one level a sweep, without a spread.

Other live tests launch spreads.
"""

from __future__ import annotations

import sys

from pdlab.__main__ import main
from pdlab.first_hour import steps

if __name__ == "__main__":
    steps.LEVELS["local"] = (int(sys.argv[1]),)
    steps.DEPLOYMENTS["local"] = tuple(each for each in steps.DEPLOYMENTS["local"] if each.name != "spread")
    sys.exit(main(sys.argv[2:]))
