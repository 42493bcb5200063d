"""Read the engines' logs: their ends, and the line with the cause of a failure.

Sent by value to nodes without pdlab: imports only the standard library.
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
# "ValueError: why" anywhere in a line. A name without a message counts only at the start of a message, because
# tracebacks quote lines such as "raise NotImplementedError".
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
    """One log file of a replica. ``error``: its error line, or None."""

    node: str
    path: str
    error: str | None


def tail_logs(folder: str, app: str, since: float = 0.0) -> list[LogTail]:
    """Logs of the application's replicas in ``folder`` on this machine, newest first. ``since``: as `_logs_of`."""
    node = socket.gethostname()
    return [LogTail(node, str(path), first_error(_ends(path)[1])) for path in _logs_of(folder, app, since)]


def count_prewarmed(folder: str, app: str, since: float = 0.0) -> tuple[int, int]:
    """Counts of log lines of decode replicas: (pairs warmed up, prefill replicas that returned no KV parameters)."""
    warmed = empty = 0
    for path in _logs_of(folder, app, since):
        with path.open(errors="replace") as lines:
            for line in lines:
                warmed += "Pre-warm handshake done" in line
                empty += "returned empty kv_params" in line
    return warmed, empty


def log_ends(folder: str, app: str, since: float = 0.0) -> list[tuple[str, str, str]]:
    """(node, file name, text) of the replicas' logs; the text of a large log is its beginning and its end."""
    node = socket.gethostname()
    ends = []
    for path in _logs_of(folder, app, since):
        head, tail = _ends(path)
        complete = path.stat().st_size <= TAIL_BYTES
        ends.append((node, path.name, tail if complete else f"{head}\n[...]\n{tail}"))
    return ends


def ucx_tables(folder: str, app: str, since: float = 0.0) -> list[str]:
    """The lines of UCX's protocol tables, one text for each log of the application's engines that has a table.

    If the ranks of an engine are Ray actors, the tables are in the actors' logs, which do not name an application.
    """
    tables = []
    for path in _logs_of(folder, app, since, RANK_ACTORS):
        # UCX prints a table at the first use of a connection, so it may be anywhere in the log.
        with path.open(errors="replace") as lines:
            table = [line.rstrip() for line in lines if "+--" in line or line.rstrip().endswith("|")]
        tables += ["\n".join(table)] if table else []
    return tables


def _logs_of(folder: str, app: str, since: float, actors: Sequence[str] = ()) -> Iterator[Path]:
    """Logs of the application's replicas and of the classes ``actors``, the newest first.

    Ray writes one .out and one .err file per process. The files of a replica have ``:actor_name:ServeReplica:<app>:``
    near the beginning. Files last written before ``since`` (Unix time in seconds) belong to earlier launches.
    """
    names = [f":actor_name:ServeReplica:{app}:", *(f":actor_name:{actor}" for actor in actors)]
    paths = [path for path in Path(folder).glob("worker-*") if path.suffix in (".out", ".err")]
    written = {path: path.stat().st_mtime for path in paths}
    for path in sorted(paths, key=written.__getitem__, reverse=True):
        ends = "".join(_ends(path)) if written[path] >= since else ""
        if any(name in ends for name in names):
            yield path


def _ends(path: Path) -> tuple[str, str]:
    """The first HEAD_BYTES and the last TAIL_BYTES of a file, because NIXL's debug log can be huge."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return head.decode(errors="replace"), file.read().decode(errors="replace")


def first_error(text: str) -> str | None:
    """The first error line that does not only repeat the failure of another process.

    A killed process writes no error; the result is then the line of another process about its death.
    """
    lines = text.splitlines()
    for line in lines:
        match = _ERROR.search(line)
        if match and not _ECHO.search(line) and not _NO_FAILURE.search(line, 0, match.start()):
            return (match["line"] or match["name"]).strip()
    death = next((match["line"].strip() for match in map(_DEATH.search, lines) if match), None)
    return f"{death} (-9: killed, most often because memory ran out)" if death and _KILLED.search(death) else death


def root_cause(tails: Sequence[LogTail]) -> str | None:
    """The error of the log that was written last."""
    return next((tail.error for tail in tails if tail.error), None)
