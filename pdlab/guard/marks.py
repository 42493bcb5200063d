"""When what happened to a request's KV cache, as the engine core and its workers see it: for the timeline of a request.

The marks go to the replica with vLLM's statistics of a step, under keys of their own, and are taken out there. Times
are seconds of ``time.monotonic``, which all processes of a machine share, and of which vLLM stamps its own events
(`vllm.v1.engine.EngineCoreEvent`). Workers may be on other machines: each says which boot its clock belongs to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORE, WIRE = "pdlab_marks_core", "pdlab_marks_wire"
# What became of a request's KV cache from prefill.
READ, ANEW, REFUSED = "read", "anew", "refused"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CHARS = 8


def boot() -> str:
    """The begin of this machine's boot id; empty where the system has none."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii")[:_CHARS]
    return ""


class ReceiveMarks:
    """Of the requests of a decode engine's core. ``finished``: what `take` gives the statistics, as
    ``(request, admitted, told, usable, outcome)``, None for what did not happen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, list[float | None]] = {}
        self.finished: list[tuple[Any, ...]] = []

    def admitted(self, request_id: str) -> None:
        """It has blocks, and its read is about to be posted."""
        self._open[request_id] = [self._clock(), None]

    def told(self, request_id: str) -> None:
        """The scheduler hears that all workers have read."""
        if (marks := self._open.get(request_id)) is not None:
            marks[1] = self._clock()

    def over(self, request_id: str, outcome: str) -> None:
        """What was read may be used (`READ`), or the prompt is computed instead."""
        admitted, told = self._open.pop(request_id, (None, None))
        self.finished.append((request_id, admitted, told, self._clock(), outcome))

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._open.pop(request_id, None)

    def take(self) -> list[tuple[Any, ...]]:
        """Those that are finished, each once."""
        finished, self.finished = self.finished, []
        return finished


class ReadMarks:
    """Of a worker's reads of KV cache, of which one request may have several, from several ranks of prefill."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._boot = boot()
        self._open: dict[str, list[float]] = {}
        self._owners: dict[Any, str] = {}

    def posted(self, request_id: str) -> None:
        """Its reads are about to be posted."""
        self._open.setdefault(request_id, [self._clock(), 0.0, 0.0, 0.0])

    def polled(self, transfers: dict[str, list[Any]]) -> None:
        """These reads (request -> NIXL handles) are about to be asked whether they have ended."""
        self._owners = {handle: request_id for request_id, handles in transfers.items() for handle in handles}

    def ended(self, handle: Any, telemetry: Any) -> None:
        """One of those has, and NIXL says how long it took and how much it was."""
        if (read := self._open.get(self._owners.get(handle, ""))) is not None:
            read[1] = max(read[1], float(telemetry.xferDuration))
            read[2] += float(telemetry.totalBytes)
            read[3] += 1

    def seen(self, request_id: str) -> tuple[Any, ...] | None:
        """All reads of a request have ended: ``(request, rank, posted, seen, NIXL's us, bytes, reads,
        boot)``."""
        read = self._open.pop(request_id, None)
        if read is None:
            return None
        return (request_id, self._rank, read[0], self._clock(), read[1], int(read[2]), int(read[3]), self._boot)

    def drop(self, request_id: str) -> None:
        """No read of it goes on."""
        self._open.pop(request_id, None)
