"""Hardware without a measured run: a GPU type of configs/gpus/, step times from tables, and all other constants from
the calibrated hardware file.

Constants that do not belong to the GPU or the engine (the path of a request to an engine, transfers, the client) come
from the calibrated file, which is their source. Engines without Ray have the path `BARE_PATH`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdlab.core import defaults
from pdlab.core.catalog import BYTES_PER_VALUE, GpuType, ModelShape, gpu_name, known_gpu, known_gpus, whole_shape
from pdlab.core.errors import UsageError
from pdlab.core.hybrid_kv import is_hybrid
from pdlab.core.text import choices
from pdlab.core.version import STACK
from pdlab.sim import aic
from pdlab.sim.engine_host import host_of
from pdlab.sim.hardware import (
    Constant,
    Hardware,
    StepTables,
    TableMode,
    load_hardware,
    memory_utilization,
    routers_beside,
    routers_count_ends,
    steps_in_flight,
)
from pdlab.sim.step_source import Correction

OF_RAY = ("overhead_ms", "pd_overhead_ms", "frontend_ms", "ingress_us", "stream_us", "client_gap_ms", "admit_us")
# The path of a request to an engine's own server: HTTP, and the tokenizer per prompt token. In P:D it includes the way
# from prefill to decode, without the KV transfer.
BARE_PATH = {"overhead_ms": 10.0, "pd_overhead_ms": 170.0, "ingress_us": 5.0}
ONE_ROUTER = "without Ray one process routes to all engines"
BARE_SOURCE = (
    "least mean error of TTFT over 12 public stacks, each left out once: 18 % without a path, 14 % for 10 ms and 5 us "
    "a prompt token, 15 % for 5 ms more (python benchmarks/score_model.py)"
)
BARE_PD_SOURCE = (
    "least mean error of TTFT over 16 public stacks of P:D, each counted once (docs/model.md, Public points of P:D)"
)
LEAST_SD_MS = 0.1  # of the host's time: the errors of the tables hide smaller differences


def computed_gpus() -> dict[str, GpuType]:
    """GPU types that the tables have, by name."""
    return {name: each for name, each in known_gpus().items() if each.step_tables}


def is_gpu(word: str) -> bool:
    """Whether a word of --hardware names a GPU type, with tables or without."""
    return gpu_name(word) in known_gpus()


def computed(
    gpu: str,
    engine: str = "vllm",
    version: str | None = None,
    *,
    quant: Mapping[str, str] | None = None,
    mode: TableMode = "SILICON",
    bare: bool = False,
    gpus_per_node: int | None = None,
) -> Hardware:
    """Hardware of that GPU type. ``version``: major and minor version of the planned engine (None: that of the tables).
    ``quant``, ``mode``: as of `StepTables`. ``bare``: engines behind their own HTTP server, without Ray.

    Raises UsageError.
    """
    name = gpu_name(gpu)
    type_ = known_gpu(name)
    system = type_.step_tables if type_ else None
    if type_ is None or system is None:
        raise UsageError(f"GPU type {gpu}: there are no step times of it; {choices(name, computed_gpus())}")
    home = load_hardware(defaults.HARDWARE)
    tables = aic.literal_version(system, engine)
    planned = version or ".".join(tables.split(".")[:2])
    known = host_of(engine)
    host = known.of(planned)
    served = "without Ray" if bare else "Ray"
    steps = StepTables(
        system=system,
        engine=engine,
        version=tables,
        engine_version=planned,
        mode=mode,
        quant=dict(quant or {}),
        correction=Correction(
            host_ms=host.step_ms,
            sequence_us=known.sequence_us(planned),
            covariance=(
                (max(host.sd_ms, LEAST_SD_MS) ** 2, 0.0, 0.0, 0.0),
                (0.0, FACTOR_SD**2, 0.0, 0.0),
                (0.0, 0.0, CHUNK_SD**2, 0.0),
                (0.0, 0.0, 0.0, SYNC_SD_US**2),
            ),
            source=host.source,
        ),
    )
    # The router is Ray's, whatever the engine.
    routing = routers_beside(planned) if engine == "vllm" else routers_count_ends(STACK["ray"])
    own = {
        "memory_gb": Constant(value=type_.memory_gb[0], unit="GB", basis="published", source=type_.source),
        **({"steps_in_flight": steps_in_flight(planned)} if engine == "vllm" else {}),
        **({"memory_utilization": memory_utilization(planned)} if engine == "vllm" else {}),
        **(_without_ray(home) if bare else {"routers_count_ends": routing}),
    }
    assumed = {
        each: constant.model_copy(
            update={"basis": "assumed", "source": f"as of {defaults.HARDWARE}", "relative_error": None}
        )
        for each, constant in home.constants.items()
    }
    return Hardware(
        name=f"{name.lower()}-{engine}-{planned}-tables",
        gpu=name,
        gpu_type=name,
        gpus_per_node=gpus_per_node or type_.gpus_per_node,
        stack=f"{engine} {planned}, {served}",
        # What SGLang and TensorRT-LLM keep of windowed layers is not known.
        hybrid_kv=engine == "vllm" and is_hybrid({}, version=planned),
        steps=steps,
        direct=known.direct if bare else None,
        constants={**assumed, **own},
    )


# Standard deviations of ln factor and ln prefill_factor without measured levels, by nine stacks of public rows: the
# spread of their medians around 0 (decode), and of the time of their prefill over that of the tables.
FACTOR_SD, CHUNK_SD = 0.07, 0.35
SYNC_SD_US = 4.0  # per layer and doubling of TP: about the mean of the public stacks (configs/errors/public.yaml)


def hardware_of(
    word: str,
    model: str,
    engine: str | None,
    version: str | None,
    *,
    quant: Mapping[str, str] | None = None,
    mode: TableMode = "SILICON",
    bare: bool = False,
    gpus_per_node: int | None = None,
) -> Hardware:
    """The hardware with the name ``word``: a hardware file, or a GPU type. For a GPU type, fitted constants of that
    model, engine and version come before tables. ``model``: a value of --model. Raises UsageError."""
    if not is_gpu(word):
        hardware = load_hardware(word, {"a GPU type": tuple(computed_gpus())})
        if engine or version or quant or bare or mode != "SILICON":
            raise UsageError(
                f"--hardware {word}: its file names the engine of its step times; leave --engine, --engine-version, "
                "--table-mode, --quant and --without-ray out, or name a GPU type: --hardware "
                f"{hardware.gpu_type or next(iter(computed_gpus()))}"
            )
        return hardware
    home = load_hardware(defaults.HARDWARE)
    fit = home.fit
    wanted = (gpu_name(word), engine or "vllm", version)
    if fit and not (quant or bare or mode != "SILICON") and wanted == (fit.gpu, fit.engine, fit.version):
        shape = whole_shape(model)
        if not isinstance(shape, str) and not fit.unlike_model(shape):
            return home
    return computed(word, engine or "vllm", version, quant=quant, mode=mode, bare=bare, gpus_per_node=gpus_per_node)


def beside(prefill: Hardware, decode: Hardware) -> Hardware:
    """Hardware of two GPU types: that of prefill, with the other as ``beside``. If both are the same, one of them."""
    if prefill.gpu_type == decode.gpu_type:
        return decode
    return prefill.model_copy(
        update={
            "name": f"{prefill.name} and {decode.name}",
            "gpu": f"{prefill.gpu} (prefill) and {decode.gpu}",
            "beside": (decode,),
            "fit": None,
            "error": None,
        }
    )


def as_served(shape: ModelShape, hardware: Hardware) -> ModelShape:
    """The shape with the format of KV cache that ``quant`` selects in the tables: memory and transfers have it too."""
    kept = (hardware.steps.quant if hardware.steps is not None else {}).get("kvcache")
    return shape.model_copy(update={"kv_dtype": kept}) if kept in BYTES_PER_VALUE else shape


def _without_ray(home: Hardware) -> dict[str, Constant]:
    sources = {each: BARE_SOURCE if each in BARE_PATH else "engines without Ray" for each in OF_RAY}
    values = {**dict.fromkeys(OF_RAY, 0.0), **BARE_PATH, "routers": 1.0}
    sources |= {"routers": ONE_ROUTER, "pd_overhead_ms": BARE_PD_SOURCE}
    return {each: _assumed(home.constants[each], value, sources[each]) for each, value in values.items()}


def _assumed(constant: Constant, value: float, source: str) -> Constant:
    return constant.model_copy(update={"value": value, "basis": "assumed", "source": source, "relative_error": None})
