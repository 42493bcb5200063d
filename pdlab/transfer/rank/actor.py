"""One rank as a Ray actor, and the end of actors' processes that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from pdlab.transfer.rank.messages import RankOptions
from pdlab.transfer.rank.rank import Rank


class RankActor:
    """The Ray actor of one rank."""

    def __init__(self, options: RankOptions) -> None:
        self.rank = Rank(options)

    def call(self, method: str, *args: Any) -> tuple[str, Any]:
        """See `Rank.call`."""
        return self.rank.call(method, *args)

    def where(self) -> tuple[str, str, int]:
        """(Ray's node id, the node's address, process id)."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()


def end_ranks(pids: list[int]) -> list[int]:
    """Kill processes of actors on this node that still exist 2 s after Ray ended the actors; returns their numbers."""
    deadline = time.monotonic() + 2.0

    def remaining_pids() -> list[int]:
        alive = []
        for pid in pids:
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                if state != "Z" and title.startswith(b"ray::"):
                    alive.append(pid)
        return alive

    while remaining_pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed = remaining_pids()
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed
