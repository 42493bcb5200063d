"""What holds of every simulation, whatever the deployment and the load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool, Serving, parse_label
from pdlab.core.lengths import parse_lengths
from pdlab.core.model_size import kv_bytes
from pdlab.core.workload import Closed, Level, Load, Open, Ramp, Workload
from pdlab.sim.engine import Engine
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import Trace, empty_level, figures, records, to_run
from pdlab.sim.simulator import System, _FluidSystem, simulate
from pdlab.sim.step_time import kv_capacity_tokens

pytestmark = pytest.mark.property


HARDWARE = load_hardware("h100-vllm-0.11")
WORKLOAD = Workload()


def gpt_oss() -> ModelShape:
    shape = require_shape("gpt-oss-120b")
    return shape


SHAPE = gpt_oss()


@pytest.mark.parametrize(
    "load", [Closed(concurrency=8), Open(rate_rps=4.0, burstiness=0.5), Ramp(start_rps=1, end_rps=8)]
)
@pytest.mark.parametrize("text", ["uniform:0.8-1.0", "lognormal:0.5"])
def test_requests_have_the_lengths_that_a_sweep_would_draw(load: Load, text: str) -> None:
    """Whatever the deployment and the simulator's own seed."""
    workload = Workload(input_tokens=2000, output_tokens=50, lengths=parse_lengths(text))
    level = Level(load=load, repeat=1, num_requests=40, seed=3)
    drawn = workload.draw(level)
    for label, seed in (("collocated-1xtp2", 0), ("pd-pack-p1xtp2-d1xtp2", 7)):
        deployment = Deployment(model="gpt-oss-120b", topology=parse_label(label))
        (done,) = simulate(deployment, [level], workload, HARDWARE, SHAPE, seed=seed)
        assert list(zip(done.input_tokens, done.output_tokens, strict=True)) == list(drawn)
        run = to_run(done, label, workload)
        assert run.requested_tokens == (fmean(a for a, _ in drawn), fmean(b for _, b in drawn))
        rates = (run.whole.input_tokens_per_s, run.whole.output_tokens_per_s)
        assert rates == pytest.approx(tuple(40 * mean / done.duration_s for mean in run.requested_tokens))


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("label", ["collocated-1xtp2", "pd-spread-p1xtp4-d1xtp2"])
def test_requests_beyond_the_batch_wait_for_a_sequence(label: str, everywhere: bool) -> None:
    """Little's law: of 12 requests in flight 4 decode, and the others wait. It is not KV memory that they wait for."""
    topology, limit = parse_label(label), {"max_num_seqs": 4}
    deployment = Deployment(topology=topology, engine_kwargs=limit)
    if not everywhere:
        role = "pool" if isinstance(topology, Collocated) else "decode"
        pool = getattr(topology, role).model_copy(update={"engine_kwargs": limit})
        deployment = Deployment(topology=topology.model_copy(update={role: pool}))
    level = Level(load=Closed(concurrency=12), num_requests=120, seed=0)
    (full,) = simulate(deployment, [level], WORKLOAD, HARDWARE, SHAPE)
    tpot_s, ttft_s, rate = figures(full)
    assert tpot_s is not None and full.kv_full == 0
    assert 3.4 < rate * (WORKLOAD.output_tokens - 1) * tpot_s <= 4
    (free,) = simulate(Deployment(topology=topology), [level], WORKLOAD, HARDWARE, SHAPE)
    assert ttft_s > 3 * figures(free).ttft_s


