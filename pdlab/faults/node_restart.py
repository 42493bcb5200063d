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

REQUEST_FILE, RESULT_FILE = "restart-node", "restarted-node"
POLL_S = 0.2
RESTART_TIMEOUT_S = local_nodes.START_TIMEOUT_S + 30.0


@contextlib.contextmanager
def restarting_nodes(nodes: LocalNodes) -> Iterator[None]:
    """Serve `request_restart` in a thread of this process, which is outside the hosts, for a block."""
    folder = Path(nodes.temp_dir)
    _remove_files(folder)

    def watch(over: threading.Event) -> None:
        now = nodes
        while not over.wait(POLL_S):
            with contextlib.suppress(FileNotFoundError, ValueError):
                number = int((folder / REQUEST_FILE).read_text(encoding="utf-8"))
                (folder / REQUEST_FILE).unlink()
                error_text = ""
                try:
                    now = local_nodes.restart(now, number)
                except (PdlabError, OSError) as error:
                    error_text = str(error) or type(error).__name__
                replace(folder / RESULT_FILE, error_text.encode())

    try:
        with in_background(watch, "restarting-nodes", RESTART_TIMEOUT_S):
            yield
    finally:
        _remove_files(folder)


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
    (folder / RESULT_FILE).unlink(missing_ok=True)
    replace(folder / REQUEST_FILE, str(number).encode())
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while not (folder / RESULT_FILE).exists():
        if time.monotonic() > deadline:
            (folder / REQUEST_FILE).unlink(missing_ok=True)
            raise ClusterError(f"node {number} was not started again within {RESTART_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    error_text = (folder / RESULT_FILE).read_text(encoding="utf-8")
    (folder / RESULT_FILE).unlink()
    if error_text:
        raise ClusterError(error_text)


def _remove_files(folder: Path) -> None:
    for name in (REQUEST_FILE, RESULT_FILE):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
