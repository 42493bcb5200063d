"""vLLM's own scheduler for an engine of the simulator: real configuration, KV cache manager and requests, no workers.

vLLM is imported when the first scheduler is made, because nothing else in the simulator needs it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Pool
from pdlab.core.errors import UsageError
from pdlab.core.model_size import full_layers, kv_bytes_per_token_layer, kv_copies
from pdlab.sim.engine import most_sequences_of
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_time import kv_capacity_tokens, kv_pool_bytes, why_not_held

CONNECTOR = "pdlab.sim.vllm_connector"
KvRole = Literal["kv_producer", "kv_consumer"]
LAYOUT = "LBNHC"  # of the KV cache in memory; all layers' pages are of one size, so that it changes no group
COMMON = -1  # number of the prompt with which those of a common prefix begin


class SchedulerParts(NamedTuple):
    """The parts of the engines of a pool. ``make``: a scheduler. ``request``: a request, of its name, the token ids of
    its prompt, its output tokens and its kv_transfer_params. ``steps_at_once``: the number of steps that vLLM has
    scheduled at once (2 with asynchronous scheduling)."""

    make: Callable[[], Any]
    request: Callable[[str, list[int], int, dict[str, Any] | None], Any]
    steps_at_once: int


def scheduler_parts(
    hardware: Hardware,
    shape: ModelShape,
    pool: Pool,
    *,
    role: KvRole | None,
    asynchronous: bool,
    pool_blocks: int | None = None,
    retention_tokens: int | None = 0,
) -> SchedulerParts:
    """Schedulers for engines of ``pool`` with the batch limits and the KV memory of the simulator's engines.

    If the hardware has a hybrid KV cache, the KV cache groups are those that vLLM makes of windowed and full layers.
    Else every layer keeps all tokens. ``role``: None: KV does not move. ``asynchronous``: the next step is scheduled
    while one runs, vLLM's default on GPUs. ``pool_blocks``: the blocks of the KV pool (None: as many as the memory
    holds). ``retention_tokens``: vLLM's ``prefix_cache_retention_interval``, by default 0. Raises UsageError without
    vLLM; for pipeline stages, latent KV cache and other architectures than gpt-oss; and if the model does not fit.
    """
    if pool.pp > 1 or shape.kv_latent:
        what = "pipeline stages" if pool.pp > 1 else "latent KV cache"
        raise UsageError(f"vLLM's scheduler is not simulated with {what}; use --fidelity simulator")
    try:
        from pdlab.sim.vllm_names import (
            KVCacheConfig,
            KVTransferConfig,
            Request,
            SamplingParams,
            StructuredOutputManager,
            get_hash_fn_by_name,
            get_kv_cache_groups,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
    except ImportError as error:
        raise UsageError("vLLM's scheduler is simulated with vLLM's own code, which is not installed here") from error

    capacity = int(kv_capacity_tokens(hardware, shape, pool))
    hardware = hardware.of(pool)
    transfer = role and KVTransferConfig(
        kv_connector="SimulatedConnector", kv_connector_module_path=CONNECTOR, kv_role=role
    )
    config = _config(hardware, shape, capacity, most_sequences_of(pool), transfer)
    config.scheduler_config.async_scheduling = asynchronous
    groups = get_kv_cache_groups(config, _kv_specs(hardware, shape, pool))
    # Groups share one pool of blocks; a block has a page of every layer of the largest group.
    layers = max(len(group.layer_names) for group in groups)
    block_bytes = kv_bytes_per_token_layer(shape) * kv_copies(shape, pool.tp) * layers * hardware.block_tokens
    blocks = pool_blocks or int(max(kv_pool_bytes(hardware, shape, pool), 0.0) // block_bytes)
    if not blocks:
        why = why_not_held(hardware, shape, pool, hardware.block_tokens)
        raise UsageError(f"an engine of {pool.degrees} does not hold {shape.name}: {why}")
    kv_cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention_tokens,
    )
    config.cache_config.num_gpu_blocks = blocks
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache, config)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(hash_tokens, hash_function)

    def make() -> Any:
        return config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
        )

    def request(name: str, prompt: list[int], output_tokens: int, params: dict[str, Any] | None) -> Any:
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=extra)
        return Request(name, prompt, sampling, None, arrival_time=0.0, block_hasher=hasher)

    return SchedulerParts(make, request, config.max_concurrent_batches)


def _config(hardware: Hardware, shape: ModelShape, capacity: int, most_sequences: int, transfer: Any) -> Any:
    """A `VllmConfig` of a model of that shape, without weights or tokenizer. Raises UsageError."""
    from pdlab.sim.vllm_names import EngineArgs

    if not shape.architecture.startswith("GptOss"):
        raise UsageError(f"vLLM's scheduler is simulated for gpt-oss models, not for {shape.architecture}")
    with TemporaryDirectory(prefix="pdlab-model-") as folder:
        model = {
            "architectures": [shape.architecture],
            "model_type": "gpt_oss",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.expert_intermediate or shape.hidden,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "sliding_window": shape.sliding_window,
            "vocab_size": shape.vocab,
            "max_position_embeddings": shape.max_context,
        }
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=hardware.block_tokens,
            max_model_len=max(min(shape.max_context, capacity), 1),
            max_num_batched_tokens=hardware.step_tokens,
            max_num_seqs=most_sequences,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            disable_hybrid_kv_cache_manager=not hardware.hybrid_kv,
            kv_transfer_config=transfer,
        ).create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    return config


def _kv_specs(hardware: Hardware, shape: ModelShape, pool: Pool) -> dict[str, Any]:
    """The KV specifications of vLLM's attention layers of the model: windowed layers first, as in gpt-oss."""
    import torch

    from pdlab.sim.vllm_names import FullAttentionSpec, SlidingWindowSpec

    page = {
        "block_size": hardware.block_tokens,
        "num_kv_heads": max(shape.kv_heads // pool.tp, 1),
        "head_size": shape.head_dim,
        "dtype": torch.bfloat16,
    }
    every = shape.layers // max(full_layers(shape), 1)
    return {
        f"layers.{layer}": FullAttentionSpec(**page)
        if layer % every == every - 1
        else SlidingWindowSpec(**page, sliding_window=shape.sliding_window)
        for layer in range(shape.layers)
    }


def prompt_tokens(number: int, tokens: int, common: int) -> list[int]:
    """Token ids of the prompt with that number: ``common`` tokens that every prompt has, then its own. A longer prompt
    of the same number begins with the tokens of a shorter one."""
    return _ids(COMMON, common) + _ids(number, tokens - common)


def _ids(number: int, tokens: int) -> list[int]:
    drawn = random.Random(number).randbytes(2 * tokens)
    return [high << 8 | low for high, low in zip(drawn[::2], drawn[1::2], strict=True)]
