"""The simulator's engine driven by a clock: requests arrive at any time, and tokens come when their steps are due.

Every event is handled with its due moment, also if the machine is late. So a delay of the machine delays answers but
does not add up in the engine. An event from outside with a moment before the engine's present moment is moved to the
present moment; `RealTime.late_s` sums these delays.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdlab.rehearsal.clock import Clock, Timer
from pdlab.sim.engine import Engine
from pdlab.sim.kv_transfer import Links
from pdlab.sim.stepping import ENTERS, KV_ARRIVED, Sender, Stepping
from pdlab.traffic.oracle import HitOracle
from pdlab.traffic.prompts import PromptBlocks

COMES, MIDDLE, RELEASED = "comes", "middle", "released"
LATEST_GAPS = 1000


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a request's KV: the engine that has it, the links from there, and a callback for its release."""

    links: Links
    sender: Sender
    release: Callable[[float], None]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request at a simulated engine.

    ``blocks``: a key per whole block of prompt and answer; equal beginnings have equal keys. ``on_tokens``: called with
    (moment, tokens so far) for the first, a middle and the last token, or for every token. ``moves_on``: another engine
    decodes the request; ``on_tokens`` is then called once, after the prefill. ``entered``: it has arrived at the
    engine. ``reported``: tokens of the last call.
    """

    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    on_tokens: Callable[[float, int], None]
    source: Source | None = None
    moves_on: bool = False
    engine: Engine | None = None
    entered: bool = False
    first_step: int = 0
    reported: int = 1

    def prompt(self, block_tokens: int) -> PromptBlocks:
        return PromptBlocks(self.input_tokens, tuple(self.blocks[: self.input_tokens // block_tokens]))

    def computed(self, block_tokens: int) -> PromptBlocks:
        """The prompt and the answer without its last token."""
        tokens = self.input_tokens + self.output_tokens - 1
        return PromptBlocks(tokens, tuple(self.blocks[: tokens // block_tokens]))


@dataclass(slots=True)
class LiveRequestLog:
    """A `pdlab.sim.stepping.RequestLog` that forgets ended requests."""

    input_tokens: dict[int, int] = field(default_factory=dict)
    output_tokens: dict[int, int] = field(default_factory=dict)
    queued_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    prefill_start_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    prefill_end_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    kv_arrived_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    first_token_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    finish_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    computed_tokens: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gap_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST_GAPS))
    gap_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST_GAPS))
    transferred_bytes: float = 0.0

    def forget(self, request: int) -> None:
        """Drop the entries of a request."""
        for name in self.__slots__:
            column = getattr(self, name)
            if isinstance(column, dict):
                column.pop(request, None)


@dataclass(slots=True)
class EngineTimes:
    """Times of one request on an engine, in simulated seconds (0: not on this engine), and cached prompt tokens."""

    queued_s: float
    prefill_start_s: float
    prefill_end_s: float
    kv_arrived_s: float
    first_token_s: float
    finish_s: float
    hit_tokens: float


class RealTime(Stepping):
    """The engines of one replica: one, or one per pipeline stage.

    ``make_cache``: makes an empty prefix cache. ``every_token``: report every token. ``changed``: called after an
    event. Not thread-safe.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        clock: Clock,
        make_cache: Callable[[], HitOracle],
        *,
        every_token: bool = False,
    ) -> None:
        self.engines = list(engines)
        self.clock = clock
        self._make_cache = make_cache
        self.forget_prompts()
        self.block_tokens = self._caches[self.engines[0]].block_tokens
        self.every_token = every_token
        self.log: LiveRequestLog = LiveRequestLog()
        self.late_s = 0.0
        self.changed: Callable[[], None] = lambda: None
        self._served: dict[int, SimulatedRequest] = {}
        self._released: dict[int, Engine] = {}
        self._events: list[tuple[float, int, object, Engine, int]] = []
        self._sequence = 0
        self._last_s = 0.0
        self._timer: Timer | None = None
        self._timer_s = 0.0

    def forget_prompts(self) -> None:
        """Empty the prefix caches."""
        self._caches = {engine: self._make_cache() for engine in self.engines}

    # --- in and out ---------------------------------------------------------------------------

    def submit(self, served: SimulatedRequest, moment_s: float) -> int:
        """Add a request that arrives at that moment. It first fetches KV from its source. Returns its number."""
        self.advance()
        self._sequence += 1
        number = self._sequence
        engine = min(self.engines, key=lambda each: each.load)
        engine.load += 1
        served.engine = engine
        self._served[number] = served
        self.log.input_tokens[number] = served.input_tokens
        self.log.output_tokens[number] = served.output_tokens
        self._at(moment_s, COMES if served.source else ENTERS, engine, number)
        self._arm()  # not handled now: the caller must have the number before a callback
        return number

    def release_prefilled(self, number: int, moment_s: float) -> None:
        """Free the KV of a request that was prefilled here: another engine has fetched it, or will not fetch it."""
        self.advance()
        engine = self._released.get(number)
        if engine is not None:
            self._at(moment_s, RELEASED, engine, number)
            self._arm()

    def abort(self, number: int) -> None:
        """Abort a request. One that waits is dropped, also between two parts of its prompt. A running one ends with the
        present step, or with the step that gives it its next token. KV that is on its way is freed when it is there.
        """
        self.advance()
        served = self._served.get(number)
        if served is None or served.engine is None:
            if number in self._released:  # its prefill was reported, and nobody will fetch it
                self._free(self._released[number], number, self._present_s)
                self._arm()
            return
        engine = served.engine
        served.on_tokens = _ignore
        if not served.entered:
            if served.source is not None:
                self.release(number, self._present_s)
            self._gone(engine, number)
        elif number in engine.inbound:
            engine.inbound.remove(number)
            self.release(number, self._present_s)
            self._gone(engine, number)
        elif (place := next((i for i, each in enumerate(engine.waiting) if each.request == number), None)) is not None:
            if len(engine.waiting) - place <= engine.unscheduled:
                engine.unscheduled -= 1
            engine.held_tokens -= engine.waiting[place].held
            del engine.waiting[place]
            self._gone(engine, number)
        elif (entry := next((each for each in engine.running if each[1] == number), None)) is not None:
            engine.running.remove(entry)
            heapq.heapify(engine.running)
            context = self.context(number, entry[0] - engine.step)
            engine.held_tokens -= context + engine.window_tokens
            engine.context -= context
            self._gone(engine, number)
        else:
            # It is in the present step, or its KV is on its way, or it joins the next step: its next token is its last.
            tokens = 2 if self.log.first_token_s.get(number) else 1  # the first may be prefill's
            for each in engine.prefilled:
                if each.request == number:  # with what was generated before a preemption
                    tokens = int(each.tokens) - served.input_tokens + 1
            served.output_tokens = self.log.output_tokens[number] = tokens
            return
        self.wake(engine, self._present_s)
        self._arm()

    def times(self, number: int) -> EngineTimes:
        """Times of a request whose end or prefill is being reported."""
        log = self.log
        served = log.input_tokens[number]
        computed = log.computed_tokens.get(number, 0.0)
        return EngineTimes(
            queued_s=log.queued_s[number],
            prefill_start_s=log.prefill_start_s[number],
            prefill_end_s=log.prefill_end_s[number],
            kv_arrived_s=log.kv_arrived_s[number],
            first_token_s=log.first_token_s[number],
            finish_s=log.finish_s[number],
            hit_tokens=max(0.0, served - computed) if computed else 0.0,
        )

    @property
    def _present_s(self) -> float:
        return max(self._last_s, self.clock.now_s())

    @property
    def unfinished(self) -> int:
        return len(self._served)

    # --- time ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Handle all due events in order, and set the timer for the next one."""
        now_s = self.clock.now_s()
        due = bool(self._events) and self._events[0][0] <= now_s
        while self._events and self._events[0][0] <= now_s:
            moment_s, _, kind, engine, number = heapq.heappop(self._events)
            self._last_s = moment_s
            self._happens(kind, engine, number, moment_s)
        self._arm()
        if due:
            self.changed()

    def _arm(self) -> None:
        if not self._events:
            return
        moment_s = self._events[0][0]
        if self._timer is not None:
            if self._timer_s <= moment_s:
                return
            self._timer.cancel()
        self._timer, self._timer_s = self.clock.call_at(moment_s, self._called), moment_s

    def _called(self) -> None:
        self._timer = None
        self.advance()

    def _at(self, moment_s: float, kind: object, engine: Engine, number: int) -> None:
        """Add an event from outside, at the earliest at the engine's present moment."""
        self.late_s += max(0.0, self._last_s - moment_s)
        self._push(max(moment_s, self._last_s), kind, engine, number)

    def push(self, moment_s: float, kind: int, engine: Engine, number: int) -> None:
        self._push(moment_s, kind, engine, number)

    def _push(self, moment_s: float, kind: object, engine: Engine, number: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (moment_s, self._sequence, kind, engine, number))

    def _happens(self, kind: object, engine: Engine, number: int, now_s: float) -> None:
        if isinstance(kind, int):
            if kind == ENTERS:
                if number not in self._served:
                    return
                self._served[number].entered = True
            elif kind == KV_ARRIVED and self._served[number].on_tokens is _ignore:
                self._unread(engine, number, now_s)
                return
            self.happens(kind, engine, number, now_s)
        elif kind == COMES:
            if number in self._served:
                self._served[number].entered = True
                self.log.queued_s[number] = now_s
                engine.inbound.append(number)
                self.fetch(engine, now_s)
        elif kind == MIDDLE:
            self._middle(engine, number, now_s)
        else:
            self._free(engine, number, now_s)

    # --- what steps do ------------------------------------------------------------------------

    def hit_tokens(self, engine: Engine, request: int, tokens: float) -> float:
        return float(self._caches[engine].hit(self._served[request].prompt(self.block_tokens)))

    def fetched_hit_tokens(self, engine: Engine, request: int, tokens: float) -> float:
        hit = self.hit_tokens(engine, request, tokens)
        self.log.computed_tokens[request] = tokens - hit
        self.keep(engine, request)
        return hit

    def keep(self, engine: Engine, request: int) -> None:
        self._caches[engine].compute(self._served[request].prompt(self.block_tokens))

    def moves_on(self, engine: Engine, request: int) -> bool:
        return self._served[request].moves_on

    def hand_over(self, engine: Engine, request: int, now_s: float) -> None:
        served = self._served.pop(request)
        engine.load -= 1
        self._released[request] = engine
        if served.on_tokens is _ignore:
            self._free(engine, request, now_s)
        else:
            served.on_tokens(now_s, 1)

    def first_token(self, engine: Engine, request: int, now_s: float) -> None:
        served = self._served[request]
        served.first_step = engine.step
        if served.output_tokens > 1:
            served.on_tokens(now_s, 1)
        if served.output_tokens > 2:
            batch = len(engine.running) + 1
            step_s = engine.costs.step_s(batch, 0, engine.context / batch)
            steps = 1 if self.every_token else (served.output_tokens - 1) / 2
            self._push(now_s + steps * step_s, MIDDLE, engine, request)

    def _middle(self, engine: Engine, request: int, now_s: float) -> None:
        """Report the tokens of the steps until now."""
        served = self._served.get(request)
        if served is None:
            return
        # Moments have an error of about 1e-10 s: a step that ends now counts as ended.
        done = min(engine.steps, int((now_s - engine.began_s) / engine.step_s + 1e-6)) if engine.busy else 0
        tokens = 1 + engine.step + done - served.first_step
        if served.reported < tokens < served.output_tokens:
            served.reported = tokens
            served.on_tokens(engine.began_s + done * engine.step_s if engine.busy else now_s, tokens)
        if self.every_token and engine.busy and tokens < served.output_tokens - 1:
            self._push(engine.began_s + (done + 1) * engine.step_s, MIDDLE, engine, request)

    def ended(self, engine: Engine, request: int, now_s: float) -> None:
        served = self._served.pop(request)
        engine.load -= 1
        self._caches[engine].answered(served.prompt(self.block_tokens), served.computed(self.block_tokens))
        served.on_tokens(now_s, served.output_tokens)
        self.log.forget(request)

    def way(self, request: int) -> tuple[Links, Sender]:
        source = self._served[request].source
        assert source is not None, "a request without a source fetches nothing"
        return source.links, source.sender

    def release(self, request: int, now_s: float) -> None:
        served = self._served[request]
        assert served.source is not None
        served.source.release(now_s)

    def beside(self, engine: Engine) -> Iterable[Engine]:
        return (each for each in self.engines if each is not engine)

    def _free(self, engine: Engine, request: int, now_s: float) -> None:
        if self._released.pop(request, None) is None:
            return
        engine.held_tokens -= engine.kv_tokens(self.log.input_tokens[request])
        self.log.forget(request)
        if engine.waiting and not engine.busy:
            self.wake(engine, now_s)

    def _unread(self, engine: Engine, request: int, now_s: float) -> None:
        """The KV of an aborted request has arrived."""
        engine.held_tokens -= engine.kv_tokens(self.log.input_tokens[request])
        self.release(request, now_s)
        self._gone(engine, request)
        self.wake(engine, now_s)

    def _gone(self, engine: Engine, request: int) -> None:
        del self._served[request]
        engine.load -= 1
        self.log.forget(request)
        if engine.inbound:
            self.fetch(engine, self._last_s)


def _ignore(moment_s: float, tokens: int) -> None:
    """The ``on_tokens`` of an aborted request."""
