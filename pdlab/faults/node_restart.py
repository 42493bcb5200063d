"""Start a killed node of two hosts again. Faults are made inside a host, and only an outside process can start a node.

The two processes exchange files in the nodes' own folder.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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
    """Serve `request_restart` in a thread of this process, which is outside the hosts, for a block."""
    folder = Path(nodes.temp_dir)
    _forget(folder)

    def watch(over: threading.Event) -> None:
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

    try:
        with in_background(watch, "restarting-nodes", ANSWER_TIMEOUT_S):
            yield
    finally:
        _forget(folder)


@contextlib.contextmanager
def in_background(work: Callable[[threading.Event], None], name: str, join_s: float) -> Iterator[None]:
    """Run ``work`` in a thread for a block. Its event is set at the end of the block; it then has ``join_s`` to end."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(join_s)


def request_restart(nodes: LocalNodes, number: int) -> None:
    """Let the outside process start that node again; returns when the node has joined. Raises ClusterError."""
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
