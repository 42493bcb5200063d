"""Engine arguments of vLLM in predictions: what they change, and which have an effect that nothing knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, Pool, parse_label
from pdlab.core.workload import Closed, Level, Workload
from pdlab.deploy.engine_arguments import known_arguments
from pdlab.sim.argument_effects import KERNELS, NOT_SIMULATED, SIMULATED, unknown_effects
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.level import figures, gaps
from pdlab.sim.simulator import simulate
from pdlab.sim.step_time import kv_capacity_tokens

HOME = load_hardware("h100-vllm-0.11")
CPU = load_hardware("cpu-vllm-0.29")
SHAPE = require_shape("gpt-oss-120b")


def unknown(hardware: Hardware, arguments: Mapping[str, Any], label: str = "collocated-1xtp4") -> tuple[str, ...]:
    return unknown_effects(hardware, Deployment(topology=parse_label(label), engine_kwargs=arguments), SHAPE.kv_dtype)


def sequence_us(hardware: Hardware) -> float:
    assert hardware.steps is not None
    return hardware.steps.correction.sequence_us


def test_every_name_is_an_argument_of_vllm() -> None:
    assert {*SIMULATED, *NOT_SIMULATED, *KERNELS} <= set(known_arguments())
    assert len({*SIMULATED, *NOT_SIMULATED, *KERNELS}) == len(SIMULATED) + len(NOT_SIMULATED) + len(KERNELS)


def test_a_share_of_the_memory_is_that_share_of_the_gpus() -> None:
    """5 % of two H100 of 80 GB, in tokens of 36 layers with K and V of 8 heads of 64 in two bytes."""
    tokens = [
        kv_capacity_tokens(HOME, SHAPE, Pool(tp=2, engine_kwargs={"gpu_memory_utilization": share}))
        for share in (0.85, 0.9)
    ]
    gpus_gb = 2 * HOME.value("memory_gb")
    assert tokens[1] - tokens[0] == pytest.approx(0.05 * gpus_gb * 1e9 / (36 * 2 * 8 * 64 * 2))
    assert tokens[1] == kv_capacity_tokens(HOME, SHAPE, Pool(tp=2))
    small = require_shape("tiny-gptoss")
    own = Pool(engine_kwargs={"gpu_memory_utilization": 0.1})
    assert kv_capacity_tokens(CPU, small, own) == kv_capacity_tokens(CPU, small, Pool()), "memory of its own"


def test_smaller_steps_shorten_the_longest_gaps_and_lengthen_the_mean() -> None:
    def served(tokens: int) -> tuple[float, float]:
        deployment = Deployment(
            topology=parse_label("collocated-1xtp2"), engine_kwargs={"max_num_batched_tokens": tokens}
        )
        level = Level(load=Closed(concurrency=16), num_requests=64, seed=0)
        (done,) = simulate(deployment, [level], Workload(), HOME, SHAPE)
        itl, tpot_s = gaps(done), figures(done).tpot_s
        assert itl is not None and tpot_s is not None
        return tpot_s, itl.percentiles_s["p99"]

    (small_s, small_gap_s), (large_s, large_gap_s) = served(1024), served(8192)
    assert small_gap_s < 0.6 * large_gap_s and small_s > 1.1 * large_s


@pytest.mark.parametrize(("version", "given", "steps", "us"), [("0.12", True, 2, 7), ("0.18", False, 1, 27)])
def test_scheduling_other_than_the_versions_default(version: str, given: bool, steps: int, us: float) -> None:
    own = computed("H200", "vllm", version)
    made = own.of(Pool(engine_kwargs={"async_scheduling": given}))
    assert (made.steps_in_flight, sequence_us(made)) == (steps, us)
    same = own.of(Pool(engine_kwargs={"async_scheduling": not given}))
    assert (same.steps_in_flight, sequence_us(same)) == (own.steps_in_flight, sequence_us(own)) == (3 - steps, 34 - us)


def test_a_measured_correction_keeps_what_it_was_measured_to_be() -> None:
    own = computed("H200", "vllm", "0.18")
    assert own.steps is not None
    measured = own.with_correction(own.steps.correction.model_copy(update={"sequence_us": 11.0, "fitted_levels": 3}))
    assert sequence_us(measured.of(Pool(engine_kwargs={"async_scheduling": False}))) == 31.0


def test_constants_that_were_fitted_without_it_have_no_scheduling() -> None:
    assert CPU.of(Pool(engine_kwargs={"async_scheduling": True})).steps_in_flight == CPU.steps_in_flight == 0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ()),
        ({"max_num_seqs": 64, "gpu_memory_utilization": 0.8, "kv_cache_memory_bytes": 10**10}, ()),
        ({"max_num_batched_tokens": 2048}, ()),
        ({"max_num_batched_tokens": 16384}, ("max_num_batched_tokens=16384",)),
        ({"async_scheduling": False}, ()),
        ({"async_scheduling": True}, ("async_scheduling=true",)),
        ({"enforce_eager": False, "enable_prefix_caching": True, "stream_interval": 1, "moe_backend": None}, ()),
        ({"stream_interval": 4, "enforce_eager": True}, ("enforce_eager=true", "stream_interval=4")),
        ({"block_size": 16}, ()),
        ({"block_size": 64}, ("block_size=64",)),
        ({"kv_cache_dtype": "auto"}, ()),
        ({"kv_cache_dtype": "bfloat16"}, ()),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("kv_cache_dtype=fp8_e4m3",)),
        ({"disable_hybrid_kv_cache_manager": True}, ()),
        ({"disable_hybrid_kv_cache_manager": False}, ("disable_hybrid_kv_cache_manager=false",)),  # the fit had it off
        ({"attention_backend": "FLASHINFER"}, ("attention_backend=FLASHINFER",)),
        ({"quantization": "fp8", "dtype": "float16"}, ("dtype=float16", "quantization=fp8")),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, ("compilation_config={\"cudagraph_mode\": \"NONE\"}",)),
        ({"compilation_config": {}, "dtype": "auto", "quantization": None, "performance_mode": "balanced"}, ()),
        ({"max_model_len": 9000, "tokenizer_mode": "slow"}, ()),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_whose_effect_nothing_knows(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    assert unknown(HOME, arguments) == names


def test_those_of_one_pool_count_and_replace_those_of_the_deployment() -> None:
    topology = parse_label("pd-pack-p1xtp2-d1xtp2").model_copy(
        update={"decode": Pool(tp=2, engine_kwargs={"enforce_eager": True})}
    )
    both = Deployment(topology=topology, engine_kwargs={"enforce_eager": False, "block_size": 64})
    assert unknown_effects(HOME, both, None) == ("block_size=64", "enforce_eager=true")


def test_a_launch_without_gpus_has_eager_engines_of_larger_blocks_by_itself() -> None:
    assert unknown(CPU, {"enforce_eager": True, "block_size": 32}) == ()
    assert unknown(CPU, {"enable_chunked_prefill": False}) == ("enable_chunked_prefill=false",)
