"""The load during faults: a closed loop of greedy requests, each compared with its reference. Not a benchmark.

The load generator of the sweeps (`pdlab.bench.client`) cannot drive it. vLLM's benchmark keeps the times and the text
of an answer, but not its token ids and log-probabilities, which show whether the answer is right. It also cannot send
a given list of token ids with its own cache salt, close one connection during an answer, or add requests at a moment
that a fault chooses.

The load runs in its own thread, because the code that makes faults waits for Ray. Every request has its own cache
salt, so that no prefix cache replaces the KV transfer. Every second request has no log-probabilities, because with
them decode takes no first token from prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pdlab.core.errors import BenchError
from pdlab.deploy import canary
from pdlab.deploy.canary import CanaryAnswer
from pdlab.deploy.http_client import NoAnswer, async_client, streamed_async
from pdlab.faults.answer_verdict import ReceivedAnswer, judge
from pdlab.results.chaos import ChaosRequest

BACK_OFF_S = 0.2  # pause after an error, so that the loop does not send thousands of requests to a dead server
LEAVING_CHUNKS = 2
LEAVING_TIMES = 8  # an answer whose client leaves is this many times longer, so that it still streams at the leave
JOIN_S = 30.0


class Prompt(NamedTuple):
    """Token ids, and the reference: the answer of one engine without KV transfer."""

    ids: tuple[int, ...]
    reference: CanaryAnswer


class LoadTarget(NamedTuple):
    """The endpoint and parameters of the requests. ``key``: the endpoint's API key."""

    base_url: str
    model_id: str
    max_tokens: int
    limit_s: float
    key: str | None = None
    rounding: float = canary.ROUNDING


def token_prompts(count: int, lengths: Sequence[int], seed: int, most_tokens: int | None = None) -> list[list[int]]:
    """Seeded prompts with token ids of every vocabulary. ``lengths`` in tokens, in turn, at most ``most_tokens``."""
    rng = random.Random(f"chaos prompts {seed}")
    most = most_tokens if most_tokens is not None else max(lengths)
    return [[rng.randrange(10, 1000) for _ in range(min(most, lengths[i % len(lengths)]))] for i in range(count)]


def request_of(
    service: LoadTarget, ids: Sequence[int], salt: str | None, *, stream: bool = True, bare: bool = False
) -> dict[str, Any]:
    """The body of one completion request. ``bare``: without log-probabilities."""
    body = canary.greedy(service.model_id, service.max_tokens) | {"prompt": list(ids)}
    if bare:
        del body["logprobs"], body["return_tokens_as_token_ids"]
    return body | ({"stream": True} if stream else {}) | ({"cache_salt": salt} if salt else {})


