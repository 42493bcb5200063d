"""The effect of engine steps on requests, for any source of time.

`pdlab.sim.simulator` handles events one after the other, `pdlab.rehearsal` by a clock. Both are `Stepping`. Requests
come to and leave the engines in different ways. Times are in seconds.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Protocol

from pdlab.sim.engine import Engine, EngineSurroundings, PendingPrefill
from pdlab.sim.kv_transfer import LinkEnd, Links

STEP_ENDS, KV_ARRIVED, ENTERS, ARRIVES, LOADED = range(5)


class RequestLog(Protocol):
    """The stored times of every request, by its number: lists, or dictionaries if requests come and go. A time is 0
    until it is known. ``gap_s`` and ``gap_tokens`` have the seconds and tokens of every step with decoding
    sequences."""

    input_tokens: Any  # a list or a dictionary: no type of both can be assigned to
    output_tokens: Any
    queued_s: Any
    prefill_start_s: Any
    prefill_end_s: Any
    kv_arrived_s: Any
    first_token_s: Any
    finish_s: Any
    computed_tokens: Any
    gap_s: Any
    gap_tokens: Any
    transferred_bytes: float


class Sender(LinkEnd, Protocol):
    """The engine that has a request's KV: its side of the link, and whether its pool has wrapped."""

    capacity: float
    allocated: float


