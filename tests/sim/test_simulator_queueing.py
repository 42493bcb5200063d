"""The simulator against queueing theory: one engine that serves one prompt after another is a single server."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.core.workload import Level, Open, Workload
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.level import Trace
from pdlab.sim.simulator import simulate
from pdlab.sim.step_time import step_costs

POOL = Pool(tp=4)
DEPLOYMENT = Deployment(topology=Collocated(pool=POOL))
NO_OVERHEAD = ("launch_ms", "sync_ms", "frontend_ms", "overhead_ms", "ingress_us", "admit_us", "eager_ms")


def bare(step_tokens: int) -> Hardware:
    """An engine without overheads, and with memory so fast that a step is as long as its prefill tokens say."""
    hardware = load_hardware("h100-vllm-0.11")
    bare_values = {**dict.fromkeys(NO_OVERHEAD, 0.0), "memory_gb_per_s": 1e12}
    have = {name: value for name, value in bare_values.items() if name in hardware.constants}
    return hardware.with_values(have).model_copy(update={"step_tokens": step_tokens})


def waits_s(hardware: Hardware, arrival_s: list[float], tokens: list[int]) -> tuple[float, float]:
    """(mean TTFT, mean service time) of prompts with one output token each, in seconds."""
    shape = require_shape("gpt-oss-120b")
    # Attention makes service depend on position; without it, time is proportional to tokens.
    shape = shape.model_copy(update={"full_attention_layers": 0})
    trace = Trace(tuple(arrival_s), tuple(tokens), (1,) * len(tokens))
    level = Level(load=Open(rate_rps=1), num_requests=len(tokens), seed=0)
    (one,) = simulate(DEPLOYMENT, [level], Workload(output_tokens=1), hardware, shape, trace=trace)
    per_token_s = step_costs(hardware, shape, POOL).step_s(0, 4096, 0) / 4096
    ttft_s = statistics.fmean(f - a for f, a in zip(one.first_token_s, one.arrival_s, strict=True))
    return ttft_s, per_token_s


def poisson(rng: random.Random, rate_rps: float, count: int) -> list[float]:
    return list(itertools.accumulate(rng.expovariate(rate_rps) for _ in range(count)))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_m_d_1(load: float) -> None:
    """Poisson arrivals, prompts of one length: mean time in system D + rho D / (2 (1 - rho)) (Pollaczek-Khinchine)."""
    hardware, tokens, count = bare(4096), 4096, 40_000
    _, per_token_s = waits_s(hardware, [0.0], [tokens])
    service_s = tokens * per_token_s
    ttft_s, _ = waits_s(hardware, poisson(random.Random(5), load / service_s, count), [tokens] * count)
    assert ttft_s == pytest.approx(service_s * (1 + load / (2 * (1 - load))), rel=0.04)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_m_m_1(load: float) -> None:
    """Poisson arrivals, exponential prompt lengths, served in chunks much smaller than these: mean time in
    system S / (1 - rho)."""
    chunk, mean_tokens, count = 16, 400, 12_000
    hardware = bare(chunk)
    _, per_token_s = waits_s(hardware, [0.0], [4096])
    rng = random.Random(7)
    tokens = [1 + int(rng.expovariate(1 / mean_tokens)) for _ in range(count)]
    service_s = statistics.fmean(tokens) * per_token_s
    ttft_s, _ = waits_s(hardware, poisson(rng, load / service_s, count), tokens)
    assert ttft_s == pytest.approx(service_s / (1 - load), rel=0.06)