class Load:
    """A closed loop. ``keep`` gets every finished request, in the thread of the loop."""

    def __init__(
        self, service: LoadTarget, prompts: Sequence[Prompt], concurrency: int, seed: int,
        keep: Callable[[ChaosRequest], None],
    ) -> None:  # fmt: skip
        self.service = service
        self.prompts = list(prompts)
        self.concurrency = concurrency
        self.finished: list[ChaosRequest] = []
        self._keep = keep
        self._rng = random.Random(f"chaos load {seed}")
        self._salt = f"{seed}-{time.time_ns()}"
        self._numbers = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="chaos-load", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._leave: asyncio.Event | None = None
        self._streaming = self._leaving = self._left = 0
        self._failure: BaseException | None = None
        self.began = 0.0

    def start(self) -> None:
        """Start the load. Raises BenchError if it fails."""
        self._thread.start()
        self._ready.wait(JOIN_S)
        self.check()

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self.began

    def check(self) -> None:
        """Raises BenchError when the loop itself has failed."""
        if self._failure is not None:
            raise BenchError(f"the load ended with an error: {self._failure!r}") from self._failure

    def send_more(self, count: int) -> None:
        """Send ``count`` ordinary requests at once, in addition to those of the loop."""

        def begin() -> None:
            for _ in range(count):
                self._spawn(self._one(None, None, 0.0))

        self._call(begin)

    def send_leaving(self, count: int, phase: str) -> None:
        """Send ``count`` requests whose client closes the connection at `leave`."""

        leave = self._leave = asyncio.Event()
        self._streaming, self._leaving, self._left = 0, count, 0

        def begin() -> None:
            for _ in range(count):
                self._spawn(self._one(leave, phase, 0.0))

        self._call(begin)

    @property
    def streaming(self) -> int:
        """Number of requests of `send_leaving` that have begun to stream."""
        return self._streaming

    @property
    def leaving(self) -> int:
        """Number of requests of `send_leaving` that have not ended."""
        return self._leaving

    @property
    def left(self) -> int:
        """Number of requests of `send_leaving` that were in flight when their client left."""
        return self._left

    def leave(self) -> None:
        """Close the connections of `send_leaving`."""
        self._call(lambda: self._leave.set() if self._leave is not None else None)

    def stop(self) -> None:
        """Send nothing more, and wait until the requests in flight end or reach the limit. Raises BenchError."""
        self._stopping = True
        self._thread.join(self.service.limit_s + JOIN_S)
        if self._thread.is_alive():
            raise BenchError("the load does not end: a request takes longer than its limit")
        self.check()

    def _call(self, act: Callable[[], Any]) -> None:
        self.check()
        self._loop.call_soon_threadsafe(act)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _main(self) -> None:
        async with async_client() as self._client:
            self.began = time.monotonic()
            for _ in range(self.concurrency):
                self._spawn(self._worker())
            self._ready.set()
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done
                for task in done:
                    task.result()

    def _spawn(self, work: Any) -> None:
        self._tasks.add(self._loop.create_task(work))

    async def _worker(self) -> None:
        while not self._stopping:
            await self._one(None, None, BACK_OFF_S)

    async def _one(self, leave: asyncio.Event | None, phase: str | None, back_off_s: float) -> None:
        number = self._numbers
        self._numbers += 1
        place = self._rng.randrange(len(self.prompts))
        prompt = self.prompts[place]
        sent_s = self.now_s()
        reading = _RequestReader(leave, lambda: self._count_streaming(leave))
        bare = number % 2 == 1
        body = request_of(self.service, prompt.ids, f"{self._salt}-{number}", bare=bare)
        if phase is not None:
            body["max_tokens"] *= LEAVING_TIMES
        received = (await reading.send(self._client, self.service, body))._replace(bare=bare)
        if leave is not None and leave is self._leave:
            self._leaving -= 1
            self._left += received.left
        if phase is not None:  # compare only up to the length of the reference
            known = len(prompt.reference.tokens)
            received = received._replace(tokens=received.tokens[:known], tops=received.tops[:known])
        verdict = judge(received, prompt.reference, self.service.rounding)
        first_s = None if reading.first is None else reading.first - self.began
        request = ChaosRequest(
            number=number, prompt=place, sent_s=round(sent_s, 4), end_s=round(self.now_s(), 4),
            first_token_s=None if first_s is None else round(first_s, 4), status=received.status,
            tokens=len(received.tokens), outcome=verdict.outcome, detail=verdict.detail, rounded=verdict.rounded,
            phase=phase,
        )  # fmt: skip
        self.finished.append(request)
        self._keep(request)
        if verdict.outcome not in ("right", "left"):
            await asyncio.sleep(back_off_s)

    def _count_streaming(self, leave: asyncio.Event | None) -> None:
        self._streaming += leave is not None and leave is self._leave


class _RequestReader:
    """Sends one request and reads its answer."""

    def __init__(self, leave: asyncio.Event | None, streams: Callable[[], None]) -> None:
        self.first: float | None = None
        self._leave = leave
        self._streams = streams
        self._chunks = 0
        self._status: int | None = None
        self._tokens: list[int] = []
        self._tops: list[dict[int, float]] = []
        self._done = False
        self._error: str | None = None

    async def send(self, client: Any, service: LoadTarget, body: dict[str, Any]) -> ReceivedAnswer:
        """Send the request and read until the answer ends, the limit is reached, or the client must leave."""
        work = asyncio.ensure_future(self._read(client, service, body))
        waits = {work} if self._leave is None else {work, asyncio.ensure_future(self._leave.wait())}
        await asyncio.wait(waits, timeout=service.limit_s, return_when=asyncio.FIRST_COMPLETED)
        ended = work.done()
        for each in waits:
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await each
        left = not ended and self._leave is not None and self._leave.is_set()
        return ReceivedAnswer(
            status=self._status, tokens=tuple(self._tokens), tops=tuple(self._tops), done=self._done,
            timed_out=not ended and not left, left=left, error=self._error,
        )  # fmt: skip

    async def _read(self, client: Any, service: LoadTarget, body: dict[str, Any]) -> None:
        try:
            async with streamed_async(client, service.base_url, body, service.key) as events:
                self._status = 200
                async for event in events:
                    self._event(event)
        except NoAnswer as error:
            self._status = self._status or error.code
            self._error = str(error) if error.code else error.detail

    def _event(self, event: Any) -> None:
        if event is None:
            self._done = True
            return
        try:
            if "error" in event or event.get("object") == "error":
                self._error = f"in the stream: {event.get('error') or event.get('message')}"
            for choice in event.get("choices") or ():
                self._choice(choice)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._error = f"not an event of a completion ({error}): {str(event)[:100]}"

    def _choice(self, choice: dict[str, Any]) -> None:
        ids = [int(token) for token in choice.get("token_ids") or ()]
        if ids and self.first is None:
            self.first = time.monotonic()
        self._tokens += ids
        self._tops += [canary.tops_by_id(top) for top in (choice.get("logprobs") or {}).get("top_logprobs") or ()]
        if choice.get("finish_reason") in ("error", "abort"):
            self._error = f"ended by {choice['finish_reason']}"
        if ids:
            self._chunks += 1
            if self._chunks == LEAVING_CHUNKS:
                self._streams()
