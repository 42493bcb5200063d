"""Timelines of requests: marks of the answering server, of its engine and of the engine that prefilled.

A client requests one by the header `HEADER`: a streamed answer then has one comment (``: pdlab {...}``) before
``[DONE]``, another answer the same JSON in a response header of that name. Its form is
`pdlab.results.timeline.RequestTimeline`. Times are of ``time.monotonic``, which every process of a machine shares and
of which vLLM stamps its engine's events; prefill's server sends durations in its answer's KV-transfer parameters
(`TIMES_KEY`), and the ids of prompt and first token if decode needs them (`IDS_KEY`). Runs in Ray Serve's replicas,
sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
import logging
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from pdlab.deploy.serving.events import DONE_EVENT, END
from pdlab.deploy.serving.guard import Message, Send, header_of
from pdlab.deploy.serving.step_watch import connector_stats, on_outputs
from pdlab.deploy.serving.traces import TRACEPARENT, TRACESTATE, RequestTrace, SpanMaker
from pdlab.deploy.serving.ttft_metrics import CountsParts
from pdlab.marks.engine_marks import CACHED, CORE, READ, WIRE, boot_id

HEADER = "x-pdlab-timeline"
ID_HEADER = "x-request-id"
COMMENT = ": pdlab "
# The key in vLLM's KV-transfer parameters under which prefill sends decode its durations.
TIMES_KEY = "pdlab_times"
# The key there under which decode requests token ids, and prefill gives them `packed`. In vLLM's own field they are a
# list of integers, which pydantic looks at one by one.
IDS_KEY = "pdlab_ids"
# The field of an answer that is not streamed and goes through an ingress, which makes a header of it.
FIELD = "pdlab_timeline"
# Where an ASGI scope has the `_Sending` of its request.
SENDING = "pdlab.sending"
_TRACE = (TRACEPARENT, TRACESTATE)
ROUTES = ("/v1/completions", "/v1/chat/completions")
# vLLM's events that are marks. Others (``PREEMPTED``) are no moment of TTFT, and may come after the first token.
_EVENTS = {"QUEUED": "queued", "SCHEDULED": "scheduled"}
_DONE_BYTES = DONE_EVENT.encode()
_ID_CHARS = 128
# Of a header's value. aiohttp reads lines of 8190 bytes, HAProxy headers of 15 KiB together.
_HEADER_BYTES = 4096


class _RequestContext:
    """Holds the timing of the current request. Every process that gets this module has its own."""

    def __init__(self) -> None:
        self._variable: contextvars.ContextVar[RequestTiming | None] = contextvars.ContextVar(
            "pdlab_timing", default=None
        )

    def __reduce__(self) -> Any:
        return (_RequestContext, ())

    def set(self, timing: RequestTiming | None) -> None:
        self._variable.set(timing)

    def get(self) -> RequestTiming | None:
        timing = self._variable.get()
        return None if timing is None or timing.ended else timing


_context = _RequestContext()
_machine: dict[str, str] = {}


def current() -> RequestTiming | None:
    """The timing of the request on whose behalf this is called."""
    return _context.get()


def requests_timeline(value: object) -> bool:
    """Whether the header's value requests a timeline."""
    return value in ("1", b"1")


