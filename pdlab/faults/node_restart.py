"""Starts a killed node of two hosts again: only what is outside of the hosts can, and faults are made inside.

The two talk through files in the nodes' own folder, which both see.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.core.errors import ClusterError, PdlabError
from pdlab.core.files import replace

WISH, ANSWER = "restart-node", "restarted-node"
POLL_S = 0.2
ANSWER_TIMEOUT_S = local_nodes.START_TIMEOUT_S + 30.0


@contextlib.contextmanager
def restarting_nodes(nodes: LocalNodes) -> Iterator[None]:
    """Within the block a thread of this process, outside of the hosts, serves `request_restart` inside of them."""
    over = threading.Event()
    folder = Path(nodes.temp_dir)
    _forget(folder)

    def watch() -> None:
        now = nodes
        while not over.wait(POLL_S):
            with contextlib.suppress(FileNotFoundError, ValueError):
                number = int((folder / WISH).read_text(encoding="utf-8"))
                (folder / WISH).unlink()
                complaint = ""
                try:
                    now = local_nodes.restart(now, number)
                except (PdlabError, OSError) as error:
                    complaint = str(error) or type(error).__name__
                replace(folder / ANSWER, complaint.encode())

    thread = threading.Thread(target=watch, name="restarting-nodes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(ANSWER_TIMEOUT_S)
        _forget(folder)


def request_restart(nodes: LocalNodes, number: int) -> None:
    """Have that node started again; returns when it is. Raises ClusterError where it is not."""
    folder = Path(nodes.temp_dir)
    (folder / ANSWER).unlink(missing_ok=True)
    replace(folder / WISH, str(number).encode())
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not (folder / ANSWER).exists():
        if time.monotonic() > deadline:
            (folder / WISH).unlink(missing_ok=True)
            raise ClusterError(f"node {number} was not started again within {ANSWER_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    complaint = (folder / ANSWER).read_text(encoding="utf-8")
    (folder / ANSWER).unlink()
    if complaint:
        raise ClusterError(complaint)


def _forget(folder: Path) -> None:
    for name in (WISH, ANSWER):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
