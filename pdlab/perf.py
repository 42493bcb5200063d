"""How long one engine step and one KV transfer take: physics with a few fitted factors. Pure.

**A step** runs B decoding sequences (mean context n tokens) and P prefill tokens through the model
once, on one TP group:

    step = launch + dense / TP + sync log2(TP) + sequence B + kv B n / TP
           + experts(B + P) / TP + P (shared + (sharded + attention n) / TP)

- ``launch``: scheduler, sampler, CUDA-graph replay; one constant (fitted).
- dense weights are read once: attention and output head bytes / (HBM rate TP) (roofline).
- expert weights are read for every expert touched: a batch of t tokens that each choose k of E
  experts touches E (1 - (1 - k / E)^t) of them (independent uniform choice), bytes / (HBM rate TP eff).
- prefill computes 2 FLOP per active parameter and token, plus 2 heads head_dim n per full-attention
  layer for each of query-key and attention-value (n: mean context of the chunk, half a prompt),
  at a fitted share of the tensor rate, divided by TP; and a fitted time per token that does not
  shrink with TP (all-reduce, norms, routing, memory traffic of activations).
- a decoding sequence costs a fitted constant (sampling, detokenizing, streaming) and the reading of
  its KV cache: context x bytes per token of full-attention layers / (HBM rate TP eff); windowed
  layers read their window only.

**Expert parallel** puts whole experts on the ranks of TP x DP: the busiest rank holds more than
the mean of the touched experts, by the expected largest of r normal deviates (r ranks, binomial
spread); tokens cross an all-to-all over the link between ranks.

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

Basis = Literal["roofline", "fitted", "measured", "published"]
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
    """One engine step taken apart, seconds."""

    launch_s: float
    compute_s: float
    memory_s: float
    network_s: float
    total_s: float
    basis: Basis = "fitted"


class KernelTimes(Protocol):
    """Where step times come from: fitted roofline (`StepCosts`) or the tables of another package."""

    def step_s(self, batch: float, prefill_tokens: float, context: float) -> float:
        """Seconds of a step of ``batch`` decoding sequences of mean ``context`` and ``prefill_tokens``."""
        ...


@dataclass(slots=True)
class StepCosts:
    """A pool's step in plain numbers (seconds, per unit), for the simulator's inner loop."""

    fixed_s: float  # launch, dense weights, synchronisation
    experts_s: float  # all experts read once
    log_untouched: float  # log(1 - k / E)
    sequence_s: float  # per decoding sequence
    context_s: float  # per decoding sequence and token of context
    prefill_s: float  # per prefill token, short context
    attention_s: float  # per prefill token and token of context before it
    ranks: int  # ranks among which whole experts are spread; 1: every expert is split over TP
    experts: int

    def step_s(self, batch: float, prefill_tokens: float, context: float) -> float:
        """Seconds of one step."""
        tokens = batch + prefill_tokens
        touched = 1.0 - math.exp(self.log_untouched * tokens * self.ranks) if tokens < 2000 else 1.0
        read_s = self.experts_s * touched
        if self.ranks > 1:
            read_s *= self._imbalance(touched)
        compute_s = prefill_tokens * (self.prefill_s + self.attention_s * context)
        return self.fixed_s + batch * (self.sequence_s + self.context_s * context) + read_s + compute_s

    def _imbalance(self, touched: float) -> float:
        """Busiest rank over mean rank, experts touched independently: 1 + largest of r deviates x spread."""
        each = self.experts / self.ranks
        mean = each * touched
        if mean <= 0:
            return 1.0
        spread = math.sqrt(max(each * touched * (1 - touched), 0.0))
        return min(1 + _largest(self.ranks) * spread / mean, self.ranks)


def _largest(count: int) -> float:
    """Expected largest of ``count`` standard normal deviates (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def step_costs(hardware: Hardware, shape: ModelShape, pool: Pool) -> StepCosts:
    """The costs of one engine (one DP rank) of ``pool``. Raises UsageError."""
    value = hardware.value
    tp = pool.tp
    rate = value("memory_gb_per_s") * 1e9
    ranks = tp * pool.dp if pool.expert_parallel else pool.dp
    spread_over = tp * pool.dp if pool.expert_parallel else tp
    shared_s = value("prefill_unsharded_ns") * 1e-9 * shape.layers * shape.hidden / REFERENCE_WIDTH
    sharded_s = 2 * active_parameters(shape) / (value("tensor_tflops") * 1e12 * value("tensor_share") * tp)
    attention_flops = 4 * shape.heads * shape.head_dim * full_layers(shape)
    exchange_s = 0.0
    if ranks > 1 and pool.dp > 1:
        # Dispatch and combine: hidden activations in bfloat16 to and from each chosen expert's rank.
        sent = 2 * 2 * shape.hidden * shape.experts_per_token * (shape.layers - shape.dense_layers)
        exchange_s = sent / (value("srd_gb_per_s") * 1e9)
    return StepCosts(
        fixed_s=value("launch_ms") * 1e-3
        + dense_bytes(shape, with_embedding=False) / (rate * tp)
        + value("sync_ms") * 1e-3 * math.log2(tp) * shape.layers / REFERENCE_LAYERS,
        experts_s=expert_bytes(shape) / (rate * spread_over * value("expert_read_share")),
        log_untouched=math.log1p(-min(shape.experts_per_token / shape.experts, 0.999)),
        sequence_s=value("sequence_ms") * 1e-3 + exchange_s,
        context_s=kv_bytes_per_token_layer(shape) * full_layers(shape) / (rate * tp * value("kv_read_share")),
        prefill_s=shared_s + sharded_s + exchange_s,
        attention_s=attention_flops / (value("tensor_tflops") * 1e12 * value("tensor_share") * tp),
        ranks=ranks,
        experts=shape.experts,
    )


REFERENCE_LAYERS = 36  # the calibrated model, gpt-oss-120b: constants per layer scale from it
REFERENCE_WIDTH = 36 * 2880


def explain_step(costs: StepCosts, batch: float, prefill_tokens: float, context: float) -> StepTime:
    """The same step taken apart."""
    total_s = costs.step_s(batch, prefill_tokens, context)
    compute_s = prefill_tokens * (costs.prefill_s + costs.attention_s * context)
    launch_s = costs.fixed_s + batch * costs.sequence_s
    memory_s = batch * costs.context_s * context + costs.experts_s * (
        1 - math.exp(costs.log_untouched * (batch + prefill_tokens) * costs.ranks)
    )
    return StepTime(launch_s=launch_s, compute_s=compute_s, memory_s=memory_s, network_s=0.0, total_s=total_s)


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
    stall_s_per_token: float  # the decode engine stands still so long when blocks do not merge
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
    stall_s = value("fragment_us") * 1e-6 * 2 * shape.layers / hardware.block_tokens if link == "nvlink" else 0.0
    return TransferCosts(
        setup_s=value("transfer_setup_ms") * 1e-3,
        prefill_bytes_per_s=rate if per_node else rate * topology.prefill.tp,
        decode_bytes_per_s=rate if per_node else rate * topology.decode.tp,
        shared=per_node,
        bytes_per_token=kv_bytes(shape, 1e6, hybrid=hardware.hybrid_kv) / 1e6,
        stall_s_per_token=stall_s,
        always_fragmented=topology.prefill.tp != topology.decode.tp,
    )