class RequestTiming:
    """What is known of one request of this server; seconds of ``time.monotonic``."""

    def __init__(self, *, wanted: bool, request_id: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.wanted = wanted
        self.request_id = request_id[:_ID_CHARS]
        self.began = clock()
        self.ended = False
        self.marks: dict[str, float] = {}
        self.engine_ids: list[str] = []
        self.prompt_ids: Sequence[int] = ()
        self.first_ids: Sequence[int] = ()
        self.sends_ids = False
        self.attempts = 0
        self.orchestrated = False
        self.prefilled = False
        self.early = False
        self.streamed = True
        self.second_request = False
        self.outcome: str | None = None
        self.times: dict[str, Any] = {}
        self.reads: list[tuple[int, float, float, float, int, int, str]] = []
        self.trace: RequestTrace | None = None
        self.sent: dict[str, Any] | None = None
        self._chunks = 0

    @property
    def passed_ms(self) -> float:
        """Since the request reached this server."""
        return _ms(self._clock() - self.began)

    def mark(self, name: str) -> None:
        """Set the mark to now, unless it is set already."""
        self.marks.setdefault(name, self._clock())

    def called(self) -> None:
        """Prefill is called, for the first time, again, or for another sequence."""
        self.attempts += 1
        self.mark("call")

    def failed(self, *, made: bool) -> None:
        """A call of prefill has failed; or it was not ``made``, because there was no other replica."""
        if made:
            self.marks["failed"] = self._clock()
        else:
            self.attempts -= 1

    def answered(self, times: dict[str, Any] | None) -> None:
        """Prefill has answered with its durations."""
        self.prefilled = True
        self.mark("answer")
        self.times = times if isinstance(times, dict) else {}

    def chunk(self) -> int:
        """A piece of the answer is about to be sent. Returns how many there were with it; of more than 2, 2."""
        if self._chunks < 2:
            self._chunks += 1
            self.mark("first_byte" if self._chunks == 1 else "second_byte")
        return self._chunks

    def event(self, name: str, at: float) -> None:
        """An event of the engine core's, at its own time; the first of its kind counts."""
        self.marks.setdefault(name, at)

    def receive(self, admitted: float | None, reported: float | None, decided: float, outcome: str) -> None:
        """Take the engine core's report on KV cache from prefill (`pdlab.guard.marks.ReceiveMarks`). KV cache that is
        not used has no marks of its read: its time is one part, until the decision.
        """
        if outcome == READ:
            times = {"admitted": admitted, "reported": reported, "usable": decided}
        else:
            times = {"admitted": decided if admitted is None else admitted}
            times |= {"given_up": decided} if outcome != CACHED else {}
        for name, at in times.items():
            if at is not None:
                self.event(name, at)
        self.outcome = outcome

    def read(
        self, rank: int, posted: float, seen: float, microseconds: float, size: int, reads: int, boot: str
    ) -> None:
        """Take a worker's report on its reads of KV cache (`pdlab.guard.marks.ReadMarks.seen`)."""
        self.reads.append((rank, posted, seen, microseconds, size, reads, boot))

    @property
    def path(self) -> str:
        """As `pdlab.results.timeline.RequestTimeline` has it."""
        if not self.orchestrated:
            return "collocated"
        if not self.prefilled:
            return "local"
        return {None: "pd", READ: "pd", CACHED: "cached"}.get(self.outcome, "recomputed")

    @property
    def engine_id(self) -> str:
        """The engine's first id of the request: the client's id and a suffix of the engine."""
        return self.engine_ids[0][-_ID_CHARS:]

    def durations(self, replica: str) -> dict[str, Any]:
        """The durations that prefill's server reports, in ms."""
        found: dict[str, Any] = {"total": self.passed_ms, "replica": replica}
        if self.engine_ids:
            found["id"] = self.engine_id
        for name, begin, end in (("queue", "queued", "scheduled"), ("prefill", "scheduled", "first")):
            if begin in self.marks and end in self.marks:
                found[name] = _ms(self.marks[end] - self.marks[begin])
        return found

    def record(self, replica: str, *, guarded: bool) -> dict[str, Any]:
        """The timeline, as it is sent."""
        boot = _machine.get("boot") or _machine.setdefault("boot", boot_id())
        wire = self._wire(boot)
        path, err = self.path, None
        if len(self.engine_ids) > 1:
            err = "decode got a second request" if self.second_request else "several sequences"
        elif self.orchestrated and self.prefilled and self.outcome is None:
            err = "the KV guard reported no outcome" if guarded else "without the KV guard reads have no marks"
        elif "first" not in self.marks:
            err = "the engine reported no events"
        elif path == "pd" and not self._reads_here(boot):
            err = "the reads were on other machines"
        elif self.prefilled and not {"queue", "prefill"} <= self.times.keys():
            err = "prefill's engine reported no events"
        sent: dict[str, Any] = {"v": 1, "id": self.request_id, "path": path, "try": self.attempts, "boot": boot}
        sent["t"] = {name: _ms(at - self.began) for name, at in self.marks.items()}
        sent |= {"d_id": self.engine_id} if self.engine_ids else {}
        sent |= {"role_d": replica} if replica else {}
        if self.times:
            sent |= {"p_id": self.times.get("id"), "role_p": self.times.get("replica")}
            sent["p"] = {name: self.times[name] for name in ("total", "queue", "prefill") if name in self.times}
        if wire:
            sent["wire"] = wire
        if err is not None:
            sent["err"] = err
        if self.early:
            sent["early"] = True
        return sent

    def _wire(self, boot: str) -> list[list[Any]]:
        """The reads, whose marks are set; those of another machine's clock begin with the first of this one's. All have
        ended when the scheduler gets the news."""
        own = self._reads_here(boot)
        if not own:
            return []
        first = min(read[1] for read in own)
        last = max(read[2] for read in own)
        rows = []
        for rank, posted, seen, microseconds, size, reads, where in self.reads:
            here = where == boot
            begin = posted if here else first
            end = seen if here else begin + seen - posted
            if not here:
                last = max(last, min(end, self.marks.get("reported", end)))
            rows.append([rank, _ms(begin - self.began), _ms(end - self.began), microseconds, size, reads])
        if self.path == "pd":
            self.marks["posted"], self.marks["seen"] = first, last
        return sorted(rows)

    def _reads_here(self, boot: str) -> list[tuple[int, float, float, float, int, int, str]]:
        """The reads by this machine's clock; none where its boot is not known."""
        return [read for read in self.reads if boot and read[6] == boot]


class TimingBook:
    """The timings of the requests that an engine has, by the engine's own ids."""

    def __init__(self) -> None:
        self._timings: dict[str, RequestTiming] = {}
        self._without_first: set[str] = set()
        self._failed = False

    def enter(self, engine_id: str, prompt_ids: Sequence[int] | None) -> None:
        """The engine gets a request for the current client request, and the request is in the queue from now on. vLLM's
        own event comes only when the running step has ended.
        """
        timing = current()
        if timing is not None:
            timing.mark("queued")
            timing.engine_ids.append(engine_id)
            timing.prompt_ids = prompt_ids or ()
            self._timings[engine_id] = timing
            self._without_first.add(engine_id)

    def leave(self, timing: RequestTiming) -> None:
        """The request has been answered, or its client has gone."""
        timing.ended = True
        for engine_id in timing.engine_ids:
            self._timings.pop(engine_id, None)
            self._without_first.discard(engine_id)

    def take(self, outputs: Any) -> None:
        """A message of the engine core: vLLM's ``EngineCoreOutputs``. Takes the guard's marks out of it.

        An exception here would end the engine, because vLLM takes it for one of the engine core. A message in an
        unknown form is therefore logged once and ignored.
        """
        try:
            self._take(outputs)
        except Exception as error:
            if not self._failed:
                self._failed = True
                logging.getLogger("ray.serve").warning("requests have no whole timeline: %r", error)

    def _take(self, outputs: Any) -> None:
        for stats in connector_stats(outputs):
            self._take_marks(stats)
        if not self._without_first:  # the events that count come with the first output of a request
            return
        for output in outputs.outputs:
            if output.events and (timing := self._timings.get(output.request_id)) is not None:
                for event in output.events:
                    if (mark := _EVENTS.get(event.type.name)) is not None:
                        timing.event(mark, event.timestamp)
                if output.new_token_ids:
                    self._without_first.discard(output.request_id)
                    if "first" not in timing.marks:
                        timing.event("first", outputs.timestamp)
                        timing.first_ids = output.new_token_ids

    def _take_marks(self, stats: dict[str, Any]) -> None:
        for request_id, *marks in stats.pop(CORE, ()):
            if (timing := self._timings.get(request_id)) is not None:
                timing.receive(*marks)
        for request_id, *read in stats.pop(WIRE, ()):
            if (timing := self._timings.get(request_id)) is not None:
                timing.read(*read)


def listen(client: Any, book: TimingBook) -> None:
    """Let the book see the messages between vLLM's client and its engine core. Raises AttributeError for another
    version of vLLM.
    """
    processor = client.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        book.enter(request.request_id, request.prompt_token_ids)
        return add(request, *args, **kwargs)

    on_outputs(client, book.take)
    processor.add_request = add_request


class SendsTimeline:
    """Mixed into Ray's engine servers, in front of all others. ``marks_reads``: whether the engine has the KV guard.
    ``traced``: the share of requests that get spans; None: there is no endpoint for spans.
    """

    marks_reads = False
    traced: float | None = None
    _book: TimingBook | None = None
    _traces: SpanMaker | None = None
    _counts: CountsParts | None = None

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        self._book, self._counts = TimingBook(), CountsParts(replica_id())
        try:
            listen(self.engine._engine_client, self._book)  # type: ignore[attr-defined]
        except AttributeError as error:  # another vLLM or Ray, or no engine of vLLM's: serves all the same
            logging.getLogger("ray.serve").warning("requests have no timeline: %r", error)
        if self.traced is not None:
            try:
                self._traces = SpanMaker(self.traced)
            except ImportError as error:
                logging.getLogger("ray.serve").warning("requests have no spans: %r", error)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._timed("completions", request, raw_request_info)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._timed("chat", request, raw_request_info)

    async def _timed(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        answer = getattr(super(), method)
        if (
            self._book is None or current() is not None
        ):  # as with direct streaming, where `TimelineMiddleware` has begun
            begun: AsyncIterator[Any] = await answer(request, raw)
            return begun
        headers = {} if raw is None else raw.headers
        timing = RequestTiming(wanted=requests_timeline(headers.get(HEADER)), request_id=headers.get(ID_HEADER) or "")
        transfer = getattr(request, "kv_transfer_params", None) or {}
        prefills, timing.sends_ids = bool(transfer.get("do_remote_decode")), bool(transfer.get(IDS_KEY))
        if not prefills and raw is not None and (traced := self.begin_trace(timing, headers)):
            raw = copy.copy(raw)
            raw.headers = _without_trace(headers) | traced
        _context.set(timing)
        try:
            stream = await answer(request, raw)
        except BaseException:
            self.over(timing, answers=not prefills)
            raise
        return self._recorded(timing, stream, prefills=prefills)

    async def _recorded(
        self, timing: RequestTiming, stream: AsyncIterator[Any], *, prefills: bool
    ) -> AsyncIterator[Any]:
        assert self._book is not None
        _context.set(timing)
        try:
            async for item in stream:
                if prefills:
                    if parameters := getattr(item, "kv_transfer_params", None):
                        parameters[TIMES_KEY] = timing.durations(replica_id())
                        if timing.sends_ids and timing.prompt_ids:
                            parameters[IDS_KEY] = (packed(timing.prompt_ids), packed(timing.first_ids))
                    yield item
                else:
                    timing.streamed = isinstance(_last_of(item), str)
                    timing.chunk()
                    yield self._with_record(timing, item) if timing.wanted else item
        finally:
            self.over(timing, answers=not prefills)
            if hasattr(stream, "aclose"):
                with contextlib.suppress(Exception):
                    await stream.aclose()

    def _with_record(self, timing: RequestTiming, item: Any) -> Any:
        """The last piece of an answer, with the timeline; others as they are."""
        last = _last_of(item)
        if isinstance(last, str):
            if not last.endswith(DONE_EVENT):
                return item
            with_timeline = f"{last.removesuffix(DONE_EVENT)}{self.comment(timing)}{DONE_EVENT}"
            return [*item[:-1], with_timeline] if isinstance(item, list) else with_timeline
        if hasattr(item, "choices"):
            setattr(item, FIELD, self._record(timing))
        return item

    def comment(self, timing: RequestTiming) -> str:
        """The timeline as a comment of server-sent events."""
        return f"{COMMENT}{_json(self._record(timing))}{END}"

    def _record(self, timing: RequestTiming) -> dict[str, Any]:
        timing.sent = timing.record(replica_id(), guarded=self.marks_reads)
        return timing.sent

    def header(self, timing: RequestTiming) -> bytes:
        """The timeline as a header's value."""
        return header_value(self._record(timing))

    def begin_trace(self, timing: RequestTiming, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that the engines of a request are to get in place of the client's of these names (in lower case
        in ``headers``); empty: those are left as they are."""
        if self._traces is None:
            return {}
        timing.trace = self._traces.begin(timing.request_id, headers.get(TRACEPARENT), headers.get(TRACESTATE))
        return timing.trace.headers

    def over(self, timing: RequestTiming, *, answers: bool = True) -> None:
        """The request has been answered, or its client has gone. ``answers``: a client, and not another engine."""
        if self._book is None or timing.ended:
            return
        counts = answers and self._counts is not None and "first" in timing.marks and "first_byte" in timing.marks
        traced = timing.trace is not None and self._traces is not None and timing.trace.span is not None
        if counts or traced:
            record = timing.sent or self._record(timing)  # a client has it, and nothing of it changes any more
            if counts and self._counts is not None:
                self._counts.add(record, streamed=timing.streamed)
            if timing.trace is not None and self._traces is not None and traced:
                self._traces.end(timing.trace, record, timing.passed_ms)
        self._book.leave(timing)


class TimelineMiddleware:
    """ASGI middleware of an engine's own server, in front of all else: the timing begins and ends here."""

    def __init__(self, app: Any, server: SendsTimeline) -> None:
        self.app = app
        self.server = server

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(ROUTES):
            await self.app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope.get("headers", ())}
        request_id = headers.get(ID_HEADER.encode(), b"").decode("latin-1")
        timing = RequestTiming(wanted=requests_timeline(headers.get(HEADER.encode())), request_id=request_id)
        texts = {name: headers[name.encode()].decode("latin-1") for name in _TRACE if name.encode() in headers}
        if traced := self.server.begin_trace(timing, texts):
            kept = [pair for pair in scope["headers"] if pair[0].lower().decode("latin-1") not in _TRACE]
            scope = {**scope, "headers": [*kept, *((name.encode(), text.encode()) for name, text in traced.items())]}
        _context.set(timing)
        sending = _Sending(self.server, timing, send)
        try:
            await self.app({**scope, SENDING: sending}, receive, sending)
        finally:
            self.server.over(timing)
            _context.set(None)


class StreamsPast:
    """ASGI: a streamed answer whose middle pieces go to `TimelineMiddleware` at once, where there is one.

    The middlewares between do nothing with them, but each costs a coroutine for every token. They see the beginning and
    the end of the answer.
    """

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        sending: _Sending | None = scope.get(SENDING)
        if sending is None:
            await self._answer(scope, receive, send)
            return
        begun = False

        # No coroutines of their own: each would be one more for every token.
        def forward(message: Message) -> Awaitable[None]:
            return (sending.past or sending)(message) if begun and message.get("more_body") else ends(message)

        async def ends(message: Message) -> None:
            nonlocal begun
            await send(message)
            begun = message["type"] == "http.response.start" and message["status"] == 200

        await self._answer(scope, receive, forward)


class _Sending:
    """Sends what the application answers, and marks when; with the timeline if the client requested it. ``past``: where
    further pieces of a stream may go at once, because nothing of them is marked (None: nowhere yet)."""

    def __init__(self, server: SendsTimeline, timing: RequestTiming, send: Send) -> None:
        self._server = server
        self._timing = timing
        self._send = send
        self._streams = False
        self.past: Send | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        timing = self._timing
        if message["type"] == "http.response.start":
            self._streams = header_of(message, b"content-type").startswith(b"text/event-stream")
            if not self._streams and message["status"] == 200:
                timing.streamed = False
                timing.chunk()
                if timing.wanted:
                    header = (HEADER.encode(), self._server.header(timing))
                    message = {**message, "headers": [*message.get("headers", ()), header]}
        elif self._streams and (body := message.get("body")):
            if timing.chunk() > 1 and not timing.wanted:
                self.past = self._send
            if timing.wanted and body.endswith(_DONE_BYTES):
                ending = body.removesuffix(_DONE_BYTES) + self._server.comment(timing).encode() + _DONE_BYTES
                message = {**message, "body": ending}
        return self._send(message)


class TimelineHeader:
    """ASGI middleware of an ingress: the timeline in an answer that is not streamed becomes a header."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http" or not requests_timeline(header_of(scope, HEADER.encode())):
            await self.app(scope, receive, send)
            return
        await self.app(scope, receive, _WithHeader(send))


class _WithHeader:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = header_of(message, b"content-type")
            if message["status"] == 200 and kind.startswith(b"application/json"):
                self._held = [message]
                return
        if not self._held:
            await self._send(message)
            return
        self._held.append(message)
        if message.get("more_body"):
            return
        start, *parts = self._held
        self._held = []
        body = b"".join(part.get("body", b"") for part in parts)
        headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
        with contextlib.suppress(ValueError):
            answer = json.loads(body)
            timeline = answer.pop(FIELD, None) if isinstance(answer, dict) else None
            if timeline is not None:
                body = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
                headers.append((HEADER.encode(), header_value(timeline)))
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def header_value(timeline: dict[str, Any]) -> bytes:
    """A timeline as a header's value, in ASCII. The reads of a request of many sequences and ranks would be longer than
    clients and proxies take, and are left out."""
    value = _json(timeline).encode()
    if len(value) <= _HEADER_BYTES:
        return value
    return _json({**timeline, "wire": [], "err": timeline.get("err") or "too long a header"}).encode()


def packed(token_ids: Sequence[int]) -> bytes:
    """Four bytes an id, in the machine's order."""
    return array("I", token_ids).tobytes()


def unpacked(token_ids: bytes) -> list[int]:
    """What `packed` was given."""
    return array("I", token_ids).tolist()


def replica_id() -> str:
    """Of this replica; empty outside Ray Serve."""
    if "replica" not in _machine:
        _machine["replica"] = ""
        with contextlib.suppress(Exception):
            serve: Any = sys.modules["ray.serve"]  # a replica has imported it
            _machine["replica"] = serve.get_replica_context().replica_id.unique_id
    return _machine["replica"]


def _last_of(item: Any) -> Any:
    """The last piece of what a stream has yielded: Ray puts several into one list."""
    return item[-1] if isinstance(item, list) and item else item


def _without_trace(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name.lower() not in _TRACE}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
