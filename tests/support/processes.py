"""Processes of a deployment on local Ray nodes, by what they are."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any


def title(pid: int) -> str:
    """A process's command line; empty for one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def with_children(pid: int) -> list[int]:
    """A process and all that it has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    family = [pid]
    for parent in family:
        family += [child for child, of in parents.items() if of == parent]
    return family


def replicas(nodes: Any, role: str) -> list[int]:
    """The processes of that role's Ray Serve replicas ("Prefill", "Decode"), by their numbers."""
    from pdlab.cluster import local_nodes

    return [pid for pid in local_nodes.processes(nodes) if f"ServeReplica:pdlab:{role}" in title(pid)]


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process and its children."""
    for each in with_children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
