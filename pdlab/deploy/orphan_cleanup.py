"""A process that outlives a killed local launcher, and then stops everything that the launch started.

SIGKILL leaves a launcher no time to clean up, and Ray's nodes and engines continue without it. The cleanup process
takes a few megabytes (only the standard library). It reads the launcher's lines from a pipe, which the kernel closes
when the launcher is gone, however it went. ``end`` is the last line of every launch that ended by itself.

    nodes ID FOLDER     Ray nodes are about to be made, under that id, in that folder
    application ID      an application is about to be served on the nodes with that id, which another launch has made
    end                 nothing is left to be taken down, or it is meant to stay
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Nodes are recognized by it, and the cleanup process is none of them (`pdlab.cluster.local_nodes.MARKER`).
MARKER = "PDLAB_LOCAL"
END_TIMEOUT_S = 10.0


class CleanupProcess:
    """The launcher's side: reports everything to the cleanup process before it is started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def nodes(self, cluster_id: str, folder: str) -> None:
        self._send(f"nodes {cluster_id} {folder}")

    def application(self, cluster_id: str) -> None:
        self._send(f"application {cluster_id}")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: the launch goes on without it
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        self._send("end")
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def cleanup_process(base_url: str) -> Iterator[CleanupProcess]:
    """Run a cleanup process for the block. If this process dies inside the block, the cleanup process stops everything
    that was reported to it, and removes what is published for ``base_url``.
    """
    env = {name: value for name, value in os.environ.items() if name != MARKER}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), base_url],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, env=env, cwd="/",
        start_new_session=True,
    )  # fmt: skip
    cleanup = CleanupProcess(process)
    try:
        yield cleanup
    finally:
        cleanup.end()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal that the launcher is in
        signal.signal(number, signal.SIG_IGN)
    made = ["nothing"]
    for line in sys.stdin:
        if line == "end\n":
            return
        if line.endswith("\n"):  # whole: what follows is made after it was written
            made = line.split(maxsplit=2)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    os.execve(
        sys.executable,
        [sys.executable, "-m", "pdlab.deploy.killed_launch", sys.argv[1], *map(str.strip, made)],
        env,
    )


if __name__ == "__main__":
    main()
