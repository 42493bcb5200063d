"""The simulator's engine driven by a clock gives what the simulator gives."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.workload import Closed, Level, Workload
from pdlab.rehearsal.clock import Clock, SlowClock, Timer
from pdlab.rehearsal.realtime import RealTime, SimulatedRequest, Source
from pdlab.sim.engine import Engine
from pdlab.sim.hand_over import HandOver
from pdlab.sim.hardware import load_hardware
from pdlab.sim.ingress import Ingress
from pdlab.sim.kv_transfer import Links, link_of, transfer_costs
from pdlab.sim.level import SimulatedLevel, figures
from pdlab.sim.simulator import engine_of, simulate
from pdlab.sim.stepping import KV_ARRIVED
from pdlab.traffic.oracle import HitOracle

HARDWARE = load_hardware("h100-vllm-0.11")
SHAPE = require_shape("gpt-oss-120b")
PD = Disaggregated(prefill=Pool(tp=4), decode=Pool(tp=4), placement="pack")
TOPOLOGIES = [Collocated(pool=Pool(tp=4)), PD]


class VirtualTime:
    """Lets what is called at a moment happen at that moment, one after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.numbers = itertools.count()
        self.calls: list[tuple[float, int, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self.now

    def call_at(self, moment_s: float, callback: Callable[[], None]) -> Timer:
        entry = (max(moment_s, self.now), next(self.numbers), callback)
        heapq.heappush(self.calls, entry)
        calls = self.calls

        class Entry:
            def cancel(self) -> None:
                calls.remove(entry)
                heapq.heapify(calls)

        return Entry()

    def run(self) -> None:
        while self.calls:
            self.now, _, callback = heapq.heappop(self.calls)
            callback()


def empty_cache() -> HitOracle:
    return HitOracle(50_000, HARDWARE.block_tokens)


class Loop:
    """A closed loop on one engine, or on one that prefills and one that decodes."""

    def __init__(self, topology: Any, clock: Clock, concurrency: int, requests: int, tokens: tuple[int, int]) -> None:
        self.clock, self.requests, self.tokens = clock, requests, tokens
        deployment = Deployment(topology=topology)
        pd = isinstance(topology, Disaggregated)
        self.links = Links(transfer_costs(HARDWARE, SHAPE, topology, link_of(deployment))) if pd else None
        engines = {
            role: engine_of(HARDWARE, SHAPE, pool, prefills_only=role == "prefill")
            for role, pool in deployment.pools.items()
        }
        self.by_role = {role: RealTime([one], clock, empty_cache) for role, one in engines.items()}
        self.front_engine = engines.get("prefill") or engines["collocated"]
        self.decode_engine = engines.get("decode") or engines["collocated"]
        self.ingress = Ingress.of(HARDWARE, moves_kv=pd)
        self.sent_s: list[float] = []
        self.first_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.chunks: dict[int, list[int]] = {}
        self.began_s = clock.now_s()
        self.begin = [
            clock.call_at(self.began_s + i * HARDWARE.value("client_gap_ms") * 1e-3, self.send)
            for i in range(concurrency)
        ]

    def send(self, due_s: float | None = None) -> None:
        if len(self.sent_s) == self.requests:
            return
        number, now_s = len(self.sent_s), self.clock.now_s() if due_s is None else due_s
        self.sent_s.append(now_s)
        streaming = self.ingress.streaming(self.decode_engine)
        enters_s = self.ingress.pass_on(self.front_engine, self.tokens[0], streaming, now_s)

        if self.links is None:
            self.by_role["collocated"].submit(SimulatedRequest(*self.tokens, (), self.reporter(number)), enters_s)
            return
        prefill = self.by_role["prefill"]

        def prefilled(moment_s: float, tokens: int) -> None:
            self.clock.call_at(moment_s, lambda: self.decode(number, here[0], moment_s))

        here = [prefill.submit(SimulatedRequest(self.tokens[0], 1, (), prefilled, moves_on=True), enters_s)]

    def decode(self, number: int, prefilled: int, moment_s: float) -> None:
        assert self.links is not None
        prefill = self.by_role["prefill"]
        source = Source(self.links, self.front_engine, lambda at_s: prefill.release_prefilled(prefilled, at_s))
        self.by_role["decode"].submit(SimulatedRequest(*self.tokens, (), self.reporter(number), source), moment_s)

    def reporter(self, number: int) -> Callable[[float, int], None]:
        def on_tokens(moment_s: float, tokens: int) -> None:
            self.first_s.setdefault(number, moment_s)
            self.chunks.setdefault(number, []).append(tokens)
            if tokens == self.tokens[1]:
                self.end_s[number] = moment_s
                self.clock.call_at(moment_s, lambda: self.send(moment_s))

        return on_tokens

    @property
    def tpot_s(self) -> float:
        return sum((self.end_s[i] - self.first_s[i]) / (self.tokens[1] - 1) for i in self.end_s) / len(self.end_s)

    @property
    def ttft_s(self) -> float:
        return sum(self.first_s[i] - self.sent_s[i] for i in self.end_s) / len(self.end_s)


def simulated(topology: Any, concurrency: int, requests: int, tokens: tuple[int, int]) -> SimulatedLevel:
    load = Closed(concurrency=concurrency)
    level = Level(load=load, num_requests=requests, seed=1)
    workload = Workload(input_tokens=tokens[0], output_tokens=tokens[1])
    return simulate(Deployment(topology=topology), [level], workload, HARDWARE, SHAPE)[0]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["collocated", "pd"])
@pytest.mark.parametrize(("concurrency", "tokens"), [(1, (5000, 250)), (16, (5000, 250)), (64, (1000, 200))])
def test_in_time_without_delay_it_is_the_simulator(topology: Any, concurrency: int, tokens: tuple[int, int]) -> None:
    clock = VirtualTime()
    loop = Loop(topology, clock, concurrency, 3 * concurrency + 5, tokens)
    clock.run()
    pure = simulated(topology, concurrency, 3 * concurrency + 5, tokens)
    means = figures(pure)
    assert len(loop.end_s) == 3 * concurrency + 5
    assert means.tpot_s is not None
    assert loop.tpot_s == pytest.approx(means.tpot_s, rel=1e-6)
    assert loop.ttft_s == pytest.approx(means.ttft_s, rel=1e-6)
    assert sorted(loop.end_s.values()) == pytest.approx(sorted(pure.finish_s), rel=1e-6)


def test_an_answer_comes_in_three_chunks_of_whole_tokens() -> None:
    clock = VirtualTime()
    loop = Loop(PD, clock, 8, 20, (2000, 100))
    clock.run()
    for counts in loop.chunks.values():
        first, middle, last = counts
        assert first == 1 and last == 100
        assert 20 < middle < 80


@pytest.mark.parametrize("began_s", [0.0, 123_456.789])
def test_every_token_of_an_answer_comes_when_its_step_ends(began_s: float) -> None:
    """On a clock that has gone for long, too: moments are less exact there."""
    clock = VirtualTime()
    clock.now = began_s
    reported: list[list[tuple[float, int]]] = [[] for _ in range(6)]
    engine = engine_of(HARDWARE, SHAPE, Pool(tp=4), prefills_only=False)
    one = RealTime([engine], clock, empty_cache, every_token=True)
    for number, each in enumerate(reported):
        on_tokens = lambda at_s, tokens, each=each: each.append((at_s, tokens))  # noqa: E731
        one.submit(served(on_tokens, (2000, 80)), began_s + 0.1 * number)
    clock.run()
    for each in reported:
        assert [tokens for _, tokens in each] == list(range(1, 81))
        moments = [at_s for at_s, _ in each]
        assert moments == sorted(moments)
    alone_s = [at_s for at_s, _ in reported[-1][-10:]]  # the others have ended: steps of one length, nearly
    gaps_s = [after - before for before, after in itertools.pairwise(alone_s)]
    assert max(gaps_s) == pytest.approx(min(gaps_s), rel=0.02)


@pytest.mark.parametrize("slow_down", [4.0, pytest.param(8.0, marks=pytest.mark.long)])
def test_in_slow_time_it_is_the_simulator_nearly(slow_down: float) -> None:
    tokens, concurrency, requests = (2000, 100), 8, 24

    async def run() -> Loop:
        loop = Loop(PD, SlowClock(slow_down), concurrency, requests, tokens)
        while len(loop.end_s) < requests:
            await asyncio.sleep(0.05)
        return loop

    loop = asyncio.run(run())
    means = figures(simulated(PD, concurrency, requests, tokens))
    assert means.tpot_s is not None
    assert loop.tpot_s == pytest.approx(means.tpot_s, rel=0.03)
    assert loop.ttft_s == pytest.approx(means.ttft_s, rel=0.10)


def served(
    on_tokens: Callable[[float, int], None], tokens: tuple[int, int], blocks: tuple[int, ...] = ()
) -> SimulatedRequest:
    return SimulatedRequest(*tokens, blocks, on_tokens)


def alone(clock: VirtualTime) -> RealTime:
    engine = engine_of(HARDWARE, SHAPE, Pool(tp=4), prefills_only=False)
    return RealTime([engine], clock, empty_cache)


def test_the_same_beginning_is_computed_once() -> None:
    clock, ends = VirtualTime(), []
    one = alone(clock)
    for blocks in (tuple(range(100)), (*range(99), 1000)):
        begin = clock.now
        one.submit(served(lambda at_s, tokens: ends.append((at_s, tokens)), (1600, 1), blocks), clock.now)
        clock.run()
        ends[-1] = (ends[-1][0] - begin, ends[-1][1])
    assert ends[1][0] < ends[0][0] / 2
    assert one.engines[0].held_tokens == pytest.approx(0)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.2, 5.0])
