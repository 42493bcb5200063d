"""Discrete-event simulation of a served deployment: Deployment + Workload + levels -> Runs, origin simulated.

The parts of the simulation:

- **Prefix caches** of a workload file follow vLLM's rules (`pdlab.traffic.oracle`); each engine has one. A request that
  waits for others arrives after their end. **KV offload**: engines that prefill have a second cache in host memory
  (`pdlab.sim.host_memory`).
- **Arrivals**: a closed loop (the next prompt when one ends), an open loop (gamma gaps), or a trace. A workload whose
  mix changes with time (`pdlab.core.mixes`) is a trace.
- **Ingress**: a latency, a part of it per prompt token, and one request at a time through a replica's front end. All of
  these times grow as 1 / (1 - share), with the share of its time in which the front end streams tokens.
- **Routing** is that of Ray Serve (`pdlab.sim.router`): a router takes, of two random replicas, the one with fewer
  requests in its memory. The decode replica is chosen when prefill has answered. With direct streaming replicas are
  taken in turn, and the decode replica is chosen before it calls prefill. Without Ray replicas are taken in turn too.
- **Engines**: vLLM's scheduler (`pdlab.sim.engine`) with the step times of `pdlab.sim.steps`.
- **KV transfer**: first come, first served into a decode engine; a node's link is shared. The decode engine stalls
  while blocks move that do not merge: from the time when its pool has wrapped (``scattered`` None), always, or never.
- **Fluid pools** (`pdlab.sim.fluid`): every engine takes prompts or requests to decode by its present role, and
  finishes the requests that it has. The real controller sets the roles, and routing is the real one too.
- **Prompts**: ``fresh`` ones, or ``repeated`` ones. With these, each level of the sweep draws from the start of one
  list, so that a level of n prompts repeats those of the levels before it. Caches live through the whole sweep.

The same seed gives the same bytes. `simulate` returns the levels with every request; `to_run` gives the `Run`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heappushpop
from operator import add
from typing import Literal

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, Pool, Transport
from pdlab.core.engine_cache import EngineCache
from pdlab.core.errors import UsageError
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Level, Replay, Workload
from pdlab.roles.prefixes import CHUNK_TOKENS
from pdlab.sim.engine import Engine, PendingPrefill, PrefixCache, most_sequences_of
from pdlab.sim.fluid import REPORT_EVERY_S, Controller, FluidPool, SentPrompt
from pdlab.sim.hand_over import hand_over_of
from pdlab.sim.hardware import Hardware
from pdlab.sim.host_memory import HostMemory
from pdlab.sim.ingress import Ingress
from pdlab.sim.kv_transfer import LinkKind, Links, link_of, transfer_costs
from pdlab.sim.level import SimulatedLevel, Trace, empty_level, open_arrivals, trace_of
from pdlab.sim.router import DirectRouter, InTurn, PolicyRouter, Router
from pdlab.sim.step_source import FARTHEST
from pdlab.sim.step_time import engine_cache, kv_capacity_tokens, why_not_held
from pdlab.sim.stepping import ARRIVES, ENTERS, LOADED, STEP_ENDS, Stepping
from pdlab.sim.steps import steps_of
from pdlab.traffic.oracle import oracle_of
from pdlab.traffic.prompts import PromptsInFlight
from pdlab.traffic.requests import TrafficRequest

__all__ = ["Prompts", "SimulatedLevel", "Trace", "simulate"]

Prompts = Literal["fresh", "repeated"]
REPORTS = LOADED + 1
WINDOWS = 1 << 40  # added to the number of a prompt: the window at its end, which is freed before its other blocks


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
    controller: Controller | None = None,
    gaps: bool = True,
) -> list[SimulatedLevel]:
    """Run the levels one after another on one deployment. Caches are kept between them.

    ``prefix_hit_rate``: the share of each prompt that is in every engine's cache (for fresh prompts with a common
    prefix). ``link``: the link between prefill and decode (None: that of the deployment's placement). ``trace``: its
    requests replace the lengths and arrivals of each level. ``scattered``: free blocks are scattered, as in pools that
    have served more tokens than they hold (None: from the time when they have). ``controller``: a controller that
    replaces the fluid pool's own. ``gaps``: levels have the time between tokens (`pdlab.sim.level.gaps`). Raises
    UsageError if the model or one request does not fit an engine.
    """
    if not 0 <= prefix_hit_rate < 1:
        raise UsageError(f"prefix hit rate {prefix_hit_rate} must be from 0 to below 1")
    if isinstance(deployment.topology, Fluid):
        fluid = _FluidSystem(deployment, hardware, shape, seed, prompts, prefix_hit_rate, link)
        fluid.controller = controller
        system: System = fluid
    else:
        system = System(deployment, hardware, shape, seed, prompts, prefix_hit_rate, link)
    system.scattered, system.keeps_gaps = scattered, gaps
    return [system.run(level, workload, trace) for level in levels]


def engine_of(hardware: Hardware, shape: ModelShape, pool: Pool, *, prefills_only: bool) -> Engine:
    """One engine of the pool: one DP rank, or with pipeline stages the batch of one stage. Raises UsageError."""
    return engines_of(hardware, shape, pool, 1, prefills_only=prefills_only)[0]


def engines_of(
    hardware: Hardware,
    shape: ModelShape,
    pool: Pool,
    count: int,
    *,
    prefills_only: bool,
    transport: Transport | None = None,
) -> list[Engine]:
    """That many engines of the pool, which share their step times. Raises UsageError."""
    costs = steps_of(hardware, shape, pool)
    capacity = kv_capacity_tokens(hardware, shape, pool) / pool.pp
    own, waits = hardware.of(pool), hand_over_of(transport)
    return [
        Engine(
            costs,
            capacity,
            own.step_tokens,
            PrefixCache(capacity),
            prefills_only=prefills_only,
            receives=transport is not None,
            block_tokens=own.block_tokens,
            window=(shape.sliding_window or 0) if own.hybrid_kv else 0,
            most_sequences=most_sequences_of(pool),
            steps_in_flight=own.steps_in_flight,
            hand_over=waits,
        )
        for _ in range(count)
    ]


class System(Stepping):
    """The state of the deployment between events."""

    # Python 3.11 calls methods of an object with more than 30 attributes slowly, unless it has slots.
    __slots__ = (
        "all_engines",
        "answered_by",
        "block_tokens",
        "blocks",
        "caches",
        "chosen_by",
        "closed",
        "contention",
        "count",
        "counts_ends",
        "decode",
        "decode_routing",
        "deployment",
        "engines",
        "events",
        "followed_by",
        "front",
        "front_routing",
        "gap_s",
        "hardware",
        "hit_rate",
        "host",
        "in_turn",
        "ingress",
        "keeps_gaps",
        "links",
        "log",
        "next",
        "oracles",
        "outputs_kept",
        "prompt",
        "random",
        "repeated",
        "requests",
        "router",
        "scattered",
        "seed",
        "sequence",
        "shape",
        "target",
        "to_come",
        "waits",
    )

    log: SimulatedLevel

    def __init__(
        self,
        deployment: Deployment,
        hardware: Hardware,
        shape: ModelShape,
        seed: int,
        prompts: Prompts,
        prefix_hit_rate: float,
        link: LinkKind | None,
    ) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.scattered: bool | None = None
        self.keeps_gaps = True
        self.deployment = deployment
        hardware = hardware.serving(deployment)
        self.hardware, self.shape, self.block_tokens = hardware, shape, hardware.block_tokens
        self.repeated, self.hit_rate = prompts == "repeated", prefix_hit_rate
        topology = deployment.topology
        pools = deployment.served_pools
        self.engines = {role: self._engines(pool, role) for role, pool in pools.items()}
        self.all_engines = [engine for engines in self.engines.values() for engine in engines]
        self.caches: dict[Engine, EngineCache] = {}
        for role, pool in pools.items():
            self.caches |= dict.fromkeys(self.engines[role], engine_cache(deployment, pool, hardware, shape))
        self.links: tuple[Links, ...] = ()
        if isinstance(topology, Disaggregated):
            self.links = (Links(transfer_costs(hardware, shape, topology, link or link_of(deployment))),)
        self.decode = self.engines.get("decode") or self.all_engines
        self.front = self.engines.get("prefill") or self.decode
        self.ingress = Ingress.of(hardware, moves_kv=deployment.transport is not None)
        value = hardware.value
        self.contention = value("contention")
        self.router = Router(self.random, max(round(value("routers")), 1), value("router_memory_s"))
        self.in_turn = InTurn() if deployment.serving.direct_streaming else None
        of_front = next(iter(pools.values()))
        count = 1 if self.in_turn is not None else self.router.count
        # With direct streaming one router picks the replica that answers, and each decode replica calls prefill itself.
        self.front_routing = self._routing(pools.get("prefill", of_front), count, prefills="prefill" in pools)
        self.decode_routing = self._routing(pools.get("decode", of_front), count, prefills=False)
        self.counts_ends = hardware.routers_count_ends
        # request -> the router that chose its first engine, or the one that answers, and counts its end there
        self.chosen_by: dict[int, int] = {}
        self.answered_by: dict[int, int] = {}
        self.gap_s = value("client_gap_ms") * 1e-3
        self.outputs_kept = 0

    def _routing(self, pool: Pool, count: int, *, prefills: bool) -> PolicyRouter | DirectRouter | None:
        """The routing of a pool by ``count`` routers. None: power of two choices, which `Router` makes."""
        direct = self.hardware.of(pool).direct
        if direct is not None and pool.routing == "power-of-two":
            return DirectRouter(self.random, direct.prefill if prefills else direct.decode, pool.dp * pool.pp)
        return PolicyRouter.of(pool.routing, self.random, count)

    def _engines(self, pool: Pool, role: str) -> list[Engine]:
        # Pipeline stages work on as many batches as there are stages, each at the whole latency.
        count = pool.replicas * pool.dp * pool.pp
        return engines_of(
            self.hardware,
            self.shape,
            pool,
            count,
            prefills_only=role == "prefill",
            transport=self.deployment.transport,
        )

    # --- one level ----------------------------------------------------------------------------

    def run(self, level: Level, workload: Workload, trace: Trace | None) -> SimulatedLevel:
        """Every request of the level, from an idle system to an idle system."""
        self._begin(level, workload, trace or trace_of(workload, level))
        events, pop, pushpop = self.events, heappop, heappushpop
        step_ends, arrives, happens = self.step_ends, self._arrives, self.happens
        event = pop(events) if events else None
        while event is not None:
            now_s, _, kind, subject, number = event
            if kind == STEP_ENDS:
                ends_s = step_ends(subject, number, now_s)
                while ends_s is not None and not (events and events[0][0] <= ends_s):
                    self.sequence += 1
                    ends_s = step_ends(subject, subject.version, ends_s)
                if ends_s is not None:
                    self.sequence += 1
                    event = pushpop(events, (ends_s, self.sequence, STEP_ENDS, subject, subject.version))
                    continue
            elif kind == ARRIVES:
                arrives(number, now_s)
            else:
                happens(kind, subject, number, now_s)
            event = pop(events) if events else None
        return self._finish()

    def _begin(self, level: Level, workload: Workload, trace: Trace | None) -> None:
        self.log = empty_level(level, workload, trace)
        count = len(self.log.input_tokens)
        self._check_fit()
        self.count = count
        self.prompt = self._prompt_numbers(count)
        self._begin_traffic(trace.requests if trace else ())
        self.events: list[tuple[float, int, int, Engine, int]] = []
        self.sequence = 0
        self.target: dict[int, tuple[Engine, Engine]] = {}
        for links in self.links:
            links.free_s = 0.0
        for engine in self.all_engines:
            engine.frontend_free_s = engine.link_free_s = engine.link_busy_s = engine.busy_s = engine.full_s = 0.0
            engine.host_free_s = 0.0
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
            assert not isinstance(level.load, Replay)  # drawing its lengths has raised the error
            arrivals = open_arrivals(level.load, count, self.random)
        # An open loop has one future arrival at a time: thousands of events in the heap would make each one cost more.
        unchained = [(moment_s, index) for index, moment_s in enumerate(arrivals) if index not in self.waits]
        self.to_come = deque(sorted(unchained))
        for _ in range(len(unchained) if self.closed else 1):
            self._next_comes()

    def _next_comes(self) -> None:
        if self.to_come:
            moment_s, index = self.to_come.popleft()
            self.push(moment_s, ARRIVES, self.front[0], index)

    def _begin_traffic(self, requests: Sequence[TrafficRequest]) -> None:
        """The requests that others wait for, and the shared blocks of prompts."""
        self.requests = requests
        numbers = {request.id: number for number, request in enumerate(requests)}
        self.waits: dict[int, int] = {}  # request -> number of unfinished requests that it waits for
        self.followed_by: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            before = {numbers[each] for each in request.after}
            if before:
                self.waits[number] = len(before)
            for each in before:
                self.followed_by.setdefault(each, []).append(number)
        self.blocks = PromptsInFlight(requests, self.block_tokens)
        self.oracles = {engine: oracle_of(cache) for engine, cache in self.caches.items()} if requests else {}
        self.host = HostMemory.of(self.deployment, self.hardware, self.shape) if requests else None

    def _check_fit(self) -> None:
        longest = max(map(add, self.log.input_tokens, self.log.output_tokens), default=0)
        held = FARTHEST * min(engine.costs.limits.context for engine in self.all_engines)
        if longest > held:
            raise UsageError(
                f"one request of {counted(longest, 'token')} is too long for the step times of {self.hardware.name}, "
                f"which are extrapolated to {held:.0f} tokens; use shorter requests"
            )
        for role, pool in self.deployment.served_pools.items():
            if why := why_not_held(self.hardware, self.shape, pool, longest):
                engine = f"a {role} engine" if role in ("prefill", "decode") else "an engine"
                on = f" on {pool.gpu_type}" if pool.gpu_type is not None else ""
                raise UsageError(
                    f"{engine} of {pool.degrees}{on} does not hold {self.shape.name} with one request of "
                    f"{counted(longest, 'token')}: {why}"
                )

    def _prompt_numbers(self, count: int) -> list[int]:
        if not self.repeated:
            self.outputs_kept += count
            return list(range(self.outputs_kept - count, self.outputs_kept))
        # Hits and misses are mixed. If all repeated prompts came first and all new ones last, neither the median nor
        # the tail of TTFT would be as in the calibration data (docs/model.md).
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
            log.link_busy = max((links.busy_s(ends) for links in self.links), default=0.0) / log.duration_s
            log.kv_full = sum(engine.full_s for engine in self.all_engines) / len(self.all_engines) / log.duration_s
        log.preemptions = sum(engine.preemptions for engine in self.all_engines)
        log.beyond_tables = max(engine.costs.beyond for engine in self.all_engines)
        return log

    # --- arrival and end of a request ---------------------------------------------------------

    def push(self, moment_s: float, kind: int, engine: Engine, number: int) -> None:
        self.sequence += 1
        heappush(self.events, (moment_s, self.sequence, kind, engine, number))

    def _arrives(self, request: int, now_s: float) -> None:
        log, ingress = self.log, self.ingress
        log.arrival_s[request] = now_s
        if not self.closed and request not in self.waits:
            self._next_comes()
        engine, decoder = self.target[request] = self._chosen(request, now_s)
        enters_s = ingress.pass_on(engine, log.input_tokens[request], ingress.streaming(decoder), now_s)
        self.push(enters_s, ENTERS, engine, request)

    def _chosen(self, request: int, now_s: float) -> tuple[Engine, Engine]:
        """The engine that a prompt enters, and the one that streams its answer."""
        if self.in_turn is not None or self.counts_ends:
            index, decoder = self._answering(request, now_s)
            if not self.links:
                return decoder, decoder
            self.chosen_by[request] = index
            return self._front_engine(request, now_s, index), decoder
        engine = self._front_engine(request, now_s)
        # The decode replica is not chosen yet: any one of them shows how busy they are.
        return engine, self.decode[self.sequence % len(self.decode)] if self.links else engine

    def _answering(self, request: int, now_s: float) -> tuple[int, Engine]:
        """The index and the engine of the replica that answers, for Ray Serve LLM that chooses it at the arrival."""
        if self.decode_routing is not None:
            decoder = self.decode_routing.choose(self.decode, self._session(request))
        elif self.in_turn is not None:
            return self.in_turn.choose(self.decode)
        else:
            several = len(self.decode) > 1
            router = self.answered_by[request] = int(self.random.random() * self.router.count) if several else 0
            decoder = self.router.choose(self.decode, now_s, router)
        return self.decode.index(decoder), decoder

    def _session(self, request: int) -> str | None:
        return self.requests[request].session if self.requests else None

    def _front_engine(self, request: int, now_s: float, router: int | None = None) -> Engine:
        """The engine that a prompt enters."""
        if self.front_routing is None:
            return self.router.choose(self.front, now_s, router)
        return self.front_routing.choose(self.front, self._session(request), router)

    def _decode_engine(self, engine: Engine, request: int, now_s: float) -> Engine:
        """The engine that decodes a request which ``engine`` has prefilled."""
        self.router.leaves(engine, self.chosen_by.get(request), now_s)
        if self.in_turn is not None or self.counts_ends:
            return self.target[request][1]
        if self.decode_routing is None:
            return self.router.choose(self.decode, now_s)
        return self.decode_routing.choose(self.decode, self._session(request))

    def hit_tokens(self, engine: Engine, request: int, tokens: float) -> float:
        if self.requests:
            prompt = self.blocks.of(request)[0]
            held = self.oracles[engine].hit(prompt)
            return held + (self.host.tokens_to_load(engine, request, prompt, held) if self.host else 0)
        if not self.repeated:
            return self.hit_rate * self.log.input_tokens[request]
        hit = engine.cache.hit(self.prompt[request], tokens)
        if engine.window:  # a prompt is found if the window at its end is, and only as a whole
            own = self.log.input_tokens[request]
            window = engine.cache.hit(WINDOWS + self.prompt[request], engine.kept_window)
            hit = float(own) if hit >= own and window >= engine.kept_window else 0.0
        return hit

    def fetched_hit_tokens(self, engine: Engine, request: int, tokens: float) -> float:
        if self.requests:
            return self.oracles[engine].compute(self.blocks.of(request)[0])
        if not self.repeated:
            return self.hit_rate * self.log.input_tokens[request]
        hit = self.hit_tokens(engine, request, tokens)
        self._keep_prompt(engine, request)  # decode keeps what it fetched, as prefill does
        return hit

    def keep(self, engine: Engine, request: int) -> None:
        if self.requests:
            prompt, oracle = self.blocks.of(request)[0], self.oracles[engine]
            loaded = self.host.computed(engine, request, prompt, oracle.hit(prompt)) if self.host else 0
            oracle.compute(prompt, loaded=loaded)
        elif self.repeated:
            self._keep_prompt(engine, request)

    def _keep_prompt(self, engine: Engine, request: int) -> None:
        tokens, number = self.log.input_tokens[request], self.prompt[request]
        engine.cache.keep(number, tokens, engine.uncached)
        if engine.window:
            engine.cache.keep(WINDOWS + number, engine.kept_window, engine.uncached)

    def loads(self, engine: Engine, waiting: PendingPrefill, now_s: float) -> bool:
        if self.host is None:
            return False
        comes_s = self.host.loads(engine, waiting, now_s)
        if comes_s is not None:
            self.push(comes_s, LOADED, engine, waiting.request)
        return comes_s is not None

    def loaded(self, engine: Engine, request: int, now_s: float) -> None:
        assert self.host is not None
        self.host.loaded(engine, request)
        self.prefill_begins(request, now_s)
        self.wake(engine, now_s)

    def hand_over(self, engine: Engine, request: int, now_s: float) -> None:
        """Prefill has ended: its KV moves to the decode engine as soon as there is room."""
        decoder = self._decode_engine(engine, request, now_s)
        self.target[request] = (engine, decoder)
        decoder.inbound.append(request)
        self.fetch(decoder, now_s)

    def ended(self, engine: Engine, request: int, now_s: float) -> None:
        self.router.leaves(engine, self.answered_by.get(request), now_s)
        self._output_kept(engine, request, now_s)

    def _output_kept(self, engine: Engine, request: int, now_s: float) -> None:
        """The answer has ended: its KV stays cached, and requests that waited for it arrive. In a closed loop the next
        prompt arrives."""
        if self.requests:
            self.oracles[engine].answered(*self.blocks.of(request))
            self.blocks.forget(request)
            for number in self.followed_by.get(request, ()):
                self.waits[number] -= 1
                if not self.waits[number]:
                    waiting = self.requests[number]
                    self.push(max(waiting.at_s or 0.0, now_s + waiting.gap_s), ARRIVES, engine, number)
        if self.repeated:
            self.outputs_kept += 1
            # A number that no prompt has: an answer is never requested again.
            engine.cache.keep(-self.outputs_kept, self.log.output_tokens[request], engine.uncached)
            if engine.window:  # only its window was freed before
                engine.cache.keep(self.prompt[request], self.log.input_tokens[request], engine.uncached)
        if self.closed and self.next < self.count:
            self.push(now_s, ARRIVES, engine, self.next)
            self.next += 1

    def way(self, request: int) -> tuple[Links, Engine]:
        return self.links[0], self.target[request][0]

    def release(self, request: int, now_s: float) -> None:
        engine = self.target[request][0]
        engine.held_tokens -= engine.kv_tokens(self.log.input_tokens[request])
        if engine.waiting and not engine.busy:
            self.wake(engine, now_s)

    def beside(self, engine: Engine) -> Iterable[Engine]:
        return (member for member in self.all_engines if member is not engine)


class _FluidSystem(System):
    """A fluid pool between events. Every level begins with the roles of the topology, and without a history."""

    __slots__ = ("chunks", "controller", "left", "moving_s", "per_node", "pool", "sent", "topology")

    def __init__(
        self,
        deployment: Deployment,
        hardware: Hardware,
        shape: ModelShape,
        seed: int,
        prompts: Prompts,
        prefix_hit_rate: float,
        link: LinkKind | None,
    ) -> None:
        super().__init__(deployment, hardware, shape, seed, prompts, prefix_hit_rate, link)
        topology = deployment.topology
        assert isinstance(topology, Fluid)
        self.controller: Controller | None = None
        self.topology = topology
        self.per_node = max(hardware.gpus_per_node // topology.pool.tp, 1)
        kinds = [link or link_of(deployment, same_node=same_node) for same_node in (False, True)]
        self.links = tuple(Links(transfer_costs(hardware, shape, topology, kind)) for kind in kinds)
        # A request that moves waits for a second pass through the ingress, and for the transfer.
        self.moving_s = self.ingress.overhead_s + self.links[0].costs.setup_s

    def _begin(self, level: Level, workload: Workload, trace: Trace | None) -> None:
        super()._begin(level, workload, trace)
        routers = self.router.count
        self.pool = FluidPool(
            self.topology,
            self.all_engines,
            self.per_node,
            routers,
            self.random,
            self.controller,
            pool_tokens=self.caches[self.all_engines[0]].blocks * self.block_tokens,
            sparse=self._keeps_ends_alone,
        )
        self.chunks = PromptsInFlight(self.requests if self.pool.looks_up_prefixes else (), CHUNK_TOKENS)
        self.sent: dict[int, SentPrompt] = {}
        self.left = self.count
        self.push(REPORT_EVERY_S, REPORTS, self.all_engines[0], 0)

    def _finish(self) -> SimulatedLevel:
        log = super()._finish()
        log.splits = self.pool.splits
        return log

    def happens(self, kind: int, engine: Engine, number: int, now_s: float) -> None:
        if kind == REPORTS:
            self.pool.report(now_s, self.moving_s)
            if self.left or self.pool.is_between_decisions:
                self.push(now_s + REPORT_EVERY_S, REPORTS, engine, 0)
            return
        if kind == ENTERS:
            self.pool.enters(self.sent[number], now_s)
        super().happens(kind, engine, number, now_s)

    @property
    def _keeps_ends_alone(self) -> bool:
        """As `pdlab.deploy.serving.kv_pool.keeps_ends_alone`."""
        cache = self.caches[self.all_engines[0]]
        return cache.window is not None and cache.retention is not None

    def _chosen(self, request: int, now_s: float) -> tuple[Engine, Engine]:
        chunks: Sequence[int] = ()
        if self.requests and self.pool.looks_up_prefixes:
            chunks = self.chunks.of(request)[0].keys
            self.chunks.forget(request)
        sent = self.pool.arrives(self.log.input_tokens[request], self._session(request), chunks)
        self.sent[request] = sent
        return sent.prefiller.engine, sent.decoder.engine

    def moves_on(self, engine: Engine, request: int) -> bool:
        return not self.sent[request].local and not self.log.first_token_s[request]

    def keep(self, engine: Engine, request: int) -> None:
        super().keep(engine, request)
        if not self.log.first_token_s[request]:  # else it was preempted, and is recomputed
            self.pool.prefilled(self.sent[request], self.log.prefill_end_s[request])

    def _decode_engine(self, engine: Engine, request: int, now_s: float) -> Engine:
        sent = self.sent[request]
        self.pool.moves(sent)
        return sent.decoder.engine

    def first_token(self, engine: Engine, request: int, now_s: float) -> None:
        self.pool.first_token(self.sent[request], now_s - self.log.arrival_s[request])

    def ended(self, engine: Engine, request: int, now_s: float) -> None:
        log, tokens = self.log, self.log.output_tokens[request]
        self.left -= 1
        self.pool.ended(
            engine, log.input_tokens[request], tokens, (now_s - log.first_token_s[request]) / max(tokens - 1, 1)
        )
        self._output_kept(engine, request, now_s)
        del self.sent[request]

    def way(self, request: int) -> tuple[Links, Engine]:
        sender, receiver = (self.pool.by_engine[engine] for engine in self.target[request])
        return self.links[sender.node == receiver.node], sender.engine
