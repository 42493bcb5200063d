"""How long one engine step and one KV transfer take: physics with a few fitted factors. Pure.

**A step** runs B decoding sequences (mean context n tokens) and P prefill tokens through the model
once, on one TP group:

    step = launch + dense / TP + sync log2(TP) + sequence B + kv B n / TP
           + max(experts(T) / TP, T sharded / TP, T exchange)        with T = B + P
           + P attention n' / TP + P unsharded + eager (1 - exp(-P / 2000)) + admit blocks

- ``launch``: scheduler, sampler, CUDA-graph replay; one constant (fitted).
- dense weights are read once: attention and output head bytes / (HBM rate TP share) (roofline,
  fitted share).
- expert weights are read for every expert touched: t tokens that each choose k of E' experts touch
  E' (1 - (1 - k / E')^t) of them, bytes / (HBM rate TP share). E' is the number of experts in
  effective use, a fitted share of all: routing is skewed, and decode times level off long before
  independent uniform choice would have touched every expert.
- every token computes 2 FLOP per active parameter at a fitted share of the tensor rate (twice the
  rate for fp8 weights; 4-bit weights are computed in bfloat16). Reading experts, computing on them
  and, between DP ranks, the all-to-all overlap (two batches in turn): the largest counts (roofline).
- a step with prefill beyond the sizes of the captured CUDA graphs runs without them: a fitted time
  that grows with P and levels off within a few thousand tokens, the same at every TP. It is why a
  prompt of 5,000 costs more per token than a step of 8,192.
- attention of prefill: 2 heads head_dim n' FLOP per full-attention layer for each of query-key and
  attention-value, n' the mean context of the chunk.
- norms, routing, token permutation and all-reduce do not shrink with TP: a fitted time per prefill
  token, proportional to layers x hidden.
- a decoding sequence costs a fitted constant (sampling, detokenizing, streaming) and the reading of
  its KV cache: context x bytes per token of full-attention layers / (HBM rate TP share); windowed
  layers read their window only.
- a request that joins costs the engine a fitted time per block of its prompt, cached or not
  (hashing, block tables).

**Expert parallel** puts whole experts on the ranks of TP x DP and waits for the busiest. With loads
of E' equal experts placed at random on r ranks, the busiest has 1 + z sqrt((r - 1) / E'') of the
mean, z the expected largest of r normal deviates and E'' the experts touched. The all-to-all
between DP ranks carries, per token and layer of experts, hidden x (1 byte out, 2 bytes back) to each
of the other nodes that hold a chosen expert, N (1 - (1 - 1 / N)^k) of N nodes, at the NIC's rate.

**KV capacity**: memory x utilization - weights / (TP PP) - a fitted overhead, over KV bytes per token.
With a connector vLLM 0.11 kept the whole context for windowed layers too (``hybrid_kv`` false).

Every constant is in configs/catalog/*.yaml with its unit, basis (roofline, fitted, measured,
published) and source; docs/model.md derives, fits and compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal, Protocol

from pydantic import Field

from pdlab.catalog import CONFIGS, ModelShape
from pdlab.errors import UsageError
from pdlab.spec import Deployment, Disaggregated, Frozen, Pool, load_yaml

Basis = Literal["roofline", "fitted", "measured", "published", "assumed"]
LinkKind = Literal["nvlink", "srd", "tcp"]

BYTES = {"mxfp4": 4.25 / 8, "fp4": 4.25 / 8, "fp8": 1.0, "int8": 1.0, "bfloat16": 2.0, "float16": 2.0, "float32": 4.0}


class Constant(Frozen):
    """One number with where it is from; ``relative_error`` is its own standard error where that is known."""

    value: float
    unit: str
    basis: Basis
    source: str
    relative_error: float | None = Field(default=None, ge=0)


class FitError(Frozen):
    """Median absolute percentage errors over the held-out points of a cross-validation."""

    tpot_percent: float
    ttft_percent: float
    requests_per_s_percent: float
    points: int
    how: str


class Hardware(Frozen):
    """One kind of GPU (or CPU) with one serving stack: constants by name, see `NAMES` for the ones needed."""

    name: str
    gpu: str
    gpus_per_node: int = Field(ge=1)
    stack: str
    cpu: bool = False  # engines of --local; a rank stands for a GPU
    hybrid_kv: bool = False
    block_tokens: int = Field(default=16, ge=1)
    step_tokens: int = Field(default=8192, ge=1)
    fitted_on: tuple[str, ...] = ()
    constants: dict[str, Constant]
    error: FitError | None = None

    def value(self, name: str) -> float:
        """Raises UsageError when the file has no such constant."""
        try:
            return self.constants[name].value
        except KeyError as error:
            raise UsageError(f"hardware {self.name}: constant {name!r} is missing; have {_names(self)}") from error

    def with_values(self, values: Mapping[str, float]) -> Hardware:
        """The same hardware with some constants replaced (their basis stays)."""
        changed = {name: self.constants[name].model_copy(update={"value": value}) for name, value in values.items()}
        return self.model_copy(update={"constants": self.constants | changed})


def _names(hardware: Hardware) -> str:
    return ", ".join(sorted(hardware.constants))


def load_hardware(name_or_path: str) -> Hardware:
    """A file of configs/catalog/ by name, or a YAML file. Raises UsageError."""
    named = CONFIGS / "catalog" / f"{name_or_path}.yaml"
    if not named.exists() and not Path(name_or_path).exists():
        have = ", ".join(sorted(path.stem for path in (CONFIGS / "catalog").glob("*.yaml")))
        raise UsageError(f"hardware {name_or_path!r} is not known; have {have}, or give a file (see pdlab.calibrate)")
    return load_yaml(named if named.exists() else Path(name_or_path), Hardware)


# --- model arithmetic -------------------------------------------------------------------------


def expert_bytes(shape: ModelShape) -> float:
    """All routed experts: layers x experts x 3 matrices of hidden x intermediate."""
    inner = shape.expert_intermediate or shape.hidden
    return (shape.layers - shape.dense_layers) * shape.experts * 3 * shape.hidden * inner * BYTES[shape.weight_dtype]


def dense_bytes(shape: ModelShape, *, with_embedding: bool) -> float:
    """Attention, dense and shared feed-forward layers and output head; the embedding is stored, not read."""
    wide = BYTES["bfloat16"] if shape.weight_dtype in ("mxfp4", "fp4") else BYTES[shape.weight_dtype]
    head = shape.vocab * shape.hidden * BYTES["bfloat16"]
    return _dense_parameters(shape) * wide + head * (2 if with_embedding else 1)


def _dense_parameters(shape: ModelShape) -> float:
    if shape.kv_latent:
        # Multi-head latent attention, as published for DeepSeek-V3: down and up projections of q (rank 1536)
        # and kv, output.
        q = 1536 * (shape.hidden + shape.heads * (shape.head_dim + 64))
        kv = shape.hidden * shape.kv_latent + (shape.kv_latent - 64) * shape.heads * 2 * shape.head_dim
        attention = q + kv + shape.heads * shape.head_dim * shape.hidden
    else:
        attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    inner = shape.expert_intermediate or shape.hidden
    shared = (shape.layers - shape.dense_layers) * shape.shared_experts * 3 * shape.hidden * inner
    dense = shape.dense_layers * 3 * shape.hidden * (shape.dense_intermediate or 0)
    return shape.layers * attention + shared + dense


def active_parameters(shape: ModelShape) -> float:
    """Parameters that one token passes through, output head left out (prefill computes it for the last token only)."""
    inner = shape.expert_intermediate or shape.hidden
    routed = (shape.layers - shape.dense_layers) * shape.experts_per_token * 3 * shape.hidden * inner
    return _dense_parameters(shape) + routed


def full_layers(shape: ModelShape) -> int:
    """Layers whose attention sees the whole context."""
    return shape.layers if shape.full_attention_layers is None else shape.full_attention_layers


def kv_bytes_per_token_layer(shape: ModelShape) -> float:
    """K and V of one token in one layer (the latent vector alone where the model has one)."""
    values = shape.kv_latent or 2 * shape.kv_heads * shape.head_dim
    return values * BYTES[shape.kv_dtype]


def kv_bytes(shape: ModelShape, tokens: float, *, hybrid: bool) -> float:
    """KV cache of one sequence of ``tokens``: every layer, or with ``hybrid`` the window of windowed layers."""
    windowed = shape.layers - full_layers(shape)
    kept = min(tokens, shape.sliding_window) if hybrid and shape.sliding_window else tokens
    return kv_bytes_per_token_layer(shape) * (full_layers(shape) * tokens + windowed * kept)


# --- one step ---------------------------------------------------------------------------------


class StepTime(Frozen):
    """One engine step taken apart, seconds; ``network_s`` (all-to-all) overlaps with the rest."""

    launch_s: float
    compute_s: float
    memory_s: float
    network_s: float
    total_s: float
    basis: Basis = "fitted"


class KernelTimes(Protocol):
    """Where step times come from: fitted roofline (`StepCosts`), or the tables of another package
    (`pdlab.kernel_tables`). ``admit_s`` is seconds per block of a request that joins."""

    admit_s: float

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        """Seconds of a step of ``batch`` decoding sequences of mean ``context`` and ``prefill_tokens``, each on
        top of ``prefill_context`` tokens (None: ``context``)."""
        ...


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
    admit_s: float  # per block of a joining request
    dp: int  # DP ranks whose tokens meet at the experts
    ranks: int  # ranks among which whole experts are spread; 1: every expert is split over all
    experts: float  # in effective use
    routed: float  # share of the prefill compute that is in routed experts

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        """Seconds of one step of ``batch`` sequences of mean ``context`` and ``prefill_tokens``, each on top
        of ``prefill_context`` tokens (None: ``context``)."""
        tokens = (batch + prefill_tokens) * self.dp
        touched = 1.0 - math.exp(self.log_untouched * tokens) if tokens < MANY_TOKENS else 1.0
        experts_s = self.experts_s * touched
        waits = self._busiest(touched) if self.ranks > 1 else 1.0
        own = batch + prefill_tokens
        compute_s = own * self.prefill_s * (1 + self.routed * (waits - 1))
        eager_s = self.eager_s * (1.0 - math.exp(-prefill_tokens / EAGER_TOKENS)) if prefill_tokens else 0.0
        before = context if prefill_context is None else prefill_context
        return (
            self.fixed_s
            + batch * (self.sequence_s + self.context_s * context)
            + max(experts_s * waits, compute_s, own * self.exchange_s)
            + prefill_tokens * (self.attention_s * before + self.unsharded_s)
            + eager_s
        )

    def _busiest(self, touched: float) -> float:
        """Load of the busiest rank over the mean rank's."""
        used = max(self.experts * touched, 1.0)
        return min(1 + _largest(self.ranks) * math.sqrt((self.ranks - 1) / used), self.ranks)


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
    together = tp * pool.dp  # vLLM splits the experts over TP x DP, whole ones with expert parallel
    inner = shape.expert_intermediate or shape.hidden
    routed = (shape.layers - shape.dense_layers) * shape.experts_per_token * 3 * shape.hidden * inner
    flops_per_s = value("tensor_tflops") * 1e12 * value("tensor_share") * tp
    if shape.weight_dtype == "fp8":
        flops_per_s *= 2
    exchange_s = 0.0
    nodes = -(-together // hardware.gpus_per_node)
    if pool.dp > 1:
        reached = nodes * (1 - (1 - 1 / nodes) ** shape.experts_per_token) * (nodes - 1) / nodes
        sent = 3 * shape.hidden * reached * (shape.layers - shape.dense_layers)
        exchange_s = sent / (value("alltoall_gb_per_s") * 1e9 * tp)
    used = max(shape.experts * value("experts_in_use"), shape.experts_per_token + 1.0)
    return StepCosts(
        fixed_s=value("launch_ms") * 1e-3 * shape.layers / REFERENCE_LAYERS
        + dense_bytes(shape, with_embedding=False) / (rate * tp * value("weight_read_share"))
        + value("sync_ms") * 1e-3 * math.log2(tp) * shape.layers / REFERENCE_LAYERS,
        experts_s=expert_bytes(shape) * used / shape.experts / (rate * together * value("weight_read_share")),
        log_untouched=math.log1p(-shape.experts_per_token / used),
        sequence_s=value("sequence_ms") * 1e-3,
        context_s=kv_bytes_per_token_layer(shape) * full_layers(shape) / (rate * tp * value("kv_read_share")),
        prefill_s=2 * active_parameters(shape) / flops_per_s,
        unsharded_s=value("unsharded_ns") * 1e-9 * shape.layers * shape.hidden / REFERENCE_WIDTH,
        eager_s=value("eager_ms") * 1e-3 * shape.layers / REFERENCE_LAYERS,
        attention_s=4 * shape.heads * shape.head_dim * full_layers(shape) / flops_per_s,
        exchange_s=exchange_s,
        admit_s=value("admit_us") * 1e-6,
        dp=pool.dp,
        ranks=together if pool.expert_parallel else 1,
        experts=used,
        routed=routed / active_parameters(shape),
    )


REFERENCE_LAYERS = 36  # the calibrated model, gpt-oss-120b: constants per layer scale from it
REFERENCE_WIDTH = 36 * 2880


def explain_step(costs: StepCosts, batch: float, prefill_tokens: float, context: float) -> StepTime:
    """The same step taken apart."""
    total_s = costs.step_s(batch, prefill_tokens, context)
    network_s = (batch + prefill_tokens) * costs.exchange_s
    launch_s = costs.fixed_s + batch * costs.sequence_s
    cached_s = batch * costs.context_s * context
    rest_s = total_s - launch_s - cached_s
    compute_s = rest_s if prefill_tokens else 0.0
    return StepTime(
        launch_s=launch_s,
        compute_s=compute_s,
        memory_s=cached_s + rest_s - compute_s,
        network_s=network_s,
        total_s=total_s,
    )


def kv_capacity_tokens(hardware: Hardware, shape: ModelShape, pool: Pool) -> float:
    """Tokens of KV cache that one engine holds; below one prompt means that the model does not fit.

    Memory of the TP x PP GPUs x utilization - weights - overhead per GPU, over the bytes per token
    (KV heads are copied when TP is larger than their number).
    """
    value = hardware.value
    gpus = pool.tp * pool.pp
    experts = expert_bytes(shape) / (pool.dp if pool.expert_parallel else 1)
    weights_gb = (experts + dense_bytes(shape, with_embedding=True)) / 1e9
    free_gb = gpus * (value("memory_gb") * value("memory_utilization") - value("overhead_gb")) - weights_gb
    copies = max(1.0, pool.tp / shape.kv_heads) if not shape.kv_latent else pool.tp
    per_token = kv_bytes_per_token_layer(shape) * shape.layers * copies
    return max(free_gb, 0.0) * 1e9 / per_token


# --- KV transfer ------------------------------------------------------------------------------


@dataclass(slots=True)
class TransferCosts:
    """Moving one request's KV: ``setup_s`` + bytes / rate, and a stall of the decode engine per fragment.

    An engine's ranks move their shares at once, so its rate grows with TP; of the two ends the slower counts.
    """

    setup_s: float
    prefill_bytes_per_s: float  # out of one prefill engine
    decode_bytes_per_s: float  # into one decode engine
    shared: bool  # one transfer at a time over the whole link, whatever the number of engines
    bytes_per_token: float
    post_s_per_token: float  # the decode engine stands still so long to post descriptors
    stall_s_per_token: float  # and so long when blocks do not merge
    always_fragmented: bool


def link_of(deployment: Deployment) -> LinkKind:
    """The link a deployment means: NVLink in a pack, SRD in a spread, TCP where UCX_TLS says so."""
    topology = deployment.topology
    if not isinstance(topology, Disaggregated):
        return "nvlink"
    tls = topology.transport.ucx_tls
    if tls and "tcp" in tls.split(",") and not {"srd", "rc", "cuda_ipc", "all"} & set(tls.split(",")):
        return "tcp"
    return "nvlink" if topology.placement == "pack" else "srd"


def transfer_costs(hardware: Hardware, shape: ModelShape, topology: Disaggregated, link: LinkKind) -> TransferCosts:
    """Costs of one (prefill, decode) pair over ``link``; rates of configs/catalog, per GPU or per node."""
    value = hardware.value
    per_node = link == "tcp"
    rate = value(f"{link}_gb_per_s") * 1e9
    # Over cuda_ipc every block that does not merge with its neighbour is a copy of its own, posted by the
    # engine's thread. Heads split between different TP degrees never merge.
    descriptors = 2 * shape.layers / hardware.block_tokens
    post_s = value("post_us") * 1e-6 * descriptors
    stall_s = value("fragment_us") * 1e-6 * descriptors if link == "nvlink" else post_s
    return TransferCosts(
        setup_s=value("transfer_setup_ms") * 1e-3,
        prefill_bytes_per_s=rate if per_node else rate * topology.prefill.tp,
        decode_bytes_per_s=rate if per_node else rate * topology.decode.tp,
        shared=per_node,
        bytes_per_token=kv_bytes(shape, 1e6, hybrid=hardware.hybrid_kv) / 1e6,
        post_s_per_token=post_s,
        stall_s_per_token=stall_s,
        always_fragmented=topology.prefill.tp != topology.decode.tp,
    )
