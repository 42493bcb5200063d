"""Step times of a performance database as tables: aiconfigurator-core's, filled once and then kept in the user's cache.

The one module that imports ``aiconfigurator_core`` (the extra ``perf``), and only where the cache has no table. Its
database has times of single operations, measured on GPUs with one version of each engine; it adds them up to a step of
a model. Beyond its data it extrapolates silently, so pdlab queries it only up to `LIMITS`. Beyond them
`pdlab.sim.step_source` continues the tables, with a finding.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pydantic import ValidationError

from pdlab.core.catalog import ModelShape, config_of
from pdlab.core.commands import INSTALL_TABLES
from pdlab.core.deployment import Pool
from pdlab.core.errors import NoHomeError, UsageError, WriteError
from pdlab.core.files import cache_dir, replace
from pdlab.core.model_files import CONFIG, MODELOPT, ModelFiles
from pdlab.core.schema import Frozen
from pdlab.sim.expert_tables import OtherWay, RoutedExperts, between, mended
from pdlab.sim.older_engines import older_kernels, with_older
from pdlab.sim.step_source import FARTHEST, BilinearTable, Limits, LinearTable, Tabulated

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
INSTALL = f"{INSTALL_TABLES}, which installs {PACKAGE} {VERSION} (Python 3.11 or later)"
# As far as the database's attention was measured: 131,072 tokens of context, 1,024 sequences of 1,024 tokens, prompts
# of 16,384 tokens; a step of 8,192 prefill tokens beside a whole batch.
LIMITS = Limits(tokens=8192 + 1024, batch=1024, context=131_072, prefill_tokens=8192, prefix=131_072)
# Formats whose tables may be slower than those of bfloat16, which no engine would then use -> another format; the batch
# and context at which both are compared, and how much slower a step may be: most of it is not of those matrices.
DOUBTED = {"fp8_block": "fp8", "fp8": "fp8_block", "fp8_static": "fp8"}
PLAIN, COMPARED_AT, SLOWER = "bfloat16", (32, 1024), 1.1


# The database's names of the formats of each part of a model.
FORMATS: dict[str, tuple[str, ...]] = {
    "gemm": (
        *("bfloat16", "int8_wo", "int4_wo", "fp8", "fp8_static", "sq", "fp8_block", "fp8_ootb", "nvfp4", "nvfp4_wo"),
        "w4a16_nvfp4",
    ),
    "moe": (
        *("bfloat16", "fp8", "int4_wo", "fp8_block", "w4afp8", "nvfp4", "nvfp4_wo", "w4a16_mxfp4"),
        *("w4a8_mxfp4_mxfp8", "w4a8_mxfp4_mxfp8_trtllm", "w4a16_mxfp4_cutlass", "w4a16_nvfp4"),
    ),
    "kvcache": ("bfloat16", "int8", "fp8"),
    "fmha": ("bfloat16", "float16", "fp8", "fp8_block"),
}


class UsedFormats(NamedTuple):
    """Formats that an engine uses, if the database would look for others. ``measured``: it has tables of them for this
    GPU; else they are derived from other formats (mode HYBRID).
    """

    formats: dict[str, str]
    measured: bool = True


# By engine, architecture, and system (None: every one). gpt-oss on Blackwell: vLLM's kernels take MXFP8 activations.
# DeepSeek: the attention of both engines is measured in bfloat16 only.
USED_FORMATS: dict[tuple[str, str, str | None], UsedFormats] = {
    **{
        ("vllm", "GptOssForCausalLM", system): UsedFormats({"moe": "w4a8_mxfp4_mxfp8"}, measured=False)
        for system in ("b200_sxm", "b300_sxm", "gb200", "gb300")
    },
    **{(engine, "DeepseekV3ForCausalLM", None): UsedFormats({"fmha": "bfloat16"}) for engine in ("sglang", "trtllm")},
}
AS_IT_IS = UsedFormats({})


def formats_of(model: ModelShape, used: UsedFormats, quant: Mapping[Any, str]) -> dict[str, str]:
    """The formats that the database is asked for. ``quant``: those that were chosen. The KV cache has the format of the
    shape, by which memory and transfers are counted: the database takes 8 bits for every checkpoint in 8 or 4 bits.
    Attention over KV cache of 16 bits computes in 16 bits."""
    kept = SIXTEEN_BITS.get(model.kv_dtype, model.kv_dtype)
    own = {"kvcache": kept} if kept in FORMATS["kvcache"] else {}
    if quant.get("kvcache", kept) == PLAIN:
        own["fmha"] = PLAIN
    return {**own, **used.formats, **quant}


SIXTEEN_BITS = {"float16": PLAIN}  # a format of a shape -> the database's name of the one with as many bits
# The version of each engine whose tables the package calls current, and the one of systems where that is another.
CURRENT = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
CURRENT_ON = {"a100_sxm": {"vllm": "0.14.0", "sglang": "0.5.10", "trtllm": "1.0.0"}}


def literal_version(system: str, engine: str, version: str = "current") -> str:
    """The version of the tables."""
    return {**CURRENT, **CURRENT_ON.get(system, {})}[engine] if version == "current" else version


class _CachedTables(Frozen):
    """An entry of the cache: the key of the tables, and the tables."""

    of: dict[str, str]
    tables: Tabulated


def tabulate(
    model: ModelShape,
    system: str,
    engine: str,
    version: str,
    pool: Pool,
    quant: Mapping[Any, str],
    mode: str,
    engine_version: str | None = None,
) -> Tabulated:
    """The steps of one engine (one DP rank) of ``pool``, arguments as of `pdlab.sim.hardware.StepTables`. The stages of
    a pipeline count as one engine: a step passes all of them.

    From the cache, or computed in some seconds. Raises UsageError if the package is missing, or if the database lacks
    the model, its formats or the GPU.
    """
    files = config_of(model)
    if files is None:
        raise UsageError(
            f"{model.name}: step times of {system} are looked up by the model's {CONFIG}, which its file does not give;"
            " give the model as a folder, a Hugging Face id, or with the keys of its config"
        )
    architecture = (files.config.get("architectures") or ["?"])[0]
    used = USED_FORMATS.get((engine, architecture, system)) or USED_FORMATS.get((engine, architecture, None), AS_IT_IS)
    formats = formats_of(model, used, quant)
    if mode == "SILICON" and not used.measured and used.formats.items() <= formats.items():
        mode = "HYBRID"
    key = {
        "core": VERSION,
        "grid": _digest([QUESTIONS, BESIDE, _axes()]),
        "system": system,
        "engine": engine,
        "version": literal_version(system, engine, version),
        "mode": mode,
        "model": _digest([files.config, files.modelopt]),
        "parallel": f"tp{pool.tp} dp{pool.dp}{' ep' if pool.expert_parallel else ''}",
        "quant": " ".join(f"{name}={formats[name]}" for name in sorted(formats)),
    }
    if engine in OTHER_KERNELS:
        key["kernels"] = str(OTHER_KERNELS[engine])
    older = older_kernels(system, engine, engine_version)
    name = json.dumps({**key, "older": older and older.before}, sort_keys=True)
    if name not in _known:
        tables = _kept(key) or _keep(key, _filled(key, _TableSource(files, model, pool, formats)))
        _known[name] = with_older(tables, older, model, files.config, formats, pool) if older else tables
    return _known[name]


_known: dict[str, Tabulated] = {}


class _TableSource(NamedTuple):
    """What the key of the tables was made of."""

    files: ModelFiles
    model: ModelShape
    pool: Pool
    formats: Mapping[str, str]


def _file(key: Mapping[str, str]) -> Path:
    return cache_dir() / "step-times" / f"{key['system']}-{key['engine']}-{_digest(key)}.json"


def _kept(key: Mapping[str, str]) -> Tabulated | None:
    with suppress(OSError, NoHomeError, ValidationError):
        kept = _CachedTables.model_validate_json(_file(key).read_bytes())
        if kept.of == key:
            return kept.tables
    return None


def _keep(key: dict[str, str], tables: Tabulated) -> Tabulated:
    """Nothing is kept where the cache cannot be written."""
    with suppress(WriteError, NoHomeError):
        replace(_file(key), _CachedTables(of=key, tables=tables).model_dump_json().encode())
    return tables


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


# --- the package ----------------------------------------------------------------------------------


class _Compiled(NamedTuple):
    """An engine of the package, the version of its tables, and the formats of its matrices and of its experts."""

    handle: Any
    literal: str
    formats: Mapping[str, str]
    experts: RoutedExperts | None = None
    other_experts: tuple[OtherWay, ...] = ()
    exchange: OtherWay | None = None
    matrices: tuple[OtherWay, ...] = ()
    latent: _LatentAttention | None = None


class _LatentAttention(NamedTuple):
    """Seconds that latent attention takes more in other tables (below 0: less): in a prefill step by its tokens, and in
    a decode step by its batch and context."""

    prefill_s: Callable[[float], float]
    decode_s: Callable[[float, float], float]


def _filled(of: Mapping[str, str], source: _TableSource) -> Tabulated:
    what = f"step times of {source.model.name} on {of['system']}, {of['engine']} {of['version']}, {of['parallel']}"
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(f"{what} come from a package that is not installed; {INSTALL}") from error
    if installed != VERSION:
        raise UsageError(f"{what}: {PACKAGE} {installed} is installed, and its tables are others; {INSTALL}")
    with TemporaryDirectory() as temporary, _quiet(), _refused(what, of["mode"]):
        folder = Path(temporary) / f"model-{of['model']}"
        replace(folder / CONFIG, json.dumps(source.files.config).encode())
        if source.files.modelopt is not None:
            replace(folder / MODELOPT, json.dumps(source.files.modelopt).encode())
        compiled = _compiled(folder, of, source.pool, source.formats)
        _check_format(compiled, folder, of, source, what)
        return _grid(
            compiled,
            f"{PACKAGE} {VERSION}: {of['engine']} {compiled.literal}, {of['mode']} tables",
        )


def _compiled(folder: Path, of: Mapping[str, str], pool: Pool, formats: Mapping[str, str]) -> _Compiled:
    from aiconfigurator_core.sdk import operations, perf_database
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model

    system, engine, mode = of["system"], of["engine"], of["mode"]
    literal = perf_database.resolve_query_version(system, engine, of["version"])
    ranks = pool.tp * pool.dp
    over = (1, ranks) if pool.expert_parallel else (ranks, 1)  # over how many TP and EP ranks
    named = {f"{name}_quant_mode": value for name, value in formats.items()}
    model = get_model(str(folder), build_model_config(pool.tp, 1, pool.dp, *over, **named), engine)
    config = json.loads((folder / CONFIG).read_bytes())
    if norms_all_heads(config, pool):
        layers, heads = config["num_hidden_layers"], (config["num_attention_heads"], config["num_key_value_heads"])
        for phase in (model.context_ops, model.generation_ops):
            for count in heads:
                values = config["head_dim"] * max(count // pool.tp, 1)
                for name in ("variance", "scale"):
                    phase.append(operations.ElementWise(f"qk_norm_{name}", layers, values, values, 0.8))
            # The database's smallest message. Below it the package goes straight to no time for no message.
            sent = LEAST_MESSAGE if phase is model.generation_ops else VARIANCE_VALUES
            phase.append(operations.CustomAllReduce("qk_norm_ar", layers, sent, pool.tp))
    database = perf_database.get_database_view(
        system, engine, literal, database_mode=mode, allow_missing_data=mode in ("SOL", "EMPIRICAL")
    )
    if engine == "vllm":
        gathers = any(isinstance(each, operations.MoEDispatch) for each in model.context_ops)
        for phase in (model.context_ops, model.generation_ops):
            phase[:] = [*(_fused(each, phase) for each in phase), *_rotations(phase)]
            if gathers and pool.dp == 1:
                phase[:] = [each for each in phase if not each._name.endswith(ALL_REDUCES_OF_TP)]
    if quantizes_after_attention(engine, database.system_spec["gpu"]["sm_version"]):
        for phase in (model.context_ops, model.generation_ops):
            phase[:] = [_of_16_bits(each) if each._name.endswith("_proj_gemm") else each for each in phase]
    handle = _handle(model, folder, database)
    shape = (str(folder), build_model_config(pool.tp, 1, pool.dp, *over, **named), engine)
    experts = _experts(handle, model, shape, pool, over[1])

    def model_of(other: str) -> Any:
        return get_model(str(folder), build_model_config(pool.tp, 1, pool.dp, *over, **named), other)

    compiling = _Compiling(handle, model, folder, system, engine, pool, over[1])
    other_experts, exchange = _other_ways(compiling, model_of)
    parts = {"gemm": model.config.gemm_quant_mode.name}
    if experts is not None:
        parts["moe"] = model.config.moe_quant_mode.name
    matrices, latent = _other_matrices(compiling), _other_latent_attention(compiling)
    return _Compiled(handle, literal, parts, experts, other_experts, exchange, matrices, latent)


def _handle(model: Any, folder: Path, database: Any) -> Any:
    import aiconfigurator_core
    from aiconfigurator_core.sdk import EngineHandle
    from aiconfigurator_core.sdk.engine import build_engine_spec_json

    spec = build_engine_spec_json(
        model,
        model_path=str(folder),
        system=database.system,
        backend=database.backend,
        backend_version=database.version,
        kv_block_size=None,
        systems_path=None,
        nextn=0,
        database=database,
    )
    return EngineHandle(bytes(aiconfigurator_core.engine_spec_bincode_from_json(spec)))


def _experts(handle: Any, model: Any, shape: tuple[str, Any, str], pool: Pool, ranks: int) -> RoutedExperts | None:
    """Of a model with routed experts for which the database has equal loads. ``shape``: what the model is made of, to
    make it again; ``ranks``: over which whole experts are spread."""
    from aiconfigurator_core.sdk import operations
    from aiconfigurator_core.sdk.models import get_model

    folder, config, engine = shape
    config.workload_distribution = "balanced"
    skewed, equal = (
        [each for each in one.context_ops if isinstance(each, operations.MoE)]
        for one in (model, get_model(folder, config, engine))
    )
    if not skewed:
        return None
    (first, *_) = skewed
    skewed_s, equal_s = (_seconds_of(handle, each) for each in (skewed, equal))
    try:
        equal_s(1.0)
    except Exception:  # whatever the package raises for loads that its database does not have
        ranks = 1
    return RoutedExperts(
        skewed_s=skewed_s,
        equal_s=equal_s,
        # The experts of a step get the tokens of all ranks of attention.
        tokens_each=first._num_experts / first._topk / pool.dp,
        ranks=ranks,
        experts=first._num_experts,
    )


def _seconds_of(handle: Any, operations: Sequence[Any]) -> Callable[[float], float]:
    """By the tokens of a step."""
    from aiconfigurator_core.sdk.engine import build_ops_json

    def took_s(ops: str, tokens: float) -> float:
        count = max(round(tokens), 1)
        found = handle.evaluate_ops_json(ops, is_context=True, batch_size=1, s=count, x=count)
        return sum(float(each[1]) for each in found) * 1e-3

    return partial(took_s, build_ops_json(operations))


class _Compiling(NamedTuple):
    """What an engine of the package is made of. ``ranks``: over which whole experts are spread."""

    handle: Any
    model: Any
    folder: Path
    system: str
    engine: str
    pool: Pool
    ranks: int


# Systems and engines whose tables have a kernel of routed experts that the engine has too, and its own tables lack:
# by engine, format and system. On Blackwell TensorRT-LLM has kernels of its own (TRTLLM-Gen). SGLang calls them through
# FlashInfer, and its tables have them in 4 and 8 bits for up to 16,384 tokens. Of TensorRT-LLM's tables the package
# uses them in 4 bits, on B200 and GB200, and for up to 128 tokens.
LACKED_KERNELS = {
    ("trtllm", kind, system): (system, "sglang")
    for kind in ("nvfp4", "fp8_block")
    for system in ("b200_sxm", "b300_sxm", "gb200", "gb300")
}
ONE_NVLINK = {"gb200": 72, "gb300": 72}  # GPUs, where it is not one node
NODE_GPUS = 8
SENT_BY = ("sglang", "deepep_ll")  # whose tables have the exchange on every system
DEEPEP_FORMAT = "fp8_block"  # of the experts that SGLang runs behind that exchange
# The kernels behind it are DeepGEMM's: by phase, up to how many tokens of a rank. Those of decode were measured up to
# 128, SGLang's default limit. Those of prefill were measured up to 16,384.
BEHIND_EXCHANGE = {"generation": 128 * FARTHEST, "context": math.inf}
OTHER_KERNELS = {"sglang": 1, "trtllm": 1}  # as `QUESTIONS`, of `_other_ways` of one engine


def _other_ways(of: _Compiling, model_of: Callable[[str], Any]) -> tuple[tuple[OtherWay, ...], OtherWay | None]:
    """Of routed experts, and of the exchange of their tokens, as far as the database has another way."""
    from aiconfigurator_core.sdk import operations

    gathers, experts = (
        [each for each in of.model.context_ops if isinstance(each, kind)]
        for kind in (operations.MoEDispatch, operations.MoE)
    )
    if not experts:
        return (), None
    (first, *_) = experts
    table_s, kind = _seconds_of(of.handle, experts), first._quant_mode.name
    of_experts = []

    def another(system: str, engine: str, ops: Callable[[Any], list[Any]]) -> Callable[[float], float] | None:
        try:
            model = model_of(engine)
            took_s = _seconds_of(_handle(model, of.folder, _measured(system, engine)), ops(model))
            took_s(1.0)
        except Exception:  # whatever the package raises for what its database does not have
            return None
        return took_s

    def experts_of(model: Any) -> list[Any]:
        return [each for each in model.context_ops if isinstance(each, operations.MoE)]

    lacked = LACKED_KERNELS.get((of.engine, kind, of.system))
    if lacked and (other_s := another(*lacked, experts_of)):
        of_experts.append(OtherWay(table_s, other_s))
    if not gathers or of.pool.dp == 1:
        return tuple(of_experts), None
    engine, exchange = SENT_BY
    common = {
        "hidden_size": first._hidden_size,
        "topk": first._topk,
        "num_experts": first._num_experts,
    }

    def behind(phase: str, ranks: int) -> Callable[[float], float] | None:
        ops = [
            operations.MoEExpertCompute(
                "experts_behind_exchange",
                first._scale_factor,
                inter_size=first._inter_size,
                moe_ep_size=ranks,
                quant_mode=first._quant_mode,
                workload_distribution="uniform",
                attention_dp_size=of.pool.dp,
                inference_phase=phase,
                **common,
            )
        ]
        return another(of.system, engine, lambda _: ops)

    if of.engine == engine and kind == DEEPEP_FORMAT and of.ranks > 1:
        for phase, most in BEHIND_EXCHANGE.items():
            if other_s := behind(phase, of.ranks) or between(behind(phase, of.ranks // 2), behind(phase, of.ranks * 2)):
                of_experts.append(OtherWay(table_s, other_s, most))
    if of.ranks <= first._topk:
        return tuple(of_experts), None
    # Beyond as many ranks as a token has experts, engines send each token to its experts only. The database gathers
    # all tokens on every rank. On one NVLink the exchange of a node counts: a rank sends as much to more ranks.
    nodes = math.ceil(of.ranks / ONE_NVLINK.get(of.system, NODE_GPUS))
    nodes = 1 << (nodes - 1).bit_length()
    sent = [
        operations.MoEAllToAll(
            f"exchange_{phase}",
            gathers[0]._scale_factor,
            phase=phase,
            comm_backend=exchange,
            moe_ep_size=nodes * NODE_GPUS,
            node_num=nodes,
            **common,
        )
        for phase in ("dispatch", "combine")
    ]
    sent_s = another(of.system, engine, lambda _: sent)
    return tuple(of_experts), OtherWay(_seconds_of(of.handle, gathers), sent_s) if sent_s else None


# Matrices whose tables have faults, by engine, format and system, and the system with the same chip whose tables have
# none. Of vLLM's fp8 matrices of 2 to 256 rows on B200, 9 % take at least 1.3 times as long as on GB200 and on B300,
# without any pattern (8192 x 7168 for 2, 4, 8 rows: 17, 34, 18 us). On the others at most 0.02 % do (decision 034).
FAULTY_MATRICES = {("vllm", kind, "b200_sxm"): "gb200" for kind in ("fp8", "fp8_static")}
FAULT = 1.3  # times as long


def _other_matrices(of: _Compiling) -> tuple[OtherWay, ...]:
    """Each of the matrices that may be faulty, with its times on the other system."""
    from aiconfigurator_core.sdk import operations

    found = []
    for gemm in (each for each in of.model.context_ops if isinstance(each, operations.GEMM)):
        other = FAULTY_MATRICES.get((of.engine, gemm._quant_mode.name, of.system))
        if other is not None:
            handle = _handle(of.model, of.folder, _measured(other, of.engine))
            found.append(OtherWay(_seconds_of(of.handle, [gemm]), _seconds_of(handle, [gemm])))
    return tuple(found)


# Latent attention of vLLM whose tables have faults, and the system with the same chip whose tables have none. On the
# three it takes 40 to 60 us longer than on B200 in every layer of a decode step, and 1.6 times as long in prefill. Its
# parts take as long on all four, and the sum of them is as long as the whole on B200 (decision 036).
FAULTY_LATENT = {("vllm", system): "b200_sxm" for system in ("b300_sxm", "gb200", "gb300")}


def _other_latent_attention(of: _Compiling) -> _LatentAttention | None:
    from aiconfigurator_core.sdk.engine import build_ops_json

    other = FAULTY_LATENT.get((of.engine, of.system))
    (prefill, decode) = (
        [each for each in phase if each._name.endswith("_mla_block")]
        for phase in (of.model.context_ops, of.model.generation_ops)
    )
    if other is None or not decode:
        return None
    handle = _handle(of.model, of.folder, _measured(other, of.engine))
    whole = OtherWay(_seconds_of(of.handle, prefill), _seconds_of(handle, prefill))
    ops = build_ops_json(decode)

    def decode_s(batch: float, context: float) -> float:
        own_s, other_s = (
            1e-3
            * sum(
                float(each[1])
                for each in one.evaluate_ops_json(
                    ops, is_context=False, batch_size=int(batch), s=int(context) + 1, x=int(batch)
                )
            )
            for one in (of.handle, handle)
        )
        return min(other_s - own_s, 0.0)

    return _LatentAttention(lambda tokens: min(whole.more_s(tokens), 0.0), decode_s)


def _measured(system: str, engine: str) -> Any:
    """The database of measured tables."""
    from aiconfigurator_core.sdk import perf_database

    literal = perf_database.resolve_query_version(system, engine, "current")
    return perf_database.get_database_view(system, engine, literal, database_mode="SILICON", allow_missing_data=False)


BLACKWELL = 100  # compute capability, times 10


def quantizes_after_attention(engine: str, capability: int) -> bool:
    """Whether attention gives its output in 16 bits, so that a kernel of its own quantizes it for the next matrices.
    The package takes attention to give it in 8 bits. Of vLLM's attention on NVIDIA only FlashInfer on Blackwell does so
    (decision 030)."""
    return engine == "vllm" and capability < BLACKWELL


def _of_16_bits(gemm: Any) -> Any:
    """The matrices with the time to quantize their input in it, where the package took it off."""
    from aiconfigurator_core.sdk import operations

    if not gemm._low_precision_input:
        return gemm
    return operations.GEMM(gemm._name, gemm._scale_factor, gemm._n, gemm._k, gemm._quant_mode)


STATIC = "fp8_static"  # matrices whose inputs are quantized by a scale that the checkpoint has
# Matrices with their input from a kernel before them, and the values that this kernel reads and writes, as multiples of
# those of its quantized output: a norm reads and writes the residual too, an activation reads two values.
FUSED = {
    "qkv_gemm": ("add_norm_1", 2, 1.5),
    "gate_ffn1_gemm": ("add_norm_2", 2, 1.5),
    "ffn2_gemm": ("act_gate", 2, 0.5),
}
ELEMENTWISE = 0.8  # the package's share of the memory rate


def _fused(operation: Any, phase: Sequence[Any]) -> Any:
    """An operation as vLLM's compiler leaves it. A norm or an activation before a matrix of `STATIC` writes 8 bits in
    one kernel. The package has a kernel that writes 16 bits and, after a norm, another one that quantizes
    (decision 034)."""
    from aiconfigurator_core.sdk import operations

    static = {
        each._name.partition("_")[2]: each
        for each in phase
        if isinstance(each, operations.GEMM) and each._quant_mode.name == STATIC
    }
    name = operation._name.partition("_")[2]
    if name in FUSED and name in static:
        gemm = (operation._name, operation._scale_factor, operation._n, operation._k, operation._quant_mode)
        return operations.GEMM(*gemm, low_precision_input=True)
    for matrix, (kernel, read, written) in FUSED.items():
        if name == kernel and matrix in static:
            sizes = (int(each * static[matrix]._k) for each in (read, written))
            return operations.ElementWise(operation._name, operation._scale_factor, *sizes, ELEMENTWISE)
    return operation


def _rotations(phase: Sequence[Any]) -> list[Any]:
    """The kernel that rotates q and k by their positions, of every layer. vLLM has it apart from attention, and the
    package has none (decision 034)."""
    from aiconfigurator_core.sdk import operations

    kinds = (operations.ContextAttention, operations.GenerationAttention)
    found = []
    for each in phase:
        if isinstance(each, kinds):
            values = (each._n + each._n_kv) * each._head_size
            found.append(operations.ElementWise("rotary_embedding", each._scale_factor, values, values, ELEMENTWISE))
    return found


# Without data parallel ranks the exchange before and after experts is the two all-reduces of a layer. The package's
# DeepSeek has two more with vLLM, which has two: after attention and after the experts (``DeepseekV2MoE.forward``).
ALL_REDUCES_OF_TP = "_tp_allreduce"
LEAST_MESSAGE = 128  # values that an all-reduce was measured with
VARIANCE_VALUES = 4  # of a token, as values of 16 bits: the variances of q and of k in 32 bits


def norms_all_heads(config: Mapping[str, Any], pool: Pool) -> bool:
    """Whether q and k are normalized over the heads of all TP ranks. Then the ranks exchange variances in every layer,
    which the package leaves out. vLLM 0.16 to 0.19 do so for MiniMax-M2: two kernels each for q and k, and one
    all-reduce for both (``MiniMaxText01RMSNormTP.forward_qk``)."""
    return pool.tp > 1 and bool(config.get("use_qk_norm")) and config.get("qk_norm_type") == "per_layer"


def all_reduces(config: Mapping[str, Any], pool: Pool) -> int:
    """Of a layer: after attention, after the MLP, and one of `norms_all_heads`."""
    return 3 if norms_all_heads(config, pool) else 2


def _check_format(compiled: _Compiled, folder: Path, of: Mapping[str, str], source: _TableSource, what: str) -> None:
    """Raises UsageError where a decode step with a part in 8 bits is slower than with that part in 16, which is a fault
    of the tables. Without tables of 16 bits nothing is known of it."""
    for part, kept in compiled.formats.items():
        if kept not in DOUBTED:
            continue
        try:
            plain = _compiled(folder, of, source.pool, {**source.formats, part: PLAIN})
            eight_ms, sixteen_ms = (each.handle.predict_decode_latency(*COMPARED_AT, 2) for each in (compiled, plain))
        except Exception:  # whatever the package raises for tables that it does not have
            continue
        if eight_ms > SLOWER * sixteen_ms:
            raise UsageError(
                f"{what}: a decode step takes {eight_ms:.1f} ms with the tables of {part}={kept}, {sixteen_ms:.1f} ms "
                f"with those of {PLAIN}, so the former are in doubt; name another format (--quant {part}="
                f"{DOUBTED[kept]}), another TP or another engine"
            )


def _grid(compiled: _Compiled, provenance: str) -> Tabulated:
    handle, kinds = compiled.handle, set[str]()
    axes = _axes()
    rows = (1.0, *axes.tokens)
    more_s = mended(compiled.experts, rows) if compiled.experts else dict.fromkeys(rows, 0.0)
    for way in compiled.other_experts:
        more_s = {each: min(more_s[each], way.more_s(each)) for each in rows}
    experts = compiled.experts and LinearTable(
        xs=rows, ys=tuple(compiled.experts.skewed_s(each) + more_s[each] for each in rows)
    )
    if compiled.exchange:
        more_s = {each: more_s[each] + min(compiled.exchange.more_s(each), 0.0) for each in rows}
    for matrix in compiled.matrices:
        more_s = {each: more_s[each] + matrix.without_faults_s(each, FAULT) for each in rows}

    def ask(call: Callable[..., Any], *arguments: int) -> Any:
        found = call(*arguments)
        kind = handle.last_provenance()
        if kind:
            kinds.add(kind)
        return found

    latent = compiled.latent

    def unmended_s(tokens: int) -> float:
        return float(ask(handle.mixed_step_breakdown, tokens - 1, 1, tokens - 1, 2, 0)[1]) * 1e-3

    def shared_s(tokens: float) -> float:
        return unmended_s(int(tokens)) + more_s[tokens] + (latent.prefill_s(tokens) if latent else 0.0)

    def decode_s(batch: float, context: float) -> float:
        step_ms = float(ask(handle.predict_decode_latency, int(batch), int(context), 2))
        return step_ms * 1e-3 + more_s[batch] + (latent.decode_s(batch, context) if latent else 0.0)

    def generation_s(batch: float, context: float) -> float:
        # Beside a chunk of one prompt, whose length is the context: at least that of the chunk.
        at = max(int(context), BESIDE)
        return float(ask(handle.mixed_step_breakdown, BESIDE, int(batch), at, 2, 0)[3]) * 1e-3

    def attention_s(chunk: float, prefix: float) -> float:
        n, before = int(chunk), int(prefix)
        whole_ms = ask(handle.predict_prefill_latency, 1, n + before, before)
        return max(float(whole_ms) * 1e-3 - unmended_s(n), 0.0)

    return Tabulated(
        shared=LinearTable(xs=axes.tokens, ys=tuple(map(shared_s, axes.tokens))),
        decode=_plane(axes.batches, axes.contexts, decode_s),
        generation_attention=_plane(axes.batches, axes.contexts, generation_s),
        context_attention=_plane(axes.chunks, axes.prefixes, attention_s),
        experts=experts,
        limits=LIMITS,
        provenance=provenance,
        estimated=tuple(sorted(kinds)),
    )


BESIDE = 64
QUESTIONS = 8  # one more where `_grid` asks the package something else: tables that are kept are then filled anew


# Numbers of rows at which the database's matrices were measured and a tile ends. It also has one row more than each,
# where they take up to twice as long (fp8, 8192 x 4096 on H100: 33 us for 512 rows, 60 for 513, 48 for 768), and goes
# straight from there to the end of the next tile. Points of a grid between them are too slow by chance: 813 rows took
# longer than 1,024. Decode batches have the same rows: vLLM replays the CUDA graph of the next captured size, and those
# of 24 and 40 are not among the sizes that were measured.
MEASURED_ROWS = (
    *(2.0, 4.0, 8.0, 16.0, 32.0, 48.0, 64.0, 80.0, 96.0, 112.0, 128.0, 160.0, 192.0, 224.0, 256.0, 512.0),
    *(float(rows) for rows in range(768, 4353, 256)),
    8192.0,
)


class _Axes(NamedTuple):
    """Of the grid."""

    tokens: tuple[float, ...]
    batches: tuple[float, ...]
    contexts: tuple[float, ...]
    chunks: tuple[float, ...]
    prefixes: tuple[float, ...]


def _axes() -> _Axes:
    return _Axes(
        tokens=(*MEASURED_ROWS, LIMITS.tokens),
        batches=(1.0, *(rows for rows in MEASURED_ROWS if rows <= LIMITS.batch)),
        contexts=(1.0, *_geometric(128, LIMITS.context, 1)),
        chunks=tuple(_geometric(16, LIMITS.prefill_tokens, 2)),
        prefixes=(0.0, *_geometric(512, LIMITS.prefix, 1)),
    )


def _plane(xs: tuple[float, ...], ys: tuple[float, ...], at: Callable[[float, float], float]) -> BilinearTable:
    return BilinearTable(xs=xs, ys=ys, z=tuple(tuple(at(x, y) for y in ys) for x in xs))


def _geometric(low: float, high: float, per_doubling: int) -> Iterator[float]:
    """Growing whole numbers from ``low`` to ``high``, so many per doubling."""
    value, last = float(low), 0
    while value < high:
        if round(value) > last:
            last = round(value)
            yield float(last)
        value *= 2 ** (1 / per_doubling)
    yield float(high)


@contextmanager
def _quiet() -> Iterator[None]:
    """The package logs what it reads."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _refused(what: str, mode: str) -> Iterator[None]:
    """The package raises ValueError, KeyError and its own errors for what its database does not have."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError

        reason = " ".join(str(error).split())[:240] or type(error).__name__
        fix = "name another TP, or other formats (--quant)"
        if mode == "SILICON" and isinstance(error, PerfDataNotAvailableError):
            fix = "--table-mode HYBRID takes what is missing from like GPUs and formats"
        raise UsageError(f"no {what} ({reason}); {fix}") from error
