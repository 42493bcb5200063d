"""Second source of step times: the kernel tables of the `aiconfigurator` package, rescaled by three factors.

The package (an optional extra, never needed) measured kernels of many models on many GPUs, for engine
versions of its own, and knows nothing of a front end. Its decode and prefill times are read once per
pool on a small grid, and a step is

    launch + sequence B + (scale_decode decode(B, n)  |  scale_prefill prefill(P))

with the launch, the per-sequence time and the cost of a joining request of the hardware file. The two
scales are meant to be calibrated as all else is (docs/model.md compares both sources on the same runs).
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.catalog import ModelShape
from pdlab.errors import UsageError
from pdlab.perf import Hardware
from pdlab.spec import Pool

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
CONTEXTS = (1000, 5000, 10_000)
PREFILLS = (16, 128, 512, 1024, 2048, 4096, 5000, 8192)


@dataclass(slots=True)
class KernelTables:
    """Seconds on a grid, with linear interpolation and extrapolation. ``admit_s``: per block of a joining request."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_s: tuple[tuple[float, ...], ...]  # per context, per batch
    prefills: tuple[int, ...]
    prefill_s: tuple[float, ...]
    launch_s: float
    sequence_s: float
    admit_s: float
    scale_decode: float = 1.0
    scale_prefill: float = 1.0

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        """Seconds of one step; the context of prefill tokens is in the tables (half a prompt)."""
        base_s = self.launch_s + batch * self.sequence_s
        if prefill_tokens:
            return base_s + self.scale_prefill * _at(self.prefills, self.prefill_s, prefill_tokens)
        by_context = [_at(self.batches, row, batch) for row in self.decode_s]
        return base_s + self.scale_decode * _at(self.contexts, by_context, context)


def _at(grid: Sequence[float], values: Sequence[float], x: float) -> float:
    high = min(max(bisect_right(grid, x), 1), len(grid) - 1)
    low = high - 1
    share = (x - grid[low]) / (grid[high] - grid[low])
    return max(values[low] + share * (values[high] - values[low]), 0.0)


def read_tables(
    hardware: Hardware,
    shape: ModelShape,
    pool: Pool,
    *,
    system: str = "h100_sxm",
    backend: str = "vllm",
    version: str | None = None,
) -> KernelTables:
    """Tables of one engine of ``pool``. Raises UsageError where the package, the system or the model is missing."""
    try:
        config = importlib.import_module("aiconfigurator.sdk.config")
        models = importlib.import_module("aiconfigurator.sdk.models")
        database = importlib.import_module("aiconfigurator.sdk.perf_database")
        factory = importlib.import_module("aiconfigurator.sdk.backends.factory")
        session = importlib.import_module("aiconfigurator.sdk.inference_session")
    except ImportError as error:
        raise UsageError(
            f"kernel tables need the package aiconfigurator ({error}); pip install aiconfigurator, or use the "
            "roofline model, which needs nothing"
        ) from error
    if pool.dp > 1 or pool.pp > 1:
        raise UsageError(f"kernel tables are read for DP 1 and PP 1, not for {pool.label}")
    release = version or database.get_latest_database_version(system, backend)
    tables = database.get_database(system, backend, release)
    if tables is None or shape.hf_id is None:
        raise UsageError(f"aiconfigurator has no tables of {backend} {release} on {system} for {shape.name}")
    moe_tp, moe_ep = (1, pool.tp) if pool.expert_parallel else (pool.tp, 1)
    layout = config.ModelConfig(tp_size=pool.tp, pp_size=1, moe_tp_size=moe_tp, moe_ep_size=moe_ep)
    run = session.InferenceSession(models.get_model(shape.hf_id, layout, backend), tables, factory.get_backend(backend))

    def seconds(mode: str, batch: int, tokens: int, out: int) -> float:
        request: Any = config.RuntimeConfig(batch_size=batch, beam_width=1, isl=tokens, osl=out)
        return float(run.run_static_latency_only(request, mode)) * 1e-3

    value = hardware.value
    return KernelTables(
        batches=BATCHES,
        contexts=CONTEXTS,
        decode_s=tuple(tuple(seconds("static_gen", b, n, 2) for b in BATCHES) for n in CONTEXTS),
        prefills=PREFILLS,
        prefill_s=tuple(seconds("static_ctx", 1, n, 1) for n in PREFILLS),
        launch_s=value("launch_ms") * 1e-3,
        sequence_s=value("sequence_ms") * 1e-3,
        admit_s=value("admit_us") * 1e-6,
    )