def test_a_client_that_leaves_frees_what_it_held(after_s: float) -> None:
    clock, reported = VirtualTime(), []
    one = alone(clock)
    stays = [one.submit(served(lambda at_s, tokens: reported.append(tokens), (3000, 50)), 0.0) for _ in range(3)]
    leaves = one.submit(served(lambda at_s, tokens: reported.append(-tokens), (3000, 500)), 0.0)
    clock.call_at(after_s, lambda: one.abort(leaves))
    clock.run()
    assert reported.count(50) == len(stays)
    assert -500 not in reported or after_s > 4
    engine = one.engines[0]
    assert engine.held_tokens == pytest.approx(0)
    assert engine.context == pytest.approx(0)
    assert one.unfinished == 0
    assert engine.load == 0
    assert not one.log.input_tokens


def nothing_is_left(one: RealTime) -> None:
    for engine in one.engines:
        held = engine.held_tokens, engine.context, engine.load, len(engine.running), len(engine.waiting), engine.coming
        assert held == (pytest.approx(0), pytest.approx(0), 0, 0, 0, 0)
    assert one.unfinished == 0
    assert not one._released
    for name in one.log.__slots__:
        column = getattr(one.log, name)
        assert not isinstance(column, dict) or not column, name


@pytest.mark.parametrize("after_s", [0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 1.5])
def test_nobody_is_decoded_who_has_left(after_s: float) -> None:
    """Before the request enters, during each of the steps of its prompt, and while it decodes."""
    clock, reported = VirtualTime(), list[int]()
    one = alone(clock)
    leaves = one.submit(served(lambda at_s, tokens: reported.append(tokens), (30_000, 2000)), 0.01)
    clock.call_at(after_s, lambda: one.abort(leaves))
    clock.call_at(after_s + 0.3, lambda: nothing_is_left(one))
    clock.run()
    assert 2000 not in reported
    nothing_is_left(one)


