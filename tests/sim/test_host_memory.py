"""KV cache in host memory in the simulator: what is loaded, when it is there, and what cannot be simulated."""

from __future__ import annotations

import pytest

from pdlab.core.catalog import known_gpus, load_model
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.workload import Level, Open, Workload
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import simulate
from pdlab.sim.vllm_engine import simulate_with_vllm
from pdlab.traffic.host_cache import HostCache
from pdlab.traffic.prompts import PromptBlocks
from pdlab.traffic.requests import TrafficRequest

HARDWARE = load_hardware("h100-vllm-0.11").model_copy(update={"hybrid_kv": True})
SHAPE = load_model("gpt-oss-120b")
BLOCK = HARDWARE.block_tokens
LAYER_BYTES = 2 * 8 * 64 * 2  # K and V, 8 heads of 64 values in bfloat16, of one token
FORK = Trace.of(
    [TrafficRequest(f"r{n}", f"r{n}", (("system", 2000), (f"own{n}", 100)), 20, at_s=100.0 * n) for n in range(4)]
)


def simulated(
    gb: float | None,
    label: str = "collocated-1xtp2",
    given: Trace = FORK,
    hardware: Hardware = HARDWARE,
    **more: object,
) -> SimulatedLevel:
    assert SHAPE is not None
    deployment = Deployment(topology=parse_label(label), kv_offload_gb=gb, **more)
    level = Level(load=Open(rate_rps=1.0), num_requests=len(given.arrival_s), seed=0)
    return simulate(deployment, [level], Workload(), hardware, SHAPE, trace=given)[0]


@pytest.mark.parametrize("label", ["collocated-1xtp2", "pd-pack-p1xtp2-d1xtp2"])
def test_the_second_of_a_fork_hits_in_host_memory(label: str) -> None:
    """Stores keep every window, the device only that before a prompt's end."""
    assert simulated(None, label).computed_tokens == [2100, 2100, 100, 100]
    assert simulated(100, label).computed_tokens == [2100, 100, 100, 100]


def test_loading_takes_the_time_of_the_link() -> None:
    """Of 125 blocks of 18 full layers and 8 of 18 windowed ones over two GPUs."""
    level = simulated(100)
    rate = known_gpus()["H100"].host_gb_per_s
    assert rate is not None
    loads_s = (125 + 8) * BLOCK * 18 * LAYER_BYTES / (2 * rate * 1e9)
    waits_s = [begin - queued for begin, queued in zip(level.prefill_start_s, level.queued_s, strict=True)]
    assert waits_s[1] == pytest.approx(loads_s, rel=1e-6)
    assert waits_s[0] == waits_s[2] == pytest.approx(0.0, abs=1e-9)


def test_host_memory_of_no_room_changes_nothing() -> None:
    assert simulated(0.001).computed_tokens == simulated(None).computed_tokens


def test_what_was_evicted_comes_back_from_host_memory() -> None:
    """Three prompts take turns in a pool that holds one."""
    prompts = [(("a", 30_000),), (("b", 30_000),), (("c", 30_000),)]
    given = Trace.of([TrafficRequest(f"r{n}", f"r{n}", prompts[n % 3], 2, at_s=60.0 * n) for n in range(9)])
    pool = parse_label("collocated-1xtp2")
    arguments = {"kv_cache_memory_bytes": int(1.2 * 30_000 * 36 * LAYER_BYTES / 2 / 2)}
    pool = pool.model_copy(update={"pool": pool.pool.model_copy(update={"engine_kwargs": arguments})})

    def computed(gb: float | None) -> list[float]:
        assert SHAPE is not None
        level = Level(load=Open(rate_rps=1.0), num_requests=9, seed=0)
        deployment = Deployment(topology=pool, kv_offload_gb=gb)
        return simulate(deployment, [level], Workload(), HARDWARE, SHAPE, trace=given)[0].computed_tokens

    assert computed(None) == [30_000] * 9
    assert computed(100)[3:] == [16] * 6
    assert computed(2.5)[3:] == [30_000] * 6, "room for two of three, in turn: what comes next was just evicted"


def test_a_link_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--kv-offload-gb 100: .* to CPU engines is unknown: add host_gb_per_s"):
        simulated(100, hardware=HARDWARE.model_copy(update={"gpu_type": None}))


def test_other_stores_are_refused() -> None:
    with pytest.raises(UsageError, match="--kv-connector LMCacheConnectorV1 is not simulated"):
        simulated(None, kv_connectors=({"kv_connector": "LMCacheConnectorV1"},))


def test_the_second_fidelity_refuses_it() -> None:
    assert SHAPE is not None
    deployment = Deployment(topology=parse_label("pd-pack-p1xtp2-d1xtp2"), kv_offload_gb=10)
    level = Level(load=Open(rate_rps=1.0), num_requests=4, seed=0)
    with pytest.raises(UsageError, match="MultiConnector"):
        simulate_with_vllm(deployment, [level], Workload(), HARDWARE, SHAPE, trace=FORK)


def test_a_prompt_larger_than_host_memory_stores_nothing() -> None:
    host = HostCache(9, BLOCK)
    long = PromptBlocks(10 * BLOCK, tuple(range(10)))
    host.computed(long, 0, 0)
    assert host.load(long, 0).tokens == 0
    short = PromptBlocks(9 * BLOCK, tuple(range(9)))
    host.computed(short, 0, 0)
    assert host.load(long, 2 * BLOCK).tokens == 7 * BLOCK
    assert host.load(long, 2 * BLOCK).blocks == 7