class Stepping(EngineSurroundings):
    """The state of engines between events. ``scattered``: free blocks are scattered; None: from the time when a pool
    was full. ``keeps_gaps``: the log gets the time between tokens."""

    __slots__ = ()

    log: RequestLog
    block_tokens: int
    scattered: bool | None = None
    keeps_gaps = True

    # --- arrival and end of a request ---------------------------------------------------------

    def push(self, moment_s: float, kind: int, engine: Engine, number: int) -> None:
        """Schedule the event for that time. ``number``: the number of the request, or the version of the step."""
        raise NotImplementedError

    def hit_tokens(self, engine: Engine, request: int, tokens: float) -> float:
        """The tokens of a request's prompt that the engine's cache holds. ``tokens``: those of the whole context."""
        raise NotImplementedError

    def fetched_hit_tokens(self, engine: Engine, request: int, tokens: float) -> float:
        """`hit_tokens`. The other tokens come from another engine, and are held from now on."""
        raise NotImplementedError

    def keep(self, engine: Engine, request: int) -> None:
        """The prompt was computed: the engine's cache has it from now on."""
        raise NotImplementedError

    def moves_on(self, engine: Engine, request: int) -> bool:
        """Whether another engine decodes what this one has prefilled."""
        return engine.prefills_only

    def hand_over(self, engine: Engine, request: int, now_s: float) -> None:
        """A prompt that another engine will decode is prefilled."""
        raise NotImplementedError

    def first_token(self, engine: Engine, request: int, now_s: float) -> None:
        """The first token of the request was made."""

    def ended(self, engine: Engine, request: int, now_s: float) -> None:
        """The last token of the request was made."""
        raise NotImplementedError

    def way(self, request: int) -> tuple[Links, Sender]:
        """The links of a request's KV, and the engine that has it."""
        raise NotImplementedError

    def release(self, request: int, now_s: float) -> None:
        """The request's KV has arrived: the engine that prefilled it may free its own."""
        raise NotImplementedError

    def loaded(self, engine: Engine, request: int, now_s: float) -> None:
        """Blocks of the prompt have arrived from host memory: the request continues."""
        raise NotImplementedError

    # --- events -------------------------------------------------------------------------------

    def happens(self, kind: int, engine: Engine, number: int, now_s: float) -> None:
        """Handle an event of an engine."""
        if kind == ENTERS:
            self.log.queued_s[number] = now_s
            engine.waiting.append(PendingPrefill(number, self.log.input_tokens[number]))
            engine.unscheduled += 1
        elif kind == KV_ARRIVED:  # decode can start on the request as soon as its scheduler knows
            self.log.kv_arrived_s[number] = now_s
            self.release(number, now_s)
            engine.arrived.append(number)
            engine.coming += 1
        elif kind == STEP_ENDS:
            ends_s = self.step_ends(engine, number, now_s)
            if ends_s is not None:
                self.push(ends_s, STEP_ENDS, engine, engine.version)
            return
        else:
            self.loaded(engine, number, now_s)
            return
        if engine.steps > 1 or not engine.busy:  # else the engine sees it when its step ends
            self.wake(engine, now_s)

    def wake(self, engine: Engine, now_s: float) -> None:
        """A request has arrived: an idle engine begins a step, an engine in a run of equal steps ends the run."""
        if engine.busy:
            if engine.steps <= 1:
                return
            ends_s = engine.interrupt(now_s)
        else:
            ends_s = engine.plan(now_s, self)
            if ends_s is not None and self.contention:
                self._change_paces(engine, now_s)
        if ends_s is not None:
            self.push(ends_s, STEP_ENDS, engine, engine.version)

    def _change_paces(self, engine: Engine, now_s: float) -> None:
        """The engine has become busy, or idle: those that share its cores go on slower, or faster."""
        for other in self.beside(engine):
            if other.busy:
                self.push(other.change_pace(now_s, self.pace(other)), STEP_ENDS, other, other.version)

    def fetch(self, decoder: Engine, now_s: float) -> None:
        """Start the transfers for which the decode engine has room, in order. If its workers post transfers with a
        step, they start at the launch of the next step."""
        if decoder.steps_in_flight and decoder.busy:
            self.wake(decoder, now_s)
        else:
            self._post(decoder, now_s)

    def _post(self, decoder: Engine, now_s: float) -> None:
        if decoder.waiting and (decoder.waiting[0].preempted or decoder.waiting[0].held):
            return  # vLLM first schedules what it preempted; a part of a prompt takes the whole step
        batch, block = len(decoder.running), decoder.block_tokens
        if batch >= decoder.most_sequences:
            return
        while decoder.inbound:
            request = decoder.inbound[0]
            tokens = self.log.input_tokens[request]
            held = tokens + -tokens % block + decoder.window_tokens
            ample = decoder.held_tokens + decoder.late + held + block * batch <= decoder.usable
            if not (ample or decoder.has_room(held, self)) and decoder.held_tokens > 0:
                return
            decoder.inbound.popleft()
            decoder.held_tokens += held
            moved = tokens - self.fetched_hit_tokens(decoder, request, tokens)
            arrives_s, stall_s = self.carry(decoder, request, moved, now_s)
            if stall_s and batch:
                decoder.stall_s += stall_s
                self.wake(decoder, now_s)
            self.push(arrives_s, KV_ARRIVED, decoder, request)

    def carry(self, decoder: Engine, request: int, tokens: float, now_s: float) -> tuple[float, float]:
        """Send that many tokens of the request's KV. Returns the time of their arrival, and the seconds for which
        posting them stops the decode engine."""
        decoder.allocated += tokens
        links, sender = self.way(request)
        costs = links.costs
        size = tokens * costs.bytes_per_token
        self.log.transferred_bytes += size
        arrives_s = links.carry(sender, decoder, size, now_s)
        if not tokens:
            return arrives_s, 0.0
        fragmented = costs.always_fragmented or self.scattered
        if fragmented is None:
            fragmented = decoder.allocated > decoder.capacity or sender.allocated > sender.capacity
        stall_s = (costs.stall_s_per_token if fragmented else costs.post_s_per_token) * tokens
        return arrives_s + stall_s, stall_s

    def step_ends(self, engine: Engine, version: int, now_s: float) -> float | None:
        """A step of the engine has ended, unless another one has replaced it. Returns the end of the next step, which
        the caller must schedule; None: no step begins."""
        if engine.version != version:
            return None
        log, running, joined = self.log, engine.running, engine.joined
        steps, step_s, late_s = engine.steps, engine.step_s, engine.late_s
        duration_s = steps * step_s + late_s
        engine.busy_s += duration_s
        if engine.starved:
            engine.full_s += duration_s
        engine.step = step = engine.step + steps
        if running:
            batch = len(running)
            generated_tokens = steps * batch
            if not self.keeps_gaps:
                pass
            elif late_s:
                log.gap_s.append(step_s + late_s)
                log.gap_tokens.append(batch)
                if steps > 1:
                    log.gap_s.append(step_s)
                    log.gap_tokens.append(generated_tokens - batch)
            else:
                log.gap_s.append(step_s)
                log.gap_tokens.append(generated_tokens)
            engine.generated += generated_tokens
            engine.held_tokens += generated_tokens
            engine.context += generated_tokens
            while running and running[0][0] <= step:
                self._request_ends(engine, heappop(running)[1], now_s)
        if engine.prefilled:
            self._prefilled(engine, now_s)
        if joined:
            engine.joined = []
            for request in joined:
                first_s, context = log.first_token_s[request], log.input_tokens[request]
                if first_s:  # it came from prefill
                    context += 1
                    if self.keeps_gaps:
                        log.gap_s.append(now_s - first_s)
                        log.gap_tokens.append(1)
                self._first_token(engine, request, context, now_s)
        if engine.inbound and engine.steps_in_flight:
            engine.steps = 1  # the steps have ended: none is left to interrupt
            self._post(engine, now_s)
        ends_s = engine.plan(now_s, self)
        if ends_s is None and self.contention:
            self._change_paces(engine, now_s)
        return ends_s

    def _prefilled(self, engine: Engine, now_s: float) -> None:
        finished, engine.prefilled = engine.prefilled, []
        ends_s = self.log.prefill_end_s
        for waiting in finished:
            request = waiting.request
            if not ends_s[request]:  # else it was preempted, and is recomputed
                ends_s[request] = now_s
            self.keep(engine, request)
            if self.moves_on(engine, request):
                self.hand_over(engine, request, now_s)
            else:
                self._first_token(engine, request, waiting.tokens, now_s)

    def _first_token(self, engine: Engine, request: int, context: float, now_s: float) -> None:
        """The step that ended now gave the request a token. The other tokens follow, one per step."""
        log = self.log
        generated, answer = int(context) - log.input_tokens[request] + 1, log.output_tokens[request]
        if not log.first_token_s[request]:
            log.first_token_s[request] = now_s
            self.first_token(engine, request, now_s)
        engine.generated += 1
        engine.held_tokens += 1 - -context % engine.block_tokens
        engine.context += context + 1
        if generated >= answer:
            self._request_ends(engine, request, now_s)
            return
        heappush(engine.running, (engine.step + answer - generated, request, engine.generated))

    def takes_first(self, engine: Engine, request: int, now_s: float) -> None:
        if self.log.output_tokens[request] < 2:
            return  # the only token comes from decode
        tokens = self.log.input_tokens[request]
        self.log.first_token_s[request] = now_s
        self.first_token(engine, request, now_s)
        engine.generated += 1
        engine.held_tokens += engine.kv_tokens(tokens + 1) - engine.kv_tokens(tokens)

    def _request_ends(self, engine: Engine, request: int, now_s: float) -> None:
        log = self.log
        answer = log.output_tokens[request]
        context = log.input_tokens[request] + answer
        log.finish_s[request] = now_s
        engine.context -= context
        held = context + engine.window_tokens
        engine.held_tokens -= held
        if engine.steps_in_flight > 1:
            engine.late += held
        engine.allocated += answer
        if engine.inbound:
            self.fetch(engine, now_s)
        self.ended(engine, request, now_s)

    # --- the surroundings of an engine --------------------------------------------------------

    def to_compute(self, engine: Engine, waiting: PendingPrefill) -> float:
        request, tokens = waiting.request, waiting.tokens
        hit = self.hit_tokens(engine, request, tokens)
        if waiting.preempted:
            hit = max(hit, waiting.preempted.kept(engine))
        # Whole blocks are found, and the last token is always computed, for its logits.
        uncached = float(tokens - (min(hit, tokens - 1) // self.block_tokens) * self.block_tokens if hit else tokens)
        self.log.computed_tokens[request] += uncached
        engine.allocated += uncached
        return uncached

    def joining_tokens(self, requests: list[int]) -> float:
        tokens = self.log.input_tokens
        return float(tokens[requests[0]] if len(requests) == 1 else sum([tokens[request] for request in requests]))

    def prefill_begins(self, request: int, now_s: float) -> None:
        if not self.log.prefill_start_s[request]:
            self.log.prefill_start_s[request] = now_s

    def context(self, request: int, steps_left: int) -> float:
        log = self.log
        return float(log.input_tokens[request] + log.output_tokens[request] - steps_left)

    def stopped(self, engine: Engine, waiting: PendingPrefill) -> None:
        assert waiting.tokens_left is not None
        self.log.computed_tokens[waiting.request] -= waiting.tokens_left
        engine.allocated -= waiting.tokens_left
