"""Times of the events of a request's KV cache, in the engine core and its workers, for the timeline of a request.

The marks travel to the replica in vLLM's statistics of a step, under their own keys; the replica removes them. Times
are seconds of ``time.monotonic``. All processes of a machine share this clock, and vLLM uses it for its own events
(`vllm.v1.engine.EngineCoreEvent`). Workers may be on other machines, so each mark of a worker has its boot id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pdlab.marks.engine_marks import CACHED, REFUSED, boot_id


class ReceiveMarks:
    """Marks of the requests of a decode engine's core. ``finished``: tuples ``(request, admitted, read_reported,
    decided, outcome)`` for `take`; None for an event that did not happen. What is decided while the scheduler plans a
    step has the time at which it began to, as vLLM's own event of a request that it takes up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step_began = clock()
        self._open: dict[str, list[float | None]] = {}
        self.finished: list[tuple[Any, ...]] = []

    def step_begins(self) -> None:
        """The scheduler begins to plan a step."""
        self._step_began = self._clock()

    def awaits_answer(self, request_id: str) -> None:
        """The scheduler could admit the request, but prefill has not answered yet."""
        self._open.setdefault(request_id, [self._step_began, None])

    def admitted(self, request_id: str) -> None:
        """The request got its blocks, and its read will be posted."""
        self._open[request_id] = [self._clock(), None]

    def read_reported(self, request_id: str) -> None:
        """The scheduler got the end of the read from all workers."""
        if (marks := self._open.get(request_id)) is not None:
            marks[1] = self._clock()

    def finish(self, request_id: str, outcome: str) -> None:
        """The request's KV cache is usable (`READ`), or its prompt will be computed (`RECOMPUTED`). While a step is
        planned: nothing has to be read (`CACHED`), or the prompt will be computed (`REFUSED`)."""
        admitted, read_reported = self._open.pop(request_id, (None, None))
        decided = self._step_began if outcome in (CACHED, REFUSED) else self._clock()
        self.finished.append((request_id, admitted, read_reported, decided, outcome))

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._open.pop(request_id, None)

    def take(self) -> list[tuple[Any, ...]]:
        """The finished marks. Each is returned once."""
        finished, self.finished = self.finished, []
        return finished


class ReadMarks:
    """Marks of a worker's KV reads. A request may have several reads, from several ranks of prefill."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._boot = boot_id()
        self._open: dict[str, list[float]] = {}
        self._owners: dict[Any, str] = {}

    def posted(self, request_id: str) -> None:
        """The request's reads will be posted."""
        self._open.setdefault(request_id, [self._clock(), 0.0, 0.0, 0.0])

    def polled(self, transfers: dict[str, list[Any]]) -> None:
        """The worker will check these reads (request -> NIXL handles) for their end."""
        self._owners = {handle: request_id for request_id, handles in transfers.items() for handle in handles}

    def ended(self, handle: Any, telemetry: Any) -> None:
        """One of these reads has ended. ``telemetry``: NIXL's duration (us) and bytes."""
        if (read := self._open.get(self._owners.get(handle, ""))) is not None:
            read[1] = max(read[1], float(telemetry.xferDuration))
            read[2] += float(telemetry.totalBytes)
            read[3] += 1

    def finish(self, request_id: str) -> tuple[Any, ...] | None:
        """All reads of a request have ended. Returns (request, rank, posted, seen, NIXL's us, bytes, reads, boot)."""
        read = self._open.pop(request_id, None)
        if read is None:
            return None
        return (request_id, self._rank, read[0], self._clock(), read[1], int(read[2]), int(read[3]), self._boot)

    def drop(self, request_id: str) -> None:
        """Forget a request without a read in progress."""
        self._open.pop(request_id, None)
