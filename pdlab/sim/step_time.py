"""The time of one engine step, by formulas with a few fitted factors. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

from pdlab.core.catalog import ModelShape, format_only_in_name
from pdlab.core.deployment import Deployment, Pool
from pdlab.core.engine_cache import EngineCache
from pdlab.core.model_size import (
    dense_bytes,
    dense_parameters,
    expert_bytes,
    full_layers,
    kv_bytes,
    kv_bytes_per_token_layer,
    kv_copies,
    routed_parameters,
)
from pdlab.core.text import byte_size, counted
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_source import NO_LIMITS, Limits


def active_parameters(shape: ModelShape) -> float:
    """Parameters that one token passes through, output head left out (prefill computes it for the last token only)."""
    return dense_parameters(shape) + routed_parameters(shape, shape.experts_per_token)


@dataclass(slots=True)
class StepCosts:
    """A pool's step in plain numbers (seconds, per unit), for the simulator's inner loop."""

    fixed_s: float  # launch, dense weights, synchronisation
    experts_s: float  # all experts read once
    log_untouched: float  # log(1 - k / E)
    sequence_s: float  # per decoding sequence
    context_s: float  # per decoding sequence and token of context
    prefill_s: float  # per prefill token, that share of it which TP divides
    unsharded_s: float  # and the share that it does not divide
    eager_s: float  # a large prefill step without CUDA graphs
    attention_s: float  # per prefill token and token of context before it
    exchange_s: float  # per token: all-to-all between DP ranks
    admit_s: float  # per token of a joining request: of its blocks, hashing and tables
    dp: int  # DP ranks whose tokens meet at the experts
    ranks: int  # ranks among which whole experts are spread; 1: every expert is split over all
    experts: float  # in effective use
    routed: float  # share of the prefill compute that is in routed experts
    # Decoding batch -> the longest of the times that overlap in its step.
    longest_s: dict[float, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def limits(self) -> Limits:
        """Formulas have no limits."""
        return NO_LIMITS

    @property
    def beyond(self) -> float:
        return 0.0

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        """Seconds of one step of ``batch`` sequences of mean ``context`` and ``prefill_tokens``, each on top
        of ``prefill_context`` tokens (None: ``context``)."""
        if not prefill_tokens and self.ranks == 1:
            # Most steps. The same sums as below, in the same order.
            longest_s = self.longest_s.get(batch)
            if longest_s is None:
                tokens = batch * self.dp
                touched = 1.0 - math.exp(self.log_untouched * tokens) if tokens < MANY_TOKENS else 1.0
                longest_s = max(self.experts_s * touched, batch * self.prefill_s, batch * self.exchange_s)
                self.longest_s[batch] = longest_s
            return self.fixed_s + batch * (self.sequence_s + self.context_s * context) + longest_s
        tokens = (batch + prefill_tokens) * self.dp
        touched = 1.0 - math.exp(self.log_untouched * tokens) if tokens < MANY_TOKENS else 1.0
        experts_s = self.experts_s * touched
        waits = self._busiest(touched) if self.ranks > 1 else 1.0
        engine_tokens = batch + prefill_tokens
        compute_s = engine_tokens * self.prefill_s * (1 + self.routed * (waits - 1))
        eager_s = self.eager_s * (1.0 - math.exp(-prefill_tokens / EAGER_TOKENS)) if prefill_tokens else 0.0
        prefill_context_tokens = context if prefill_context is None else prefill_context
        return (
            self.fixed_s
            + batch * (self.sequence_s + self.context_s * context)
            + max(experts_s * waits, compute_s, engine_tokens * self.exchange_s)
            + prefill_tokens * (self.attention_s * prefill_context_tokens + self.unsharded_s)
            + eager_s
        )

    def _busiest(self, touched: float) -> float:
        """Load of the busiest rank over the mean rank's."""
        experts_hit = max(self.experts * touched, 1.0)
        return busiest_rank(self.ranks, experts_hit)


