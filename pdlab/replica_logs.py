"""What the engines themselves wrote when they failed: the end of their logs, and the line that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TAIL_BYTES = 200_000
_ERROR = re.compile(r"(?:^|\s|\.)(?P<line>[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b: .+)")
# Errors that only repeat that another process failed.
_ECHO = re.compile(r"See root cause above|Failed core proc|TaskError|ActorDied|Engine core initialization failed")


class LogTail(NamedTuple):
    """One log file of a replica: node, path, and the error line found in it (None: none)."""

    node: str
    path: str
    error: str | None


def tail_logs(folder: str, app: str, node: str) -> list[LogTail]:
    """Logs of the application's replicas under ``folder``, newest first.

    Ray writes one .out and one .err per process; a replica's say ``:actor_name:ServeReplica:<app>:``.
    """
    found = []
    paths = [path for path in Path(folder).glob("worker-*") if path.suffix in (".out", ".err")]
    for path in sorted(paths, key=lambda p: p.stat().st_mtime, reverse=True):
        text = path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        if f":actor_name:ServeReplica:{app}:" in text:
            found.append(LogTail(node, str(path), first_error(text)))
    return found


def first_error(text: str) -> str | None:
    """The first error line that is not an echo of another process's failure."""
    for line in text.splitlines():
        match = _ERROR.search(line)
        if match and not _ECHO.search(line):
            return match["line"].strip()
    return None


def root_cause(tails: Sequence[LogTail]) -> str | None:
    """The error to show: the first that any replica wrote."""
    return next((tail.error for tail in tails if tail.error), None)
