"""Whether tests run in their long form (`make test-long`): more kills, more faults. Which tests run in `make test-long`
only is said by the marker ``long``."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("PDLAB_TEST_LONG"))