def busiest_rank(ranks: int, experts: float) -> float:
    """Load of the busiest of some ranks over the mean one, where each of ``experts`` is on a random rank."""
    return min(1 + _largest(ranks) * math.sqrt((ranks - 1) / experts), ranks)


@cache
def _largest(count: int) -> float:
    """Expected largest of ``count`` standard normal deviates (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


MANY_TOKENS = 4000  # every expert in use is touched
EAGER_TOKENS = 2000.0  # prefill tokens after which most of the cost of a step without CUDA graphs is there


def step_costs(hardware: Hardware, shape: ModelShape, pool: Pool) -> StepCosts:
    """The costs of one engine (one DP rank) of ``pool``. Raises UsageError."""
    value = hardware.value
    tp = pool.tp
    rate = value("memory_gb_per_s") * 1e9
    expert_shards = tp * pool.dp  # vLLM splits the experts over TP x DP, whole ones with expert parallel
    routed = routed_parameters(shape, shape.experts_per_token)
    flops_per_s = value("tensor_tflops") * 1e12 * value("tensor_share") * tp
    if shape.weight_dtype == "fp8":
        flops_per_s *= 2
    exchange_s = 0.0
    nodes = -(-expert_shards // hardware.gpus_per_node)
    if pool.dp > 1:
        nodes_reached = nodes * (1 - (1 - 1 / nodes) ** shape.experts_per_token) * (nodes - 1) / nodes
        exchanged_values = 3 * shape.hidden * nodes_reached * (shape.layers - shape.dense_layers)
        line = hardware.wires.node_gb_per_s if hardware.wires is not None else None
        share = math.inf if line is None else line / hardware.gpus_per_node
        exchange_s = exchanged_values / (min(value("alltoall_gb_per_s"), share) * 1e9 * tp)
    experts_in_use = max(shape.experts * value("experts_in_use"), shape.experts_per_token + 1.0)
    return StepCosts(
        fixed_s=value("launch_ms") * 1e-3 * shape.layers / REFERENCE_LAYERS
        + dense_bytes(shape, with_embedding=False) / (rate * tp * value("weight_read_share"))
        + value("sync_ms") * 1e-3 * math.log2(tp) * shape.layers / REFERENCE_LAYERS,
        experts_s=expert_bytes(shape)
        * experts_in_use
        / shape.experts
        / (rate * expert_shards * value("weight_read_share")),
        log_untouched=math.log1p(-shape.experts_per_token / experts_in_use),
        sequence_s=value("sequence_ms") * 1e-3,
        context_s=kv_bytes_per_token_layer(shape) * full_layers(shape) / (rate * tp * value("kv_read_share")),
        prefill_s=2 * active_parameters(shape) / flops_per_s,
        unsharded_s=value("unsharded_ns") * 1e-9 * shape.layers * shape.hidden / REFERENCE_WIDTH,
        eager_s=value("eager_ms") * 1e-3 * shape.layers / REFERENCE_LAYERS,
        attention_s=4 * shape.heads * shape.head_dim * full_layers(shape) / flops_per_s,
        exchange_s=exchange_s,
        admit_s=value("admit_us") * 1e-6 / hardware.block_tokens,
        dp=pool.dp,
        ranks=expert_shards if pool.expert_parallel else 1,
        experts=experts_in_use,
        routed=routed / active_parameters(shape),
    )


REFERENCE_LAYERS = 36  # the calibrated model, gpt-oss-120b: constants per layer scale from it
REFERENCE_WIDTH = 36 * 2880


def kv_pool_bytes(hardware: Hardware, shape: ModelShape, pool: Pool) -> float:
    """Bytes of one engine's KV cache, over its GPUs; 0 or less: the model does not fit. It is the memory of the TP x PP
    GPUs x utilization - weights - overhead per GPU. Experts are divided over TP x DP, with and without expert parallel.
    The pool's engine argument ``kv_cache_memory_bytes``, if given, replaces it."""
    gpus = pool.tp * pool.pp
    if (given := pool.engine_kwargs.get("kv_cache_memory_bytes")) is not None:
        return float(gpus * given)
    hardware = hardware.of(pool)
    value = hardware.value
    weights_gb = _weight_bytes(shape, pool) / 1e9
    return (gpus * (value("memory_gb") * value("memory_utilization") - value("overhead_gb")) - weights_gb) * 1e9