@pytest.mark.parametrize("label", ["collocated-4xtp2", "pd-spread-p1xtp4-d4xtp2", "pd-pack-p2xtp2-d4xtp1"])
def test_direct_streaming_gives_every_replica_one_of_as_many_requests(label: str) -> None:
    """In turn, so that none decodes beside another; two choices have some meet."""
    level = Level(load=Closed(concurrency=4), num_requests=4, seed=0)

    def tpots_s(direct: bool, seed: int) -> set[float]:
        deployment = Deployment(topology=parse_label(label), serving=Serving(direct_streaming=direct))
        (done,) = simulate(deployment, [level], WORKLOAD, HARDWARE, SHAPE, seed=seed)
        steps = zip(done.first_token_s, done.finish_s, strict=True)
        return {round(finish_s - first_s, 6) for first_s, finish_s in steps}

    assert [len(tpots_s(True, seed)) for seed in range(6)] == [1] * 6
    assert max(len(tpots_s(False, seed)) for seed in range(6)) > 1


@pytest.mark.parametrize("label", ["collocated-1xtp4", "pd-spread-p1xtp4-d1xtp4"])
def test_direct_streaming_changes_nothing_where_there_is_nothing_to_choose(label: str) -> None:
    level = Level(load=Closed(concurrency=8), num_requests=40, seed=0)
    ways = [Deployment(topology=parse_label(label), serving=Serving(direct_streaming=on)) for on in (False, True)]
    apart, in_turn = (simulate(each, [level], WORKLOAD, HARDWARE, SHAPE)[0] for each in ways)
    assert in_turn == apart


def test_lengths_that_vary_end_the_march_in_step() -> None:
    """Equal requests of a closed loop come in waves, and wait for the wave: that is the workload's doing."""
    deployment = Deployment(model="gpt-oss-120b", topology=parse_label("collocated-1xtp8"))
    level = Level(load=Closed(concurrency=32), num_requests=640, seed=0)

    def ttft_s(text: str) -> float:
        workload = Workload(lengths=parse_lengths(text))
        (done,) = simulate(deployment, [level], workload, HARDWARE, SHAPE)
        ttfts_s = sorted(first - came for first, came in zip(done.first_token_s, done.arrival_s, strict=True))
        return ttfts_s[320]

    assert ttft_s("fixed") > 2 * ttft_s("uniform:0.8-1.2")


def test_scattered_blocks_are_what_a_pool_comes_to() -> None:
    """A pack of equal TP: young at first, copied one by one once a pool has wrapped."""
    deployment, load = Deployment(topology=parse_label("pd-pack-p1xtp4-d1xtp4")), Closed(concurrency=43)

    def tpot_s(scattered: bool | None, count: int, part: slice) -> float:
        (done,) = simulate(
            deployment,
            [level(load, count)],
            Workload(),
            load_hardware("h100-vllm-0.11"),
            gpt_oss(),
            scattered=scattered,
        )
        return fmean((f - s) / 249 for f, s in zip(done.finish_s[part], done.first_token_s[part], strict=True))

    young, aged = tpot_s(None, 1500, slice(100, 500)), tpot_s(None, 1500, slice(1000, 1400))
    assert aged > 1.7 * young
    # Fixed lengths march in step, in another step each time.
    assert tpot_s(True, 1500, slice(1000, 1400)) == pytest.approx(aged, rel=0.15)
    assert tpot_s(True, 500, slice(100, 500)) > 1.5 * young, "from the start"
    assert tpot_s(False, 1500, slice(1000, 1400)) == pytest.approx(young, rel=0.05)


def level(load: Load, count: int) -> Level:
    return Level(load=load, num_requests=count, seed=0)


pools = st.builds(Pool, replicas=st.integers(1, 3), tp=st.sampled_from([1, 2, 4]))
deployments = st.one_of(
    st.builds(lambda pool: Deployment(topology=Collocated(pool=pool)), pools),
    st.builds(
        lambda prefill, decode, placement: Deployment(
            topology=Disaggregated(prefill=prefill, decode=decode, placement=placement)
        ),
        pools,
        pools,
        st.sampled_from(["pack", "spread"]),
    ),
)
loads = st.one_of(
    st.builds(Closed, concurrency=st.integers(1, 40)),
    st.builds(Open, rate_rps=st.floats(0.5, 40), burstiness=st.sampled_from([0.5, 1.0, 4.0])),
)
workloads = st.builds(Workload, input_tokens=st.integers(1, 12_000), output_tokens=st.integers(1, 400))


