"""The ended requests of a level. They are written to a file while others are sent, so that memory does not grow with
their number, and become records when the level is over.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import IO, Any, NamedTuple

from pdlab.bench.client.protocol import ComputedTokens, EndedPart
from pdlab.core.text import last_line
from pdlab.results.schema import RequestRecord
from pdlab.results.timeline import RequestTimeline

ERROR_CHARS = 300
AT_ONCE = 200


class EndedRequest(NamedTuple):
    """One request, times in seconds; ``start_s`` on the monotonic clock.

    ``itl_s``: gaps between chunks. ``due_s``: since the begin of the level's schedule (None: there is none).
    ``by_schedule``: its lateness is by that, and not ``lateness_s``. ``facts``: more fields of its record.
    ``timeline``: as its server sent it. ``prompt``: what an engine computed for it.
    """

    start_s: float
    ttft_s: float
    latency_s: float
    ok: bool
    input_tokens: int
    output_tokens: int
    itl_s: Sequence[float]
    error: str
    due_s: float | None
    by_schedule: bool
    lateness_s: float | None
    facts: dict[str, Any]
    timeline: str | None
    prompt: ComputedTokens | None


class EndedRequests:
    """The ended requests of a level. ``origin_s``: when the first one was sent. ``schedule_s``: start of the schedule,
    by the most punctual request.
    """

    def __init__(self) -> None:
        self.count = self.failed = 0
        self.origin_s = math.inf
        self.schedule_s: float | None = None
        self._file: IO[bytes] | None = None

    def add(self, ended: EndedRequest) -> None:
        self.count += 1
        self.failed += not ended.ok
        self.origin_s = min(self.origin_s, ended.start_s)
        if ended.due_s is not None:
            began_s = ended.start_s - ended.due_s
            self.schedule_s = began_s if self.schedule_s is None else min(self.schedule_s, began_s)
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed in parts)
        pickle.dump(tuple(ended), self._file, pickle.HIGHEST_PROTOCOL)

    def parts(self) -> Iterator[EndedPart]:
        """Yield all requests in batches, in the order in which they ended. Call it once, after the last one was
        added.
        """
        if self._file is None:
            return
        with self._file as file:
            file.seek(0)
            each = (EndedRequest(*pickle.load(file)) for _ in range(self.count))
            while some := [*islice(each, AT_ONCE)]:
                timelines = (timeline_of(one, self.origin_s) for one in some)
                yield EndedPart(
                    records=tuple(record_of(one, self.origin_s, self.schedule_s) for one in some),
                    timelines=tuple(timeline for timeline in timelines if timeline is not None),
                    prompts=tuple(one.prompt for one in some if one.prompt is not None),
                )


def record_of(ended: EndedRequest, origin_s: float, schedule_s: float | None) -> RequestRecord:
    """The record of a request, times since ``origin_s``, to the microsecond."""
    arrival_s, error, late_s = ended.start_s - origin_s, None, ended.lateness_s
    if ended.by_schedule and ended.due_s is not None and schedule_s is not None:
        late_s = ended.start_s - ended.due_s - schedule_s
    if not ended.ok:
        error = (last_line(ended.error) or "failed without a reason")[:ERROR_CHARS]
    return RequestRecord(
        arrival_s=round(arrival_s, 6),
        first_token_s=round(arrival_s + ended.ttft_s, 6) if ended.ttft_s else None,
        finish_s=round(arrival_s + ended.latency_s, 6) if ended.ok else None,
        input_tokens=ended.input_tokens,
        output_tokens=ended.output_tokens,
        itl_s=tuple(round(gap_s, 6) for gap_s in ended.itl_s),
        error=error,
        lateness_s=None if late_s is None else max(0.0, round(late_s, 6)),
        **ended.facts,
    )


def timeline_of(ended: EndedRequest, origin_s: float) -> RequestTimeline | None:
    """What its server reported of an answered request, with the client's times as its record has them; None where it
    sent nothing that can be read: of another server it is no JSON, or no object."""
    if ended.timeline is None or not ended.ok or not ended.ttft_s:
        return None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        own = {"arrival_s": round(ended.start_s - origin_s, 6), "ttft_s": round(ended.ttft_s, 6)}
        return RequestTimeline.model_validate(json.loads(ended.timeline) | own)
    return None
