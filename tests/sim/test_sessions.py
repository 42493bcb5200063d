"""A workload file in the simulator: sessions wait, caches follow vLLM's rules, and what is hit is not computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pdlab.core.catalog import load_model
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Fluid, Pool, Routing, Topology, parse_label
from pdlab.core.workload import Level, Open, Workload
from pdlab.roles.observed import Role
from pdlab.sim.fluid import FluidPool
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import engine_of, simulate
from pdlab.traffic.compiled import compiled
from pdlab.traffic.requests import TrafficRequest

DATA = Path(__file__).resolve().parents[1] / "data" / "traffic"
HARDWARE = load_hardware("h100-vllm-0.11").model_copy(update={"hybrid_kv": True})
SHAPE = load_model("gpt-oss-120b")


def trace(name: str) -> Trace:
    return Trace.of([*compiled(DATA / name)[1]])


def simulated(given: Trace, of: str | Topology = "collocated-1xtp2", hybrid: bool = True) -> SimulatedLevel:
    assert SHAPE is not None
    deployment = Deployment(topology=parse_label(of) if isinstance(of, str) else of)
    hardware = HARDWARE.model_copy(update={"hybrid_kv": hybrid})
    level = Level(load=Open(rate_rps=1.0), num_requests=len(given.arrival_s), seed=0)
    return simulate(deployment, [level], Workload(), hardware, SHAPE, trace=given)[0]


@pytest.mark.parametrize("label", ["collocated-2xtp2", "pd-pack-p1xtp2-d1xtp2", "pd-fluid-4xtp2"])
def test_a_follow_up_comes_after_its_parents_end_and_gap(label: str) -> None:
    for name in ("chat.yaml", "agents.yaml", "mooncake.jsonl"):
        given = trace(name)
        level = simulated(given, label)
        numbers = {request.id: number for number, request in enumerate(given.requests)}
        assert all(level.finish_s)
        for number, request in enumerate(given.requests):
            ends = [level.finish_s[numbers[each]] + request.gap_s for each in request.after]
            assert level.arrival_s[number] == pytest.approx(max([request.at_s or 0.0, *ends])), (name, request.id)


def test_lengths_are_whole_prompts() -> None:
    given = trace("mooncake.jsonl")
    assert sorted(given.input_tokens) == [512, 600, 1100, 1100, 1700, 1700, 2300, 3000]


def fork(count: int) -> Trace:
    """So many prompts with the same 2,000 tokens before 100 of their own, long after each other."""
    requests = [
        TrafficRequest(f"r{n}", f"r{n}", (("system", 2000), (f"own{n}", 100)), 20, at_s=100.0 * n) for n in range(count)
    ]
    return Trace.of(requests)


def test_a_fork_hits_from_the_third_time_on() -> None:
    """Of gpt-oss with the window's cache by itself; a cache of all tokens hits the second time."""
    assert simulated(fork(4)).computed_tokens == [2100, 2100, 100, 100]
    assert simulated(fork(4), hybrid=False).computed_tokens == [2100, 100, 100, 100]


def test_a_follow_up_computes_the_answer_before_it_again() -> None:
    """A window is kept before the end of the prompt, not of the answer; a cache of all tokens has both."""
    requests = [
        TrafficRequest("a", "s", (("u", 1600),), 161, at_s=0.0),
        TrafficRequest("b", "s", (("v", 100),), 5, parent="a", gap_s=1.0),
    ]
    given = Trace.of(requests)
    assert given.input_tokens == (1600, 1861)
    assert simulated(given).computed_tokens == [1600, 1861 - 1584]
    assert simulated(given, hybrid=False).computed_tokens == [1600, 1861 - 1760]


def test_decode_fetches_what_it_lacks() -> None:
    requests = [
        TrafficRequest("a", "s", (("u", 1600),), 161, at_s=0.0),
        TrafficRequest("b", "s", (("v", 100),), 5, parent="a", gap_s=1.0),
    ]
    level = simulated(Trace.of(requests), "pd-pack-p1xtp2-d1xtp2")
    assert level.computed_tokens == [1600, 1861 - 1584]
    assert level.transferred_bytes < simulated(Trace.of(requests[:1]), "pd-pack-p1xtp2-d1xtp2").transferred_bytes * 1.3
    assert level.hit_share == pytest.approx(1584 / (1600 + 1861))


