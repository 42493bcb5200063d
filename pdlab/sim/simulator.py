"""Discrete-event simulation of a served deployment: Deployment + Workload + levels -> Runs, origin simulated.

What is simulated, and as what:

- **Arrivals**: closed loop (the next prompt when one ends), open loop (gamma gaps), or a trace.
- **Ingress**: a latency, a part of it per prompt token, and one request at a time through a replica's front end;
  all of it grows with the share of its time that a front end streams tokens, as 1 / (1 - share).
- **Routing** as Ray Serve does (`pdlab.sim.router`): of two replicas drawn at random the one with fewer requests by
  what one of several routers remembers. Decode is chosen when prefill has answered.
- **Engines**: vLLM's scheduler (`pdlab.sim.engine`) with the step times of `pdlab.sim.step_time`.
- **KV transfer**: first come, first served into a decode engine, and through a shared link where the
  link is the node's; a stall of the decode engine where blocks do not merge, which begins when a pool has wrapped
  (``scattered`` None), or is so from the start, or never.
- **Prompts**: ``fresh`` ones, or ``repeated``: each level of the sweep draws from one list, from its start, so
  that a level of n prompts repeats those of the levels before it; caches live through the whole sweep.

Same seed, same bytes. `simulate` returns the levels with every request; `to_run` gives the `Run`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Literal

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.workload import Closed, Level, Workload
from pdlab.sim.engine import Engine, EngineSurroundings, PrefixCache, Waiting
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import LinkKind, Links, link_of, transfer_costs
from pdlab.sim.level import SimulatedLevel, Trace, empty_level, open_arrivals
from pdlab.sim.router import Router
from pdlab.sim.step_time import kv_capacity_tokens, step_costs

__all__ = ["Prompts", "SimulatedLevel", "Trace", "simulate"]

Prompts = Literal["fresh", "repeated"]

ARRIVES, ENTERS, STEP_ENDS, KV_ARRIVED = range(4)
MOST_STREAMING = 0.9  # share of its time that a front end spends on streaming, at most


def simulate(
    deployment: Deployment,
    levels: Sequence[Level],
    workload: Workload,
    hardware: Hardware,
    shape: ModelShape,
    *,
    seed: int = 0,
    prompts: Prompts = "fresh",
    prefix_hit_rate: float = 0.0,
    link: LinkKind | None = None,
    trace: Trace | None = None,
    scattered: bool | None = None,
) -> list[SimulatedLevel]:
    """Run the levels one after another on one deployment, caches kept between them.

    ``prefix_hit_rate`` is the share of each prompt that every engine's cache answers (for fresh
    prompts with a common prefix). ``link`` None: the link of the deployment's placement. A ``trace``
    replaces lengths and arrivals of each level. ``scattered``: whether free blocks lie apart, as in pools that
    have served more tokens than they hold; None: from when they have. Raises UsageError when the model or one
    request does not fit an engine.
    """
    if not 0 <= prefix_hit_rate < 1:
        raise UsageError(f"prefix hit rate {prefix_hit_rate} must be from 0 to below 1")
    system = _System(deployment, hardware, shape, seed, prompts, prefix_hit_rate, link or link_of(deployment))
    system.scattered = scattered
    return [system.run(level, workload, trace) for level in levels]


class _System(EngineSurroundings):
    """The deployment between events."""

    def __init__(
        self,
        deployment: Deployment,
        hardware: Hardware,
        shape: ModelShape,
        seed: int,
        prompts: Prompts,
        prefix_hit_rate: float,
        link: LinkKind,
    ) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.hardware, self.shape = hardware, shape
        self.repeated, self.hit_rate = prompts == "repeated", prefix_hit_rate
        topology = deployment.topology
        pools = deployment.pools
        self.engines = {role: self._engines(pool, role) for role, pool in pools.items()}
        self.all_engines = [engine for engines in self.engines.values() for engine in engines]
        self.links = None
        if isinstance(topology, Disaggregated):
            self.links = Links(transfer_costs(hardware, shape, topology, link))
        self.decode = self.engines.get("decode") or self.engines["collocated"]
        self.front = self.engines.get("prefill") or self.decode
        value = hardware.value
        self.overhead_s = value("pd_overhead_ms" if self.links else "overhead_ms") * 1e-3
        self.frontend_s = value("frontend_ms") * 1e-3
        self.contention = value("contention")
        self.token_s = value("ingress_us") * 1e-6
        self.stream_s = value("stream_us") * 1e-6
        self.router = Router(self.random, max(round(value("routers")), 1), value("router_memory_s"))
        self.gap_s = value("client_gap_ms") * 1e-3
        self.outputs_kept = 0
        self.scattered: bool | None = None

    def _engines(self, pool: Pool, role: str) -> list[Engine]:
        costs = step_costs(self.hardware, self.shape, pool)
        # Pipeline stages work on as many batches as there are stages, each at the whole latency.
        count = pool.replicas * pool.dp * pool.pp
        capacity = kv_capacity_tokens(self.hardware, self.shape, pool) / pool.pp
        return [
            Engine(
                costs,
                capacity,
                self.hardware.step_tokens,
                PrefixCache(capacity),
                prefills_only=role == "prefill",
            )
            for _ in range(count)
        ]

    # --- one level ----------------------------------------------------------------------------

    def run(self, level: Level, workload: Workload, trace: Trace | None) -> SimulatedLevel:
        """Every request of the level, from an idle system to an idle system."""
        self._begin(level, workload, trace)
        events, log = self.events, self.log
        while events:
            now_s, _, kind, subject, number = heapq.heappop(events)
            if kind == STEP_ENDS:
                if subject.version == number:
                    self._step_ends(subject, now_s)
            elif kind == ENTERS:
                log.queued_s[number] = now_s
                subject.waiting.append(Waiting(number, log.input_tokens[number]))
                self._wake(subject, now_s)
            elif kind == ARRIVES:
                self._arrives(number, now_s)
            else:
                self._kv_arrived(subject, number, now_s)
        return self._finish()

    def _begin(self, level: Level, workload: Workload, trace: Trace | None) -> None:
        self.log = empty_level(level, workload, trace)
        count = len(self.log.input_tokens)
        self._check_fit()
        self.count = count
        self.prompt = self._prompt_numbers(count)
        self.events: list[tuple[float, int, int, Engine, int]] = []
        self.sequence = 0
        self.target: dict[int, tuple[Engine, Engine]] = {}
        if self.links:
            self.links.free_s = 0.0
        for engine in self.all_engines:
            engine.frontend_free_s = engine.link_free_s = engine.link_busy_s = engine.busy_s = engine.full_s = 0.0
            engine.preemptions = 0
            engine.reported_loads.clear()
        self.closed = isinstance(level.load, Closed) and not trace
        self.next = count
        if trace:
            arrivals = list(trace.arrival_s)
        elif isinstance(level.load, Closed):
            self.next = min(level.load.concurrency, count)
            arrivals = [index * self.gap_s for index in range(self.next)]
        else:
            arrivals = open_arrivals(level.load, count, self.random)
        # Of an open loop one at a time: thousands of events to come would make each one cost more.
        self.arrivals = [] if self.closed else arrivals
        for index, moment_s in enumerate(arrivals if self.closed else arrivals[:1]):
            self._push(moment_s, ARRIVES, self.front[0], index)

    def _check_fit(self) -> None:
        longest = max(map(sum, zip(self.log.input_tokens, self.log.output_tokens, strict=True)), default=0)
        smallest = min(engine.capacity for engine in self.all_engines)
        if longest > smallest:
            raise UsageError(
                f"one request of {longest} tokens does not fit the {smallest:.0f} tokens of KV cache of an engine; "
                "use a larger TP, or shorter requests"
            )

    def _prompt_numbers(self, count: int) -> list[int]:
        if not self.repeated:
            self.outputs_kept += count
            return list(range(self.outputs_kept - count, self.outputs_kept))
        # Hits and misses come mixed: in the calibration data neither the median nor the tail of TTFT
        # is what all repeated prompts first and all new ones last would give (docs/model.md).
        numbers = list(range(count))
        random.Random(f"{self.seed} {count}").shuffle(numbers)
        return numbers

    def _finish(self) -> SimulatedLevel:
        log = self.log
        log.duration_s = max(log.finish_s, default=0.0)
        if log.duration_s > 0:
            for role, engines in self.engines.items():
                log.busy[role] = sum(engine.busy_s for engine in engines) / len(engines) / log.duration_s
            ends = [engine.link_busy_s for engine in self.all_engines]
            log.link_busy = self.links.busy_s(ends) / log.duration_s if self.links else 0.0
            log.kv_full = sum(engine.full_s for engine in self.all_engines) / len(self.all_engines) / log.duration_s
        log.preemptions = sum(engine.preemptions for engine in self.all_engines)
        return log

    # --- events -------------------------------------------------------------------------------

    def _push(self, moment_s: float, kind: int, engine: Engine, number: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (moment_s, self.sequence, kind, engine, number))

    def _arrives(self, request: int, now_s: float) -> None:
        self.log.arrival_s[request] = now_s
        if request + 1 < len(self.arrivals):
            self._push(self.arrivals[request + 1], ARRIVES, self.front[0], request + 1)
        engine = self.router.choose(self.front, now_s)
        self.target[request] = (engine, engine)
        # The processes that take requests in also stream every token out: what they do takes longer then.
        # The decode replica is not chosen yet: one of them stands for how busy they are.
        decoder = self.decode[self.sequence % len(self.decode)] if self.links else engine
        streaming = len(decoder.running) / decoder.step_s * self.stream_s if decoder.busy else 0.0
        slower = 1 / (1 - min(streaming, MOST_STREAMING))
        engine.frontend_free_s = max(engine.frontend_free_s, now_s) + self.frontend_s * slower
        ingress_s = (self.overhead_s + self.token_s * self.log.input_tokens[request]) * slower
        self._push(engine.frontend_free_s + ingress_s, ENTERS, engine, request)

    def _wake(self, engine: Engine, now_s: float) -> None:
        ends_s = engine.interrupt(now_s) if engine.busy else engine.plan(now_s, self)
        if ends_s is not None:
            self._push(ends_s, STEP_ENDS, engine, engine.version)

    def _step_ends(self, engine: Engine, now_s: float) -> None:
        log, running = self.log, engine.running
        duration_s = engine.steps * engine.step_s
        engine.busy_s += duration_s
        if engine.starved:
            engine.full_s += duration_s
        engine.step += engine.steps
        generated_tokens = engine.steps * len(running)
        if generated_tokens:
            log.gaps.append((engine.step_s, generated_tokens))
        engine.held_tokens += generated_tokens
        engine.context += generated_tokens
        while running and running[0][0] <= engine.step:
            self._request_ends(engine, heapq.heappop(running)[1], now_s)
        if engine.prefilled:
            self._prefilled(engine, now_s)
        if engine.joined:
            joined, engine.joined = engine.joined, []
            for request in joined:
                self._first_token(engine, request, log.input_tokens[request], now_s)
        ends_s = engine.plan(now_s, self)
        if ends_s is not None:
            self._push(ends_s, STEP_ENDS, engine, engine.version)

    def _prefilled(self, engine: Engine, now_s: float) -> None:
        finished, engine.prefilled = engine.prefilled, []
        for waiting in finished:
            request = waiting.request
            if not self.log.prefill_end_s[request]:  # else it was preempted, and is recomputed
                self.log.prefill_end_s[request] = now_s
            engine.cache.keep(self.prompt[request], self.log.input_tokens[request])
            if engine.prefills_only:
                self._move(engine, request, now_s)
            else:
                self._first_token(engine, request, waiting.tokens, now_s)

    def _first_token(self, engine: Engine, request: int, context: float, now_s: float) -> None:
        """The step that ended now gave the request a token; the rest follow one per step."""
        log = self.log
        generated = int(context) - log.input_tokens[request] + 1
        if not log.first_token_s[request]:
            log.first_token_s[request] = now_s
        engine.held_tokens += 1
        if generated >= log.output_tokens[request]:
            engine.context += context + 1
            self._request_ends(engine, request, now_s)
            return
        engine.context += context + 1
        heapq.heappush(engine.running, (engine.step + log.output_tokens[request] - generated, request))

    def _request_ends(self, engine: Engine, request: int, now_s: float) -> None:
        log = self.log
        log.finish_s[request] = now_s
        context = log.input_tokens[request] + log.output_tokens[request]
        engine.held_tokens -= context
        engine.context -= context
        self.router.leaves(engine)
        engine.allocated += log.output_tokens[request]
        if engine.inbound:
            self._fetch(engine, now_s)
        if self.repeated:
            self.outputs_kept += 1
            engine.cache.keep(-self.outputs_kept, log.output_tokens[request])  # never requested again
        if self.closed and self.next < self.count:
            self._push(now_s, ARRIVES, engine, self.next)
            self.next += 1

    def _move(self, engine: Engine, request: int, now_s: float) -> None:
        """Prefill is done: its KV goes to the decode engine as soon as there is room."""
        self.router.leaves(engine)
        decoder = self.router.choose(self.decode, now_s)
        self.target[request] = (engine, decoder)
        decoder.inbound.append(request)
        self._fetch(decoder, now_s)

    def _fetch(self, decoder: Engine, now_s: float) -> None:
        """Start the transfers that the decode engine has room for, in order."""
        assert self.links is not None
        costs = self.links.costs
        while decoder.inbound:
            request = decoder.inbound[0]
            tokens = self.log.input_tokens[request]
            if decoder.held_tokens + tokens > decoder.capacity and decoder.held_tokens > 0:
                return
            decoder.inbound.popleft()
            decoder.held_tokens += tokens
            hit = self.hit_rate * tokens
            if self.repeated:  # decode keeps what it fetched, as prefill does
                hit = decoder.cache.hit(self.prompt[request], tokens)
                decoder.cache.keep(self.prompt[request], tokens)
            moved = tokens - hit
            decoder.allocated += moved
            size = moved * costs.bytes_per_token
            sender = self.target[request][0]
            self.log.transferred_bytes += size
            arrives_s = self.links.carry(sender, decoder, size, now_s)
            if moved:
                wrapped = decoder.allocated > decoder.capacity or sender.allocated > sender.capacity
                fragmented = costs.always_fragmented or (wrapped if self.scattered is None else self.scattered)
                stall_s = (costs.stall_s_per_token if fragmented else costs.post_s_per_token) * moved
                arrives_s += stall_s
                if stall_s and decoder.running:
                    decoder.stall_s += stall_s
                    self._wake(decoder, now_s)
            self._push(arrives_s, KV_ARRIVED, decoder, request)

    def _kv_arrived(self, decoder: Engine, request: int, now_s: float) -> None:
        """Decode can start on the request, and prefill may free its KV."""
        self.log.kv_arrived_s[request] = now_s
        engine = self.target[request][0]
        engine.held_tokens -= self.log.input_tokens[request]
        if engine.waiting and not engine.busy:
            self._wake(engine, now_s)
        decoder.joining.append(request)
        self._wake(decoder, now_s)

    # --- what engines ask ---------------------------------------------------------------------

    def to_compute(self, engine: Engine, waiting: Waiting) -> float:
        hit = self.hit_rate * self.log.input_tokens[waiting.request]
        if self.repeated:
            hit = engine.cache.hit(self.prompt[waiting.request], waiting.tokens)
        block = self.hardware.block_tokens
        # Whole blocks are found, and the last token is always computed, for its logits.
        uncached = waiting.tokens - (min(hit, waiting.tokens - 1) // block) * block
        self.log.computed_tokens[waiting.request] += uncached
        engine.allocated += uncached
        return float(uncached)

    def busy_beside(self, engine: Engine) -> int:
        return sum(member.busy for member in self.all_engines if member is not engine)

    def joining_tokens(self, requests: list[int]) -> float:
        return float(sum(self.log.input_tokens[request] for request in requests))

    def prefill_begins(self, request: int, now_s: float) -> None:
        if not self.log.prefill_start_s[request]:
            self.log.prefill_start_s[request] = now_s

    def preempt(self, request: int, steps_left: int) -> float:
        log = self.log
        return float(log.input_tokens[request] + log.output_tokens[request] - steps_left)
