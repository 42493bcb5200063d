"""One rank as a Ray actor, and the end of actors' processes that hang."""

from __future__ import annotations

import contextlib
import os
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
    import psutil

    ranks = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            rank = psutil.Process(pid)
            if "".join(rank.cmdline()).startswith("ray::"):
                ranks.append(rank)
    killed = []
    for rank in psutil.wait_procs(ranks, timeout=2.0)[1]:
        with contextlib.suppress(psutil.Error):
            if rank.status() != psutil.STATUS_ZOMBIE:
                rank.kill()
                killed.append(rank.pid)
    return killed
