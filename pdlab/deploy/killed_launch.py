"""Stop the processes that a killed launch has left, and remove its files.

``python -m pdlab.deploy.killed_launch URL nodes ID FOLDER``, ``... URL application ID`` or ``... URL nothing`` (it
was killed before it made anything), run by `pdlab.deploy.orphan_cleanup`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from pdlab.cluster import local_nodes
from pdlab.core.errors import ClusterError, UsageError
from pdlab.core.files import launch_lock, locked
from pdlab.deploy.endpoint import clear_running, load_running, measured_lock

LOCK_TIMEOUT_S = 5.0
POLL_S = 0.1
TRIES = 5


def main(words: list[str]) -> None:
    base_url, kind, *made = words
    if kind == "application":
        stop_application(base_url, *made)
    elif kind == "nodes":
        stop_nodes(base_url, *made)
    else:
        with _launch_lock() as ours:
            _remove_lock_files(base_url, ours)


def stop_nodes(base_url: str, cluster_id: str, folder: str) -> None:
    """End every process of those nodes and remove their files, unless another launch already uses them."""
    with _launch_lock() as ours:
        recorded = _recorded()
        same = recorded is not None and recorded.id == cluster_id
        if same and not ours:
            return  # that launch has found them, and takes them down when it ends
        nodes = local_nodes.LocalNodes(id=cluster_id, count=1, gcs_port=0, temp_dir=folder, pids=())
        for _ in range(TRIES):
            try:
                local_nodes.stop(recorded if same and recorded is not None else nodes)
                break
            except ClusterError:  # one was started while the others were being ended
                time.sleep(POLL_S)
        _forget(base_url, ours)


def stop_application(base_url: str, cluster_id: str) -> None:
    """Delete the application on nodes that another launch made and that stay, unless another launch replaces it."""
    with _launch_lock() as ours:
        nodes = _recorded()
        if not ours or nodes is None or nodes.id != cluster_id:
            return
        from pdlab.cluster.connection import Cluster
        from pdlab.deploy.application import Application

        local_nodes.become_driver(nodes)
        with Cluster(nodes) as cluster, contextlib.suppress(ClusterError):
            Application(cluster).delete()
        _forget(base_url, ours)


@contextlib.contextmanager
def _launch_lock() -> Iterator[bool]:
    """The right to launch for the block, which the killed launch has let go; False: another launch has it."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with contextlib.ExitStack() as held:
        ours = False
        while not ours and time.monotonic() < deadline:
            try:
                held.enter_context(locked(launch_lock(local=True), "the right to launch"))
                ours = True
            except UsageError:
                time.sleep(POLL_S)
        yield ours


def _recorded() -> local_nodes.LocalNodes | None:
    try:
        return local_nodes.recorded()
    except UsageError:  # damaged, in the middle of a launch
        return None


def _forget(base_url: str, ours: bool) -> None:
    """Remove what the killed launch published, and its lock files, unless another launch has begun since."""
    with contextlib.suppress(UsageError):
        running = load_running(base_url)
        if ours and (running is None or running.manifest.local):
            clear_running(base_url)
    _remove_lock_files(base_url, ours)


def _remove_lock_files(base_url: str, ours: bool) -> None:
    """Remove the lock files of deployments that no process holds. A launch locks those that it replaces too."""
    for path in measured_lock(base_url).parent.glob("*.lock") if ours else ():
        with contextlib.suppress(UsageError), locked(path, "the deployment"):  # the end of the lock removes the file
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