def test_a_part_has_whole_sessions() -> None:
    given = trace("chat.yaml")
    parts = [given.part(2)]
    sessions = {request.session for request in parts[0].requests}
    assert len(sessions) == 20
    assert all({*request.after} <= {each.id for each in parts[0].requests} for request in parts[0].requests)
    assert given.part(1) == given


def test_a_part_has_what_its_sessions_wait_for() -> None:
    block = ((("k", 100),), 10)
    requests = [
        TrafficRequest("a", "one", *block, at_s=0.0),
        TrafficRequest("b", "two", *block, at_s=1.0, parent="a", fresh=True),
        TrafficRequest("c", "three", *block, at_s=2.0),
    ]
    assert [each.id for each in Trace.of(requests).part(2).requests] == ["a", "b"]


def test_a_session_of_a_fluid_pool_moves_with_its_engine_alone() -> None:
    """As in the application, where engines are known by their ids and not by their place in a list."""
    pool = Pool(replicas=4, tp=2, routing="session")
    assert SHAPE is not None
    engines = [engine_of(HARDWARE, SHAPE, pool, prefills_only=False) for _ in range(4)]
    fluid = FluidPool(Fluid(pool=pool), engines, 4, 1, random.Random(0), None)
    roles: dict[str, Role] = {member.name: "decode" for member in fluid.members}
    fluid._take(roles)
    homes = {session: fluid.to_decode(session).index for session in map(str, range(200))}
    assert {*homes.values()} == {0, 1, 2, 3}
    fluid._take({**roles, fluid.members[0].name: "prefill"})
    assert {session for session, home in homes.items() if fluid.to_decode(session).index != home} == {
        session for session, home in homes.items() if home == 0
    }


def test_a_retention_interval_lets_the_second_prompt_hit() -> None:
    given = Trace.of([
        TrafficRequest(name, name, (("system", 1600), (name, 100)), 10, at_s=at_s)
        for name, at_s in (("a", 0.0), ("b", 60.0))
    ])  # fmt: skip
    kept = Pool(tp=2, engine_kwargs={"prefix_cache_retention_interval": 512})
    computed = [simulated(given, Collocated(pool=pool)).computed_tokens for pool in (Pool(tp=2), kept)]
    assert computed == [[1700, 1700], [1700, 1700 - 1536]]


def test_the_same_again() -> None:
    assert simulated(trace("agents.yaml")) == simulated(trace("agents.yaml"))


@pytest.mark.parametrize("kind", ["collocated", "pd", "fluid"])
def test_sessions_that_stick_hit_more(kind: str) -> None:
    """Of four engines a follow-up finds its parent's prompt on one alone."""
    given = trace("agents.yaml")

    def under(routing: Routing) -> SimulatedLevel:
        pool = Pool(replicas=4, tp=1, routing=routing)
        topology: Topology = Collocated(pool=pool)
        if kind == "pd":
            topology = Disaggregated(placement="pack", prefill=pool, decode=pool)
        elif kind == "fluid":
            topology = Fluid(pool=pool, roles="2:2")
        return simulated(given, topology)

    apart, together = under("power-of-two"), under("session")
    if kind == "fluid":  # sessions of decode alone stick: what they have need not be moved
        assert together.transferred_bytes < 0.8 * apart.transferred_bytes
        return
    assert together.hit_share > apart.hit_share + 0.1
    if kind == "pd":
        assert together.transferred_bytes < 0.8 * apart.transferred_bytes
    else:
        assert abs(under("round-robin").hit_share - apart.hit_share) < 0.15


def test_prompts_go_where_their_beginning_is_cached() -> None:
    """Four engines prefill: without affinity a follow-up is sent to any of them."""
    given = trace("agents.yaml")
    shares = {}
    for affinity in (False, True):
        pool = Fluid(pool=Pool(replicas=8, tp=1), roles="4:4", prefix_affinity=affinity)
        shares[affinity] = simulated(given, pool, hybrid=False).hit_share
    assert shares[True] > shares[False] + 0.1


def fluid_pool(topology: Fluid, sparse: bool = False) -> FluidPool:
    assert SHAPE is not None
    engines = [engine_of(HARDWARE, SHAPE, topology.pool, prefills_only=False) for _ in range(topology.pool.replicas)]
    return FluidPool(topology, engines, 4, 1, random.Random(0), None, pool_tokens=100_000, sparse=sparse)


CHUNKS = tuple(range(1, 33))  # 2,048 tokens


