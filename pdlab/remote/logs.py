"""The engines' own logs: their ends, and the line with the cause of a failure.

Sent by value to nodes that have no pdlab: this module imports nothing of pdlab.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 20_000
TAIL_BYTES = 200_000
# Ranks of an engine under vLLM's executors for Ray (v1/executor/ray_executor_v2.py, ray_executor.py of 0.29).
RANK_ACTORS = ("RayWorkerProc", "RayWorkerWrapper")
# "ValueError: why" anywhere in a line; a name without a message only where a message would begin,
# because tracebacks quote lines such as "raise NotImplementedError".
_ERROR = re.compile(
    r"(?:^|\s|\.)(?P<line>(?:[A-Z]\w*)?(?:Error|Exception): .+)"
    r"|(?:^|\] )(?:\w+\.)*(?P<name>[A-Z]\w*(?:Error|Exception))$"
)
# Errors that only repeat that another process failed.
_ECHO = re.compile(
    r"root cause|Failed core proc|Engine core initialization failed|Executor failed|EngineDeadError"
    r"|TaskError|ActorDied|DeploymentUnavailableError"
)
_NO_FAILURE = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")
# Messages about a process that died without writing an error, with its exit code.
_DEATH = re.compile(
    r"(?P<line>Worker proc .*died unexpectedly.*|Engine core initialization failed.*Failed core proc.*)"
)
_KILLED = re.compile(r"(?:exit code|'): -9\b")


class LogTail(NamedTuple):
    """One log file of a replica: node, path, and its error line (None: no error)."""

    node: str
    path: str
    error: str | None


def tail_logs(folder: str, app: str, since: float = 0.0) -> list[LogTail]:
    """Logs of the application's replicas under ``folder`` on this machine, newest first."""
    node = socket.gethostname()
    return [LogTail(node, str(path), first_error(_ends(path)[1])) for path in _logs_of(folder, app, since)]


def count_prewarmed(folder: str, app: str, since: float = 0.0) -> tuple[int, int]:
    """Log lines of decode replicas: (pairs warmed up, prefill replicas that returned no KV parameters)."""
    warmed = empty = 0
    for path in _logs_of(folder, app, since):
        with path.open(errors="replace") as lines:
            for line in lines:
                warmed += "Pre-warm handshake done" in line
                empty += "returned empty kv_params" in line
    return warmed, empty


def log_ends(folder: str, app: str, since: float = 0.0) -> list[tuple[str, str, str]]:
    """(node, file name, text) of the application's replicas' logs: their beginnings and their ends."""
    node = socket.gethostname()
    ends = []
    for path in _logs_of(folder, app, since):
        head, tail = _ends(path)
        complete = path.stat().st_size <= TAIL_BYTES
        ends.append((node, path.name, tail if complete else f"{head}\n[...]\n{tail}"))
    return ends


def ucx_tables(folder: str, app: str, since: float = 0.0) -> list[str]:
    """The lines of UCX's tables of protocols in each log of the application's engines that has any.

    An engine whose ranks are Ray actors writes them into the logs of those actors, which do not name an application.
    """
    tables = []
    for path in _logs_of(folder, app, since, RANK_ACTORS):
        # UCX prints a table when it first uses a connection: it may be anywhere in a log that grows.
        with path.open(errors="replace") as lines:
            table = [line.rstrip() for line in lines if "+--" in line or line.rstrip().endswith("|")]
        tables += ["\n".join(table)] if table else []
    return tables


def _logs_of(folder: str, app: str, since: float, actors: Sequence[str] = ()) -> Iterator[Path]:
    """Ray writes one .out and one .err per process; a replica's say ``:actor_name:ServeReplica:<app>:``
    near their beginning. ``actors``: other classes of actors whose logs count too. Logs that ended before ``since``
    (seconds, Unix time) are of earlier launches.
    """
    names = [f":actor_name:ServeReplica:{app}:", *(f":actor_name:{actor}" for actor in actors)]
    paths = [path for path in Path(folder).glob("worker-*") if path.suffix in (".out", ".err")]
    written = {path: path.stat().st_mtime for path in paths}
    for path in sorted(paths, key=written.__getitem__, reverse=True):
        ends = "".join(_ends(path)) if written[path] >= since else ""
        if any(name in ends for name in names):
            yield path


def _ends(path: Path) -> tuple[str, str]:
    """The first HEAD_BYTES and the last TAIL_BYTES; with NIXL's debug logging a file can be huge."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return head.decode(errors="replace"), file.read().decode(errors="replace")


def first_error(text: str) -> str | None:
    """The first error line that is not an echo of another process's failure.

    A killed process writes none: then the line of another process about its death.
    """
    lines = text.splitlines()
    for line in lines:
        match = _ERROR.search(line)
        if match and not _ECHO.search(line) and not _NO_FAILURE.search(line, 0, match.start()):
            return (match["line"] or match["name"]).strip()
    death = next((match["line"].strip() for match in map(_DEATH.search, lines) if match), None)
    return f"{death} (-9: killed, most often because memory ran out)" if death and _KILLED.search(death) else death


def root_cause(tails: Sequence[LogTail]) -> str | None:
    """The error to show: that of the log written last."""
    return next((tail.error for tail in tails if tail.error), None)