@pytest.mark.parametrize("steps_in_flight", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 1])
def test_nobody_is_decoded_who_leaves_while_the_kv_moves(first: int, steps_in_flight: int) -> None:
    kinds = set()
    for moment in range(80):
        clock = VirtualTime()
        loop = Loop(PD, clock, 4, 12, (4000, 60))
        loop.decode_engine.hand_over = HandOver(known=1, first=first)
        loop.decode_engine.steps_in_flight = steps_in_flight
        prefill, decode = loop.by_role["prefill"], loop.by_role["decode"]
        assert loop.links is not None
        leave_later(loop, moment * 0.001, kinds)
        clock.call_at(4.0, lambda one=decode: nothing_is_left(one))  # 5,000 tokens take half a minute
        clock.run()
        assert len(loop.end_s) == 12
        for each in (prefill, decode):
            nothing_is_left(each)
    assert {"scheduled", "moving", "running"} <= kinds


def leave_later(loop: Loop, after_s: float, kinds: set[str]) -> None:
    """One more request, whose client leaves ``after_s`` its prefill: ``kinds`` gets where it was at that moment."""
    prefill, decode, links = loop.by_role["prefill"], loop.by_role["decode"], loop.links
    assert links is not None

    def prefilled(at_s: float, tokens: int) -> None:
        source = Source(links, loop.front_engine, lambda moment_s: prefill.release_prefilled(here, moment_s))
        there = decode.submit(SimulatedRequest(4000, 5000, (), lambda *of: None, source), at_s + 0.004)

        def leave() -> None:
            kinds.add(_where(loop.decode_engine, there, decode))
            decode.abort(there)

        loop.clock.call_at(at_s + after_s, leave)

    here = prefill.submit(SimulatedRequest(4000, 1, (), prefilled, moves_on=True), 0.3)