@settings(max_examples=60, deadline=None)
@given(
    deployment=deployments,
    loads=st.lists(loads, min_size=1, max_size=3),
    workload=workloads,
    count=st.integers(1, 60),
    repeated=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_request_goes_through_once_and_in_order(
    deployment: Deployment,
    loads: list[Load],
    workload: Workload,
    count: int,
    repeated: bool,
    seed: int,
) -> None:
    levels = [level(load, count) for load in loads]
    simulated = simulate(
        deployment,
        levels,
        workload,
        HARDWARE,
        SHAPE,
        seed=seed,
        prompts="repeated" if repeated else "fresh",
    )
    for one in simulated:
        assert len(one.arrival_s) == len(one.finish_s) == count
        for i in range(count):
            stages = [one.arrival_s[i], one.prefill_start_s[i], one.prefill_end_s[i]]
            if isinstance(deployment.topology, Disaggregated):
                stages.append(one.kv_arrived_s[i])
            stages += [one.first_token_s[i], one.finish_s[i]]
            assert stages == sorted(stages)
            assert one.finish_s[i] > 0
            assert (one.finish_s[i] > one.first_token_s[i]) == (workload.output_tokens > 1)
        assert all(record.ok for record in records(one))
        run = to_run(one, "x", workload)
        tpot, ttft, rate = figures(one)
        assert run.whole.ttft is not None and run.whole.ttft.mean_s == pytest.approx(ttft)
        assert run.whole.requests_per_s == pytest.approx(rate)
        assert (run.whole.tpot is None) == (tpot is None)


@settings(max_examples=25, deadline=None)
@given(deployment=deployments, load=loads, seed=st.integers(0, 3))
def test_same_seed_same_bytes(deployment: Deployment, load: Load, seed: int) -> None:
    def once() -> str:
        return repr(simulate(deployment, [level(load, 30)], WORKLOAD, HARDWARE, SHAPE, seed=seed))

    assert once() == once()


@settings(max_examples=25, deadline=None)
@given(deployment=deployments, load=loads)
def test_number_in_system_integrates_to_the_sum_of_latencies(deployment: Deployment, load: Load) -> None:
    """Little's law in its exact form, for a system that starts and ends empty."""
    (one,) = simulate(deployment, [level(load, 40)], WORKLOAD, HARDWARE, SHAPE)
    changes = sorted([(moment, 1) for moment in one.arrival_s] + [(moment, -1) for moment in one.finish_s])
    area, inside, last_s = 0.0, 0, 0.0
    for moment_s, change in changes:
        area += inside * (moment_s - last_s)
        inside, last_s = inside + change, moment_s
        if isinstance(load, Closed):
            assert inside <= load.concurrency
    assert inside == 0
    assert area == pytest.approx(sum(one.finish_s) - sum(one.arrival_s))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Share of its KV memory that each engine holds whenever it plans a step."""
    shares: list[float] = []
    plan = Engine.plan

    def watching(engine: Engine, now_s: float, system: object) -> float | None:
        ends_s = plan(engine, now_s, system)  # type: ignore[arg-type]
        shares.append((engine.held_tokens + engine.steps * len(engine.running)) / engine.capacity)
        assert engine.held_tokens >= -1e-6
        return ends_s

    monkeypatch.setattr(Engine, "plan", watching)
    yield shares


def test_kv_memory_is_never_overdrawn(watched: list[float]) -> None:
    """A TP1 engine holds about a dozen prompts; 40 at once, with long answers, fill and preempt it."""
    deployment = Deployment(topology=Collocated(pool=Pool(tp=1)))
    (one,) = simulate(deployment, [level(Closed(concurrency=40), 80)], Workload(output_tokens=2000), HARDWARE, SHAPE)
    assert one.preemptions > 0
    again = sum(one.computed_tokens) - sum(one.input_tokens)
    assert 0 < again < 5000 * one.preemptions, "a preempted request finds those of its blocks that nobody took"
    assert 0.97 < max(watched) <= 1 + 1e-9
    watched.clear()
    pd = Deployment(topology=parse_label("pd-pack-p2xtp1-d1xtp1"))
    simulate(pd, [level(Closed(concurrency=40), 80)], Workload(), HARDWARE, SHAPE)
    assert max(watched) <= 1 + 1e-9


@settings(max_examples=20, deadline=None)
@given(label=st.sampled_from(["pd-pack-p1xtp2-d2xtp2", "pd-spread-p2xtp1-d1xtp4"]), count=st.integers(1, 40))
def test_kv_bytes_over_the_links_are_those_of_the_prompts(label: str, count: int) -> None:
    deployment = Deployment(topology=parse_label(label))
    (fresh,) = simulate(deployment, [level(Closed(concurrency=8), count)], WORKLOAD, HARDWARE, SHAPE)
    assert fresh.transferred_bytes == pytest.approx(count * kv_bytes(SHAPE, 5000, hybrid=False))
    (shared,) = simulate(
        deployment, [level(Closed(concurrency=8), count)], WORKLOAD, HARDWARE, SHAPE, prefix_hit_rate=0.4
    )
    assert shared.transferred_bytes == pytest.approx(0.6 * fresh.transferred_bytes)


def test_repeated_prompts_are_computed_and_moved_once() -> None:
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    levels = [level(Closed(concurrency=8), 40)] * 2
    first, second = simulate(deployment, levels, WORKLOAD, HARDWARE, SHAPE, prompts="repeated")
    assert sum(first.computed_tokens) == pytest.approx(40 * 5000, rel=0.01)
    assert sum(second.computed_tokens) < 40 * 16 + 1
    assert second.transferred_bytes == 0


@pytest.mark.parametrize("label", ["collocated-1xtp2", "collocated-1xtp8", "pd-spread-p1xtp4-d1xtp4"])
def test_concurrency_1_is_the_closed_form(label: str) -> None:
    """One request after another: every step is known beforehand."""
    from pdlab.sim.kv_transfer import transfer_costs
    from pdlab.sim.step_time import step_costs

    deployment = Deployment(topology=parse_label(label))
    (one,) = simulate(deployment, [level(Closed(concurrency=1), 3)], WORKLOAD, HARDWARE, SHAPE)
    topology, value = deployment.topology, HARDWARE.value
    if isinstance(topology, Collocated):
        first, then = topology.pool, topology.pool
        extra_s = value("overhead_ms") * 1e-3
    else:
        first, then = topology.prefill, topology.decode
        costs = transfer_costs(HARDWARE, SHAPE, topology, "srd")
        extra_s = value("pd_overhead_ms") * 1e-3 + costs.setup_s
        extra_s += 5000 * costs.bytes_per_token / min(costs.prefill_bytes_per_s, costs.decode_bytes_per_s)
        extra_s += 5000 * costs.post_s_per_token
        extra_s += (
            step_costs(HARDWARE, SHAPE, then).step_s(1, 0, 5000)
            + 5000 / HARDWARE.block_tokens * value("admit_us") * 1e-6
        )
    extra_s += 5000 * value("ingress_us") * 1e-6 + 5000 / HARDWARE.block_tokens * value("admit_us") * 1e-6
    ttft_s = value("frontend_ms") * 1e-3 + extra_s + step_costs(HARDWARE, SHAPE, first).step_s(0, 5000, 2500)
    decode = step_costs(HARDWARE, SHAPE, then)
    tpot_s = math.fsum(decode.step_s(1, 0, 5000 + made) for made in range(1, 250)) / 249
    tpot, ttft, rate = figures(one)
    assert ttft == pytest.approx(ttft_s, rel=0.005)
    assert tpot == pytest.approx(tpot_s, rel=0.002)
    assert one.duration_s == pytest.approx(3 / rate)


@pytest.mark.parametrize("role", ["prefill", "decode", "collocated"])
def test_more_gpus_of_a_role_never_lower_its_capacity(role: str) -> None:
    """All requests at once, one role doing nearly all the work: the time to empty the system falls."""
    workload = {
        "prefill": Workload(output_tokens=1),
        "decode": Workload(input_tokens=16, output_tokens=400),
        "collocated": WORKLOAD,
    }[role]
    durations = []
    for replicas in (1, 2, 4):
        pool, other = Pool(replicas=replicas, tp=2), Pool(replicas=4, tp=2)
        if role == "collocated":
            deployment = Deployment(topology=Collocated(pool=pool))
        else:
            both = (pool, other) if role == "prefill" else (other, pool)
            deployment = Deployment(topology=Disaggregated(prefill=both[0], decode=both[1], placement="spread"))
        trace = Trace((0.0,) * 120, (workload.input_tokens,) * 120, (workload.output_tokens,) * 120)
        (one,) = simulate(
            deployment,
            [level(Open(rate_rps=1), 120)],
            workload,
            HARDWARE,
            SHAPE,
            trace=trace,
        )
        durations.append(one.duration_s)
    assert durations == sorted(durations, reverse=True)
    room = [kv_capacity_tokens(HARDWARE, SHAPE, Pool(tp=tp)) for tp in (1, 2, 4, 8)]
    assert room == sorted(room)


def test_contention_on_a_shared_wire_is_seen() -> None:
    """TCP carries one node's transfers one after another: TTFT grows by what they take."""
    deployment = Deployment(topology=parse_label("pd-spread-p2xtp4-d2xtp4"))
    srd, tcp = (
        simulate(deployment, [level(Closed(concurrency=16), 64)], WORKLOAD, HARDWARE, SHAPE, link=link)[0]
        for link in ("srd", "tcp")
    )
    wire_s = 64 * kv_bytes(SHAPE, 5000, hybrid=False) / (HARDWARE.value("tcp_gb_per_s") * 1e9)
    assert tcp.duration_s > wire_s > srd.duration_s
    assert tcp.link_busy > 0.9 > srd.link_busy


def test_a_ramp_takes_as_long_as_its_rates_say() -> None:
    """n requests over the integral of 1 / rate: the mean rate of the load's formula, but for the luck of the gaps."""
    load = Ramp(start_rps=1, end_rps=9)
    (one,) = simulate(
        Deployment(topology=parse_label("collocated-2xtp4")),
        [level(load, 4000)],
        Workload(output_tokens=1),
        HARDWARE,
        SHAPE,
    )
    assert 4000 / one.arrival_s[-1] == pytest.approx(load.mean_rps, rel=0.05)


def test_what_requests_hold_grows_from_prefill_to_their_end() -> None:
    """One request of 100 tokens from 0 to 10 s, whose 100 answers come from 5 s on: above 150 a quarter of the time."""
    level = empty_level(
        Level(load=Closed(concurrency=1), num_requests=1, seed=0), Workload(input_tokens=100, output_tokens=100), None
    )
    level.first_token_s, level.finish_s, level.duration_s = [5.0], [10.0], 10.0
    assert level.share_above(99) == pytest.approx(1.0, abs=0.01)
    assert level.share_above(150) == pytest.approx(0.25, abs=0.01)
    assert level.share_above(200) == 0.0


@pytest.mark.parametrize("kind", [System, _FluidSystem])
def test_systems_have_only_slots(kind: type) -> None:
    """Python 3.11 calls the methods of an object with more than 30 other attributes slowly."""
    assert all("__slots__" in vars(each) for each in kind.__mro__ if each is not object)
