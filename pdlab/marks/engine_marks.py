"""What the KV guard in an engine and the replica in front of it both name: keys, outcomes and the machine's boot id.

Runs in engines and in Ray Serve's replicas, on nodes without pdlab: imports only the standard library.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# Keys in vLLM's statistics of a step: the marks of the engine core, and of the workers' reads.
CORE, WIRE = "pdlab_marks_core", "pdlab_marks_wire"
# Outcomes of a request's KV cache from prefill. `CACHED`: decode had it, and there was nothing to read.
READ, CACHED, RECOMPUTED, REFUSED = "read", "cached", "anew", "refused"
# Key in vLLM's KV-transfer parameters: the token that prefill sampled, if decode would sample the same one.
FIRST_TOKEN = "pdlab_first_token"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHARS = 8


def boot_id() -> str:
    """The first 8 characters of this machine's boot id; empty without one."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii")[:_CHARS]
    return ""
