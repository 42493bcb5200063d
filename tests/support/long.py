"""Whether tests run in their long form (`make test-long`): more kills, more faults, every serving path."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("PDLAB_TEST_LONG"))
