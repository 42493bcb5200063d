"""The engine arguments of vLLM that change a prediction: those that are simulated, those that are not, and those that a
launch adds for a model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Pool
from pdlab.core.hybrid_kv import TURNED_OFF
from pdlab.core.named_values import engine_arg
from pdlab.sim.hardware import Hardware

ON, OFF, ONE = ("true", "yes", "on", "1", "1.0"), ("false", "no", "off", "0", "0.0"), ("1", "1.0")
# Simulated arguments: `pdlab.sim.hardware.Hardware.with_arguments`, and the functions that read a pool's.
SIMULATED = (
    "async_scheduling",
    TURNED_OFF,
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
)
# Arguments that are not simulated -> the values that are vLLM's own (vllm/config of 0.11 and 0.29); none where it
# depends on the GPU or the version.
NOT_SIMULATED: dict[str, tuple[str, ...]] = {
    "attention_backend": (),
    "block_size": (),
    "cpu_offload_gb": OFF,
    "decode_context_parallel_size": ONE,
    "enable_chunked_prefill": ON,
    "enable_dbo": OFF,
    "enable_eplb": OFF,
    "enable_prefix_caching": ON,
    "enforce_eager": OFF,
    "kv_offloading_size": OFF,
    "long_prefill_token_threshold": OFF,
    "max_num_scheduled_tokens": (),
    "moe_backend": (),
    "num_gpu_blocks_override": (),
    "prefill_context_parallel_size": ONE,
    "scheduling_policy": ("fcfs",),
    "stream_interval": ONE,
}
# Arguments that choose kernels, formats or graphs, whose effect no run gives -> the values that are vLLM's own.
KERNELS: dict[str, tuple[str, ...]] = {
    "all2all_backend": (),
    "attention_config": (),
    "compilation_config": (),
    "cudagraph_capture_sizes": (),
    "disable_custom_all_reduce": OFF,
    "disable_sliding_window": OFF,
    "dtype": ("auto", "bfloat16"),
    "enable_lora": OFF,
    "hf_overrides": (),
    "kernel_config": (),
    "kv_sharing_fast_prefill": OFF,
    "linear_backend": ("auto",),
    "max_cudagraph_capture_size": (),
    "model_impl": ("auto", "vllm"),
    "optimization_level": (),
    "performance_mode": ("balanced",),
    "quantization": (),
    "quantization_config": (),
    "scheduler_cls": (),
    "ubatch_size": ("0",),
}
FORMATS = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}  # of KV cache: names of vLLM -> those of a model's shape


def unknown_effects(hardware: Hardware, deployment: Deployment, kv_dtype: str | None) -> tuple[str, ...]:
    """The engine arguments of a deployment whose effect the errors of the hardware do not have, as KEY=VALUE in order.
    They are not simulated, or they are outside of what was fitted. ``kv_dtype``: the simulated format of KV cache
    (None: not judged)."""
    found = set()
    for pool in deployment.pools.values():
        arguments = deployment.engine_kwargs_of(pool)
        known = hardware.serving(deployment).typed(pool)
        found |= {engine_arg(name, arguments[name]) for name in _unknown(known, arguments, kv_dtype)}
    return tuple(sorted(found))


def is_own(name: str, value: Any) -> bool:
    """Whether the argument, one of `NOT_SIMULATED`, has a value that is vLLM's own."""
    return value is None or _word(value) in NOT_SIMULATED[name]


def _unknown(hardware: Hardware, arguments: Mapping[str, Any], kv_dtype: str | None) -> Iterator[str]:
    for name, value in arguments.items():
        if value is None or (hardware.cpu and name in LAUNCHED_ON_CPUS):
            continue
        word = _word(value)
        if name == "block_size":
            unknown = word != str(hardware.block_tokens)
        elif name in NOT_SIMULATED:
            unknown = not is_own(name, value)
        elif name in KERNELS:
            unknown = value != {} and _word(value) not in KERNELS[name]
        elif name == "max_num_batched_tokens":  # smaller chunks have sizes of steps that were fitted
            unknown = float(value) > hardware.step_tokens
        elif name == "async_scheduling":
            unknown = hardware.scheduled_by(arguments) != hardware.steps_in_flight
        elif name == TURNED_OFF:  # nothing turns on what the version or the fit has not
            unknown = word in OFF and not hardware.hybrid_kv
        elif name == "kv_cache_dtype":
            unknown = word != "auto" and kv_dtype not in (None, FORMATS.get(word, word))
        elif name == "speculative_config":
            unknown = hardware.speculation is None
        else:
            unknown = False
        if unknown:
            yield name


def as_launched(pool: Pool, hardware: Hardware, shape: ModelShape) -> Pool:
    """The pool with the engine arguments that a launch adds for this model and TP, below its own ones."""
    if hardware.cpu or hardware.engine != "vllm" or hardware.direct is not None:
        return pool
    added = shape.engine_kwargs_by_tp.get(pool.tp)
    return pool.model_copy(update={"engine_kwargs": {**added, **pool.engine_kwargs}}) if added else pool


def with_added(deployment: Deployment, hardware: Hardware, shape: ModelShape) -> Deployment:
    """The deployment with the engine arguments that a launch adds to its pools; what is given for the whole deployment
    counts more."""

    def changed(pool: Pool) -> Pool:
        arguments = as_launched(pool, hardware, shape).engine_kwargs
        own = {key: value for key, value in arguments.items() if key not in deployment.engine_kwargs}
        return pool.model_copy(update={"engine_kwargs": {**own, **pool.engine_kwargs}})

    return deployment.with_pools(changed)


LAUNCHED_ON_CPUS = ("block_size", "enforce_eager", "async_scheduling")  # a launch without GPUs decides these itself


def _word(value: Any) -> str:
    return str(value).strip().lower()