def test_a_prompt_goes_to_who_has_it_as_long_as_that_ends_earlier() -> None:
    pool = fluid_pool(Fluid(pool=Pool(replicas=4, tp=1), roles="3:1", prefix_affinity=True))
    first = pool.arrives(2100, None, CHUNKS)
    assert (first.waits, first.computed) == (2100, 2100)
    pool.enters(first, 0.0)
    pool.prefilled(first, 0.2)
    pool.report(0.2, 0.0)
    again = [pool.arrives(2200, None, CHUNKS) for _ in range(3)]
    assert {sent.prefiller.name for sent in again} == {first.prefiller.name}
    assert {sent.waits for sent in again} == {256}, "a step takes as long as so many tokens at least"
    pool.report(0.0, 0.0)
    first.prefiller.waiting_tokens = 50_000
    away = pool.arrives(2200, None, CHUNKS)
    assert away.prefiller is not first.prefiller and away.waits == 2200
    pool.report(0.0, 0.0)
    assert pool.arrives(2200, None, tuple(range(500, 532))).waits == 2200, "another beginning"


def test_a_follow_up_stays_where_its_parent_has_ended_since_the_last_tell() -> None:
    """What an engine had to do a moment ago is no reason to move away from it."""
    for seed in range(10):
        pool = fluid_pool(Fluid(pool=Pool(replicas=3, tp=1), roles="2:1", prefix_affinity=True))
        pool.random.seed(seed)
        first = pool.arrives(2100, None, CHUNKS)
        pool.report(0.0, 0.0)  # it still waits there
        pool.enters(first, 0.0)
        pool.prefilled(first, 0.06)
        assert first.prefiller.reported[0] == 2100 and first.prefiller.waiting_tokens == 0
        assert pool.arrives(2200, None, CHUNKS).prefiller is first.prefiller


def test_a_follow_up_stays_where_most_of_it_is_though_others_have_all_but_little() -> None:
    """A step costs as much as `LEAST_TOKENS`, so that both would be done at once."""
    for seed in range(10):
        pool = fluid_pool(Fluid(pool=Pool(replicas=3, tp=1), roles="2:1", prefix_affinity=True))
        pool.random.seed(seed)
        parent, other = pool.prefilling
        pool._keep(parent, CHUNKS[:15], pulled=False)
        pool._keep(other, CHUNKS[:13], pulled=False)
        assert pool.arrives(1000, None, CHUNKS[:15]).prefiller is parent


def test_a_fork_is_credited_by_the_rule_of_windowed_layers() -> None:
    """As `tests/roles/test_prefixes.py` has it of the application: the third prompt with that beginning finds it."""
    for sparse, computed in ((True, [2500, 2500, 452]), (False, [2500, 452, 452])):
        pool = fluid_pool(Fluid(pool=Pool(replicas=2, tp=1), roles="1:1", prefix_affinity=True), sparse)
        own = [tuple(range(100 * n, 100 * n + 7)) for n in (1, 2, 3)]
        assert [pool.arrives(2500, None, CHUNKS + each).computed for each in own] == computed


def test_what_is_cached_where_it_is_decoded_counts_as_short() -> None:
    """A follow-up of few new tokens stays with the engine that has decoded its parent."""
    requests = [
        TrafficRequest("a", "s", (("u", 3200),), 20, at_s=0.0),
        TrafficRequest("b", "s", (("v", 100),), 5, parent="a", gap_s=1.0),
    ]
    pool = Fluid(pool=Pool(replicas=2, tp=2), roles="1:1", prefill_locally_below=500)
    level = simulated(Trace.of(requests), pool, hybrid=False)
    assert level.kv_arrived_s[0] > 0 and level.kv_arrived_s[1] == 0
    assert level.computed_tokens[1] < 200


def test_a_prompt_that_stays_is_part_of_decode_and_no_prefill() -> None:
    """As in a served pool: its engine still shows how long its decode steps take."""
    pool = fluid_pool(Fluid(pool=Pool(replicas=2, tp=1), roles="1:1", prefill_locally_below=1000))
    for tokens, busy_s in ((999, 0.0), (1000, 0.4)):
        sent = pool.arrives(tokens, None, ())
        assert sent.local is (tokens < 1000)
        pool.enters(sent, 0.0)
        pool.prefilled(sent, 0.4)
        load = sent.prefiller.load(0.5)
        assert (load.prefill_busy_s, load.prefilled_tokens) == (busy_s, 0 if sent.local else tokens)