def _where(engine: Engine, request: int, one: RealTime) -> str:
    places: dict[str, Any] = {
        "running": [each[1] for each in engine.running],
        "inbound": engine.inbound,
        "joining": [*engine.arrived, *itertools.chain(*engine.seen), *engine.known, *engine.joining, *engine.joined],
        "moving": [number for _, _, kind, _, number in one._events if kind == KV_ARRIVED],
        "scheduled": [number for _, _, kind, _, number in one._events if kind == "comes"],
    }
    return next((name for name, there in places.items() if request in there), "ended")


@pytest.mark.parametrize("seed", range(20))
def test_whoever_leaves_a_full_engine_leaves_nothing(seed: int) -> None:
    """Prompts in parts, preempted sequences, and clients that leave at any time."""
    clock, chance = VirtualTime(), random.Random(seed)
    one = alone(clock)
    engine = one.engines[0]
    engine.capacity = 30_000.0
    engine.steps_in_flight, engine.window = seed % 3, seed % 2 * 128
    engine.__post_init__()
    stay, ended = 0, list[int]()
    for _ in range(60):
        tokens = chance.randint(200, 9_000), chance.randint(1, 3000)

        def on_tokens(at_s: float, tokens_: int, all_: int = tokens[1]) -> None:
            if tokens_ == all_:
                ended.append(tokens_)

        number = one.submit(served(on_tokens, tokens), at_s := chance.uniform(0, 5))
        if chance.random() < 0.5:
            clock.call_at(at_s + chance.expovariate(0.3), lambda number=number: one.abort(number))
        else:
            stay += 1
    clock.run()
    assert engine.window or engine.preemptions > 0, "seeds without windows are to preempt"
    assert len(ended) >= stay
    nothing_is_left(one)


def test_a_prefill_whose_client_leaves_as_it_is_reported_is_freed() -> None:
    clock = VirtualTime()
    one = alone(clock)
    number = one.submit(SimulatedRequest(3000, 1, (), lambda at_s, tokens: None, moves_on=True), 0.0)
    clock.run()
    assert one.engines[0].held_tokens > 0
    one.abort(number)
    nothing_is_left(one)
    one.release_prefilled(number, clock.now)
    nothing_is_left(one)


def test_prefilled_kv_is_held_until_it_is_released() -> None:
    clock, reported = VirtualTime(), []
    one = alone(clock)
    number = one.submit(SimulatedRequest(3000, 1, (), lambda at_s, tokens: reported.append(at_s), moves_on=True), 0.0)
    clock.run()
    assert len(reported) == 1
    assert one.engines[0].held_tokens == 188 * one.engines[0].block_tokens, "whole blocks"
    one.release_prefilled(number, reported[0] + 1.0)
    clock.call_at(reported[0] + 2.0, one.advance)
    clock.run()
    assert one.engines[0].held_tokens == 0
    one.release_prefilled(number, reported[0] + 3.0)  # reported twice: nothing is given back twice
    assert one.engines[0].held_tokens == 0


def test_a_fork_of_gpt_oss_hits_from_the_third_time_on() -> None:
    """By the rules of vLLM's prefix cache, as in the simulator."""
    clock, hits = VirtualTime(), list[float]()
    engine = engine_of(HARDWARE, SHAPE, Pool(tp=4), prefills_only=False)
    size = HARDWARE.block_tokens
    one = RealTime([engine], clock, lambda: HitOracle(50_000, size, 128))
    common = tuple(range(100))
    latest: list[int] = []

    def on_tokens(at_s: float, tokens: int) -> None:
        hits.append(one.times(latest[-1]).hit_tokens)

    for own in range(1000, 1003):
        blocks = (*common, *range(1000 * own, 1000 * own + 20))
        latest.append(one.submit(served(on_tokens, (120 * size, 1), blocks), clock.now))
        clock.run()
    assert hits == [0, 0, 100 * size]