def _weight_bytes(shape: ModelShape, pool: Pool) -> float:
    """Weights of one engine, over its GPUs."""
    return expert_bytes(shape) / pool.dp + dense_bytes(shape, with_embedding=True)


def why_not_held(hardware: Hardware, shape: ModelShape, pool: Pool, tokens: int, fix: str = "use a larger TP") -> str:
    """Why one engine of the pool does not hold a request of that many tokens, and the fix; empty: it does. With
    pipeline stages, the batch of one stage holds it. ``fix``: what gives an engine more memory. If only the model's
    name has the format of its weights, the fix is the file that lacks."""
    gpus, free_bytes = pool.tp * pool.pp, kv_pool_bytes(hardware, shape, pool)
    capacity = kv_capacity_tokens(hardware, shape, pool) / pool.pp
    if free_bytes <= 0:
        weights, lacking = (byte_size(each / gpus) for each in (_weight_bytes(shape, pool), -free_bytes))
        fix = format_only_in_name(shape) or fix
        return f"weights take {weights} of each GPU, {lacking} more than there are; {fix}"
    if tokens > capacity:
        fix = format_only_in_name(shape) or f"{fix}, or shorter requests"
        return f"its KV cache has {counted(int(capacity), 'token')}; {fix}"
    return ""


def kv_capacity_tokens(hardware: Hardware, shape: ModelShape, pool: Pool) -> float:
    """Tokens of KV cache of long prompts that one engine holds; if it holds no prompt, the model does not fit. It is
    the memory over the bytes per token (KV heads are copied if TP is larger than their number)."""
    hybrid = hardware.of(pool).hybrid_kv
    per_token = kv_bytes(shape, LONG_TOKENS, hybrid=hybrid) / LONG_TOKENS * kv_copies(shape, pool.tp)
    return max(kv_pool_bytes(hardware, shape, pool), 0.0) / per_token


def kv_block_bytes(hardware: Hardware, shape: ModelShape, pool: Pool) -> float:
    """Bytes of one block of an engine's KV pool, over its GPUs. A block of vLLM has ``block_tokens`` of every layer of
    the largest group. With a hybrid cache, windowed and full layers are groups of their own, which share the pool."""
    grouped = hardware.of(pool).hybrid_kv and shape.sliding_window
    layers = max(full_layers(shape), 1) if grouped else shape.layers
    return kv_bytes_per_token_layer(shape) * kv_copies(shape, pool.tp) * layers * hardware.block_tokens


def kv_pool_blocks(hardware: Hardware, shape: ModelShape, pool: Pool) -> int:
    """Blocks of one engine's KV pool."""
    return int(max(kv_pool_bytes(hardware, shape, pool), 0.0) // kv_block_bytes(hardware, shape, pool))


def engine_cache(deployment: Deployment, pool: Pool, hardware: Hardware, shape: ModelShape) -> EngineCache:
    """The prefix cache of one engine of that pool. With pipeline stages, it is that of the batch of one stage."""
    own = hardware.of(pool)
    return EngineCache.of(
        shape,
        kv_pool_blocks(own, shape, pool) // pool.pp,
        own.block_tokens,
        hybrid=own.hybrid_kv,
        retention=deployment.retention_tokens(pool),
        step_tokens=own.step_tokens,
    )


LONG_TOKENS = 1e6  # of a prompt whose windows count for nothing
