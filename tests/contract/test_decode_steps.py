"""What a hand-over costs in decode steps: vLLM's own engine core with the guard, beside the simulator's engine."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from contract.engine_core import OUTPUT, PROMPT, VirtualCore
from contract.test_kv_guard import connector, guard_scheduler, vllm_config  # noqa: F401

from pdlab.core.catalog import load_model
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import Closed, Level, Load, Open, Workload
from pdlab.sim.hand_over import hand_over_of
from pdlab.sim.hardware import Constant, Hardware, load_hardware
from pdlab.sim.level import SimulatedLevel, Trace, figures
from pdlab.sim.simulator import simulate
from pdlab.sim.vllm_engine import simulate_with_vllm

pytestmark = pytest.mark.usefixtures("import_warnings_aside")

HOME = load_hardware("h100-vllm-0.11")
SHAPE = load_model("gpt-oss-120b")
PD = Deployment(topology=parse_label("pd-spread-p1xtp2-d1xtp2"))
STEP_S = 0.060
REQUESTS = 40
# Far apart, so that none waits for another, and at every moment of a step.
APART_S = 20.1 * STEP_S
BUSY, IDLE = True, False
SAMPLED = 7  # every token of the executor's


class Steps(NamedTuple):
    """Of a request that was prefilled elsewhere, means in steps. ``handed_over``: all but the wire."""

    until_posted: float
    ended_to_seen: float
    seen_to_first: float
    seen_to_second: float
    handed_over: float


@pytest.fixture(scope="module")
def through_the_core(vllm_config: Any, guard_scheduler: Any) -> Callable[..., Steps]:  # noqa: F811
    """The means of one run of the core in virtual time, made once for each set of arguments."""

    @functools.cache
    def ran(asynchronous: bool, wire_s: float, busy: bool, polls: bool = False, first: int | None = None) -> Steps:
        core = VirtualCore(
            vllm_config, guard_scheduler, asynchronous=asynchronous, step_s=STEP_S, wire_s=wire_s, polls=polls,
            first=first,
        )  # fmt: skip
        served = core.serve([1.0 + number * APART_S for number in range(REQUESTS)], busy=busy)
        assert {each.tokens for each in served} == {(first or SAMPLED, SAMPLED)}
        means = (
            statistics.fmean(each.posted_s - each.arrived_s for each in served),
            statistics.fmean(each.seen_s - each.ended_s for each in served),
            statistics.fmean(each.first_s - each.seen_s for each in served),
            statistics.fmean(each.second_s - each.seen_s for each in served),
            statistics.fmean(each.first_s - each.arrived_s for each in served) - wire_s,
        )
        return Steps(*(mean / STEP_S for mean in means))

    return ran


def with_flags(polls: bool, first: int | None) -> Deployment:
    """`PD` whose decode is told between steps, and is handed a first token."""
    assert PD.transport is not None
    flags = PD.transport.model_copy(update={"kv_poll_s": 0.0005 * polls, "reuse_first_token": first is not None})
    return PD.with_topology(transport=flags)


def with_steps(steps_in_flight: int, hardware: Hardware = HOME) -> Hardware:
    constant = Constant(value=steps_in_flight, unit="steps", basis="assumed", source="this test")
    return hardware.model_copy(update={"constants": hardware.constants | {"steps_in_flight": constant}})


def even_steps(wire_s: float) -> Hardware:
    """Decode steps of `STEP_S` whatever is in them, and a wire that takes so long whatever crosses it."""
    costs = ("sync_ms", "sequence_ms", "unsharded_ns", "eager_ms", "admit_us", "post_us", "fragment_us", "stream_us")
    free = dict.fromkeys(costs, 0.0) | {"ingress_us": 0.0, "experts_in_use": 0.01, "pd_overhead_ms": 0.0}
    fast = {"memory_gb_per_s": 1e9, "tensor_tflops": 1e9, "srd_gb_per_s": 1e9}
    return HOME.with_values({**free, **fast, "launch_ms": 1e3 * STEP_S, "transfer_setup_ms": 1e3 * wire_s})


def handed_over(level: SimulatedLevel, wire_s: float) -> float:
    """In steps, without the first request, which decodes all the time."""
    return (
        statistics.fmean(
            first_s - prefilled_s - wire_s
            for first_s, prefilled_s in list(zip(level.first_token_s, level.prefill_end_s, strict=True))[1:]
        )
        / STEP_S
    )


WITH_EACH_FLAG = pytest.mark.parametrize(
    ("asynchronous", "polls", "first"),
    [*itertools.product((False, True), (False, True), (None, 5))],
    ids=str,
)


@pytest.mark.parametrize("wire_s", [0.005, 0.020, 0.100])
class TestSteps:
    """On a busy engine half a step passes until the read is posted, and with the next launch its end is seen."""

    @WITH_EACH_FLAG
    def test_of_vllms_core(
        self, through_the_core: Callable[..., Steps], asynchronous: bool, polls: bool, first: int | None, wire_s: float
    ) -> None:
        """A step for what was seen to be known, if nobody tells it between steps, and one to compute, with two steps in
        flight each twice as long. What is computed then is the second token, where prefill's first is handed over."""
        core = through_the_core(asynchronous, wire_s, BUSY, polls, first)
        assert core.until_posted == pytest.approx(0.5, abs=0.05)
        assert core.ended_to_seen == pytest.approx(1 - wire_s / STEP_S % 1, abs=0.01)
        in_flight, waits = 2 if asynchronous else 1, hand_over_of(with_flags(polls, first).transport)
        known = waits.known * in_flight
        assert core.seen_to_first == pytest.approx(known + waits.first * in_flight, abs=0.01)
        assert core.seen_to_second == pytest.approx(known + in_flight + waits.first, abs=0.01)
        arrival_to_first = core.ended_to_seen + core.seen_to_first
        assert not (polls and first) or arrival_to_first <= 1, "of a goal of 1.5"

    @WITH_EACH_FLAG
    def test_both_simulators_have_them(
        self, through_the_core: Callable[..., Steps], asynchronous: bool, polls: bool, first: int | None, wire_s: float
    ) -> None:
        core = through_the_core(asynchronous, wire_s, BUSY, polls, first)
        assert SHAPE is not None
        arrivals_s = (0.0, *(1.0 + number * APART_S for number in range(REQUESTS)))
        trace = Trace(arrivals_s, (PROMPT,) * len(arrivals_s), (900, *(OUTPUT,) * REQUESTS))
        level = Level(load=Open(rate_rps=trace.rate_rps), num_requests=len(arrivals_s), seed=0)
        workload, hardware = Workload(input_tokens=PROMPT, output_tokens=1), even_steps(wire_s)
        deployment, steps = with_flags(polls, first), 2 if asynchronous else 1
        (one,) = simulate(deployment, [level], workload, with_steps(steps, hardware), SHAPE, trace=trace)
        (other,) = simulate_with_vllm(
            deployment, [level], workload, hardware, SHAPE, trace=trace, asynchronous=asynchronous
        )
        second = (core.seen_to_second - core.seen_to_first) * STEP_S
        for made in (one, other):
            assert handed_over(made, wire_s) == pytest.approx(core.handed_over, abs=0.1)
            ends_s = list(zip(made.first_token_s, made.finish_s, strict=True))[1:]
            assert statistics.fmean(end_s - first_s for first_s, end_s in ends_s) == pytest.approx(second, rel=0.01)

    @pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
    def test_an_idle_engine_waits_for_the_wire_alone(
        self, through_the_core: Callable[..., Steps], asynchronous: bool, wire_s: float
    ) -> None:
        core = through_the_core(asynchronous, wire_s, IDLE)
        assert core.handed_over == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("load", [Closed(concurrency=4), Closed(concurrency=16), Open(rate_rps=4)], ids=str)
@pytest.mark.parametrize(("steps", "asynchronous"), [(1, False), (2, True)], ids=["sync", "async"])
@pytest.mark.parametrize("deployment", [PD, Deployment(topology=parse_label("collocated-1xtp2"))], ids=["pd", "one"])
def test_ttft_of_loads(deployment: Deployment, steps: int, asynchronous: bool, load: Load) -> None:
    """The simulator beside vLLM's scheduler in virtual time: TTFT within 2 %, the rest within half a percent."""
    assert SHAPE is not None
    level, workload = Level(load=load, num_requests=48, seed=0), Workload(input_tokens=3000, output_tokens=100)
    (one,) = simulate(deployment, [level], workload, with_steps(steps), SHAPE)
    (other,) = simulate_with_vllm(deployment, [level], workload, HOME, SHAPE, asynchronous=asynchronous)
    mine, vllms = figures(one), figures(other)
    assert mine.ttft_s == pytest.approx(vllms.ttft_s, rel=0.02)
    assert mine.tpot_s == pytest.approx(vllms.tpot_s, rel=0.005)
    assert mine.requests_per_s == pytest.approx(vllms.requests_per_s, rel=0.005)
