"""Compute what fits into an engine's memory before a start: weights, KV cache, requests of the workload. Pure.

Per GPU: memory x utilisation - weights - overhead is KV cache. Weights are arithmetic over the model's shape; memory
and overhead are constants with their sources below, so a GPU pool is an estimate, to about OVERHEAD_GB's own error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.core.catalog import BYTES_PER_VALUE, ModelShape, gpu_memory_gb, known_gpus, resolve_model, why_no_shape
from pdlab.core.deployment import FLAG_PREFIX, Deployment, Pool
from pdlab.core.errors import UsageError
from pdlab.core.hybrid_kv import is_hybrid
from pdlab.core.model_size import dense_bytes, expert_bytes, full_layers, kv_bytes, kv_bytes_per_token_layer, kv_copies
from pdlab.core.nodes import ClusterNode, ClusterView, Placement, Role
from pdlab.core.request_lengths import LENGTH_STEP, length_flag, request_tokens, served_length
from pdlab.core.served_model import why_unknown_shape
from pdlab.core.text import counted, listed
from pdlab.core.text import table as text_table
from pdlab.core.vllm_limits import default_utilization
from pdlab.core.workload import Workload
from pdlab.deploy.pool_agreement import WITHOUT_KV_CACHE, speculation
from pdlab.deploy.serve_config import engine_kwargs

# CUDA, NCCL, graphs and activations: what the KV pools of published H100 deployments leave (1.0 M tokens at TP2, 2.9
# to 3 M at TP4, about 13 prompts of 5,000 at TP1; configs/catalog/h100-vllm-0.11.yaml).
OVERHEAD_GB = 7.2
BATCHED_TOKENS = {"gpu": 8192, "cpu": 2048}  # vLLM's default max_num_batched_tokens of a server on 80 GB, and on a CPU
# Steps that vLLM schedules ahead: out-of-window blocks of both are still held (VllmConfig.max_in_flight_tokens).
STEPS_AHEAD = {"gpu": 2, "cpu": 2}


@dataclass(frozen=True)
class EngineMemory:
    """One engine of a pool; bytes are of one of its ``gpus`` GPUs (or CPU ranks).

    ``kv_tokens``: by vLLM's count, the number of requests of ``longest`` tokens (its max_model_len) times that length.
    ``request_tokens``: tokens of one request of the workload in this pool; ``requests``: how many of them fit at once.
    ``longest_bytes``: bytes that one request of ``longest`` tokens reserves; ``fitting``: the longest request that
    fits, of the steps of LENGTH_STEP and the longest one of the workload (0: none). With max_model_len -1, ``longest``
    is ``fitting``. ``estimated``: not set by kv_cache_memory_bytes.
    """

    role: Role
    gpus: int
    weights_bytes: float
    kv_bytes: float
    longest: int
    longest_bytes: float
    fitting: int
    kv_tokens: int
    request_tokens: int
    requests: int
    estimated: bool


def engine_memory(
    deployment: Deployment, role: Role, shape: ModelShape, memory_gb: float | None, *, cpu: bool, workload: Workload
) -> EngineMemory | None:
    """The arithmetic for one pool. ``memory_gb``: memory of one of its GPUs in 1e9 bytes. If it is None (unknown), the
    result is None too, unless kv_cache_memory_bytes gives the KV cache.

    None also for a model, or a draft model beside it, whose weights or KV cache are not known. Raises UsageError
    where the weights that are known do not fit.
    """
    pool = deployment.pools[role]
    kwargs = engine_kwargs(deployment, role, shape, cpu=cpu)
    gpus = pool.tp * pool.pp
    draft = draft_model(kwargs, shape)
    if shape.weights_unknown or isinstance(draft, str):
        return None
    weights = weights_bytes(shape, pool, kwargs) / gpus
    layers = [shape]
    if draft is not None:
        of_draft = expert_bytes(draft) + dense_bytes(draft, with_embedding=True)
        weights += of_draft / (speculation(kwargs).get("draft_tensor_parallel_size") or pool.tp)
        layers.append(draft)
    configured = kwargs.get("kv_cache_memory_bytes")
    if isinstance(configured, int):
        left = float(configured)
    elif memory_gb is not None:
        share = kwargs.get("gpu_memory_utilization", default_utilization())
        left = (memory_gb * share - OVERHEAD_GB) * 1e9 - weights
    else:
        return None
    if shape.kv_unknown:
        _refuse_weights(role, gpus, shape, weights, left, "CPU rank" if cpu else "GPU")
        return None
    length = served_length(deployment, role, shape, cpu=cpu)
    longest = length or shape.max_context
    kv_dtype = str(kwargs.get("kv_cache_dtype", "auto"))

    def width(of: ModelShape) -> float:
        chosen = {"auto": of.kv_dtype, "fp8": "fp8", "int8": "int8"}.get(kv_dtype.partition("_")[0], "bfloat16")
        return BYTES_PER_VALUE[chosen] / BYTES_PER_VALUE[of.kv_dtype] * kv_copies(of, pool.tp) / gpus

    def reserved(length: int) -> float:
        return sum(width(of) * reserved_bytes(of, length, kwargs, "cpu" if cpu else "gpu") for of in layers)

    lengths = sorted({*range(LENGTH_STEP, longest, LENGTH_STEP), sum(workload.longest), longest}, reverse=True)
    fitting = next((each for each in lengths if each <= longest and reserved(each) <= left), 0)
    longest = longest if length else fitting or longest
    longest_bytes = reserved(longest)
    tokens = request_tokens(role, workload)
    request_bytes = sum(width(of) * kv_bytes(of, tokens, hybrid=is_hybrid(kwargs)) for of in layers)
    room = max(left, 0.0)
    return EngineMemory(
        role=role,
        gpus=gpus,
        weights_bytes=weights,
        kv_bytes=left,
        longest=longest,
        longest_bytes=longest_bytes,
        fitting=fitting,
        kv_tokens=int(room / longest_bytes * longest),
        request_tokens=tokens,
        requests=int(room / request_bytes) if tokens <= longest else 0,
        estimated=configured is None,
    )


def weights_bytes(shape: ModelShape, pool: Pool, kwargs: dict[str, Any]) -> float:
    """Of all GPUs of one data parallel rank: experts are divided over TP x DP with and without expert parallel."""
    balanced = kwargs.get("eplb_config")
    copies = balanced.get("num_redundant_experts", 0) if isinstance(balanced, dict) else 0
    return expert_bytes(shape) * (1 + copies / shape.experts) / pool.dp + dense_bytes(shape, with_embedding=True)


def draft_model(kwargs: dict[str, Any], shape: ModelShape) -> ModelShape | str | None:
    """The draft model of speculative decoding beside ``shape``; text: why it is not known; None: there is none.

    A model's own layers for several tokens share its embedding and output head, an EAGLE head only the embedding.
    """
    config = speculation(kwargs)
    method, model = str(config.get("method") or ""), config.get("model")
    if not config or method in WITHOUT_KV_CACHE:
        return None
    if model is None or method == "mtp" or method.endswith("_mtp"):
        one = {"layers": 1, "attention_layers": None, "dense_layers": int(shape.experts == 1), "vocab": 1}
        windows = {"sliding_window": None, "full_attention_layers": None}
        return shape.model_copy(update={**one, **windows, "other_parameters": 2 * shape.hidden**2})
    try:
        draft = resolve_model(str(model)).shape
    except UsageError as error:
        return f"draft {error}"
    if draft is None:
        return f"draft model {model}: {why_no_shape(str(model))}"
    if draft.unknown:
        return f"draft model {model}: {_not_represented(draft)}"
    return draft.model_copy(update={"tied_embeddings": True}) if method.startswith("eagle") else draft


def reserved_bytes(shape: ModelShape, tokens: int, kwargs: dict[str, Any], device: str) -> float:
    """Bytes that vLLM needs for one request of ``tokens``, else it does not start (kv_cache_interface.py): full layers
    keep all of it, windowed ones the window and the tokens of the steps in flight if windows are kept alone.
    """
    windowed = shape.layers - full_layers(shape)
    in_flight = STEPS_AHEAD[device] * (kwargs.get("max_num_batched_tokens") or BATCHED_TOKENS[device])
    kept = min(tokens, shape.sliding_window - 1 + in_flight) if shape.sliding_window and is_hybrid(kwargs) else tokens
    return kv_bytes_per_token_layer(shape) * (full_layers(shape) * tokens + windowed * kept)


def examine(
    deployment: Deployment, shape: ModelShape | None, view: ClusterView, placement: Placement, workload: Workload
) -> list[EngineMemory]:
    """The arithmetic for every pool that it can be made for. Raises UsageError where one cannot hold a request."""
    memories = []
    for role in placement.roles:
        sizes = [gpu_memory_gb(view.node(node)) for node in placement.nodes_of(role)]
        known = [size for size in sizes if size is not None]
        smallest = min(known) if len(known) == len(sizes) else None
        if shape is None:
            continue
        memory = engine_memory(deployment, role, shape, smallest, cpu=placement.device == "cpu", workload=workload)
        if memory is not None:
            _refuse(memory, shape, "GPU" if placement.device == "gpu" else "CPU rank", deployment, workload)
            memories.append(memory)
    return memories


def why_unknown(deployment: Deployment, shape: ModelShape | None, nodes: Iterable[ClusterNode]) -> str:
    """Why the memory of engines on these nodes is unknown, and which setting would give it."""
    if shape is None:
        return why_unknown_shape(deployment)
    if shape.unknown:
        return _not_represented(shape)
    for role in deployment.pools:
        draft = draft_model(engine_kwargs(deployment, role, shape, cpu=False), shape)
        if isinstance(draft, str):
            return draft
    unknown = [node for node in nodes if gpu_memory_gb(node) is None]
    named = dict.fromkeys(f"GPUs of type {node.gpu_type}" if node.gpu_type else "unnamed GPUs" for node in unknown)
    sizes = [f"{size:g}" for name in {node.gpu_type for node in unknown} if name in known_gpus()
             for size in known_gpus()[name].memory_gb]  # fmt: skip
    reason = f"have {' or '.join(sizes)} GB" if sizes else "have no memory in configs/gpus/"
    owners = listed([node.id for node in unknown])
    return f"{listed(list(named))} {reason}: give gpu_memory_gb of {owners} in the cluster's file"


def _not_represented(shape: ModelShape) -> str:
    return f"pdlab cannot represent {', '.join(shape.unknown)} of {shape.architecture}"


def _refuse(memory: EngineMemory, shape: ModelShape, unit: str, deployment: Deployment, workload: Workload) -> None:
    subject, flag = _subject(memory.role, memory.gpus, unit)
    _refuse_weights(memory.role, memory.gpus, shape, memory.weights_bytes, memory.kv_bytes, unit)
    if memory.kv_bytes < memory.longest_bytes:
        shorter = f"{length_flag(deployment, memory.role)}{memory.fitting}" if memory.fitting else ""
        if shorter:
            shorter += ", " if memory.fitting >= sum(workload.longest) else " with shorter requests, "
        raise UsageError(
            f"{subject} cannot hold one request of {shape.name}: max_model_len {memory.longest:,} reserves "
            f"{_gb(memory.longest_bytes)} GB of KV cache per {unit}, {_gb(memory.kv_bytes)} GB are left beside "
            f"{_gb(memory.weights_bytes)} GB of weights; give {shorter}a larger {flag}"
            + (", or --engine-arg kv_cache_memory_bytes=N if you have a better figure" if memory.estimated else "")
        )


def _subject(role: Role, gpus: int, unit: str) -> tuple[str, str]:
    """An engine in words, and the flag of its TP."""
    return f"{role} engine of {counted(gpus, unit)}", f"--{FLAG_PREFIX[role]}tp"


def _refuse_weights(role: Role, gpus: int, shape: ModelShape, weights: float, left: float, unit: str) -> None:
    if left <= 0:
        subject, flag = _subject(role, gpus, unit)
        raise UsageError(
            f"{subject} cannot hold {shape.name}: weights take {_gb(weights)} GB of each, {_gb(-left)} GB more than "
            f"there are; use a larger {flag}, or a larger gpu_memory_utilization"
        )


def table(memories: Sequence[EngineMemory], workload: Workload, unit: str) -> str:
    """A table with one row per pool; if lengths vary, for the longest possible request."""
    lengths = ":".join(f"{tokens:,}" for tokens in workload.longest)
    head = ("engine of", f"{unit}s", "weights, GB each", "KV cache, GB each", "tokens", "max_model_len",
            f"requests of {lengths} that fit")  # fmt: skip
    rows = []
    for memory in memories:
        fit = f"{memory.requests:,}" if memory.request_tokens <= memory.longest else "0: longer than max_model_len"
        rows.append((memory.role, str(memory.gpus), _gb(memory.weights_bytes), _gb(memory.kv_bytes),
                     f"{memory.kv_tokens:,}", f"{memory.longest:,}", fit))  # fmt: skip
    note = "estimated: memory x utilisation - weights - overhead (docs/setup.md)\n"
    return text_table(head, rows, left=(0,)) + "\n" + (note if any(memory.estimated for memory in memories) else "")


def _gb(count: float) -> str:
    return f"{count / 1e9:.2g}" if abs(count) < 10e9 else f"{count / 1e9:.0f}"
