"""What kernels of an older version of an engine take longer than those that the tables have. Pure.

The database has one version of each engine. An older version may have older kernels, or choose others of those that
the database has. Their difference is declared here where it is large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Pool
from pdlab.core.text import version_numbers
from pdlab.sim.step_source import BilinearTable, LinearTable, Tabulated

NO_TIME = LinearTable(xs=(1.0, 2.0), ys=(0.0, 0.0))


class OlderKernels(NamedTuple):
    """Of an engine from version ``since`` to before version ``before``, in tables of ``systems``.

    Seconds that the older kernels take more in one layer: ``attention``, latent attention by the decoding sequences of
    a rank; ``whole_attention``, the same with all heads on one GPU; ``experts``, routed experts in 8 bits with a scale
    for each block, by the tokens of all ranks.

    How many times as long these experts take (None: as long), by the tokens of all ranks: ``divided``, where the ranks
    of TP divide each expert, and by the columns that a rank has of it; ``whole``, where each rank has whole experts.
    ``any_router``: they do for every model; else only for one whose router has sigmoid scores and no groups.
    """

    engine: str
    before: tuple[int, int]
    systems: tuple[str, ...]
    since: tuple[int, int] = (0, 0)
    attention: LinearTable = NO_TIME
    whole_attention: LinearTable = NO_TIME
    experts: LinearTable = NO_TIME
    divided: BilinearTable | None = None
    whole: LinearTable | None = None
    any_router: bool = True

    def times_as_long(self, tokens: float, columns: float, whole: bool) -> float:
        """The routed experts, as in ``divided`` and ``whole``."""
        table = self.whole if whole else self.divided
        if table is None:
            return 1.0
        tokens = min(tokens, table.xs[-1])
        return table.at(tokens) if isinstance(table, LinearTable) else table.at(tokens, min(columns, table.ys[-1]))


def _microseconds(by: Mapping[float, float]) -> LinearTable:
    return LinearTable(xs=tuple(by), ys=tuple(1e-6 * each for each in by.values()))


COLUMNS = (384.0, 768.0, 1536.0)  # of an expert of MiniMax-M2.5 at TP 4, 2 and 1


def _times(by: Mapping[int, tuple[float, float, float]]) -> BilinearTable:
    """By tokens and `COLUMNS`."""
    return BilinearTable(xs=tuple(by), ys=COLUMNS, z=tuple(by.values()))


OLDER = (
    # TensorRT-LLM 1.2.0rc5 in aiconfigurator 0.7.0 less 1.3.0rc20 in aiconfigurator-core 0.12.0 (PyPI). Medians, which
    # differ by 1 us between H100 and H200. Attention: DeepSeek-V3's over contexts of 256 to 16,384 tokens, alike for 1
    # to 64 heads on a GPU. Experts: DeepSeek-V3's with equal loads, alike over 2 to 256 GPUs.
    OlderKernels(
        engine="trtllm",
        before=(1, 3),
        systems=("h100_sxm", "h200_sxm"),
        attention=_microseconds({1: 14, 8: 18, 64: 23, 256: 31, 1024: 65}),
        whole_attention=_microseconds({1: 9, 8: 11, 64: 14, 256: 23, 1024: 59}),
        experts=_microseconds({1: 13, 8: 18, 256: 19, 1024: 29, 4096: 68, 16384: 215}),
    ),
    # vLLM 0.17 gives TensorRT-LLM's kernels no router without groups (decision 035), so Triton's run. Those of vLLM
    # 0.17.0 in aiconfigurator 0.8.0 over TensorRT-LLM's of vLLM 0.24.0 in aiconfigurator-core 0.12.0 (PyPI): MiniMax-
    # M2.5's experts, divided with the loads ``power_law_1.2``, and whole on 2 to 16 GPUs with equal loads (medians).
    OlderKernels(
        engine="vllm",
        since=(0, 17),
        before=(0, 18),
        systems=("b200_sxm",),
        divided=_times(
            {
                1: (1.25, 1.33, 1.21),
                4: (1.14, 1.17, 1.23),
                16: (1.19, 1.15, 1.16),
                64: (1.26, 1.20, 1.16),
                80: (2.03, 1.94, 1.93),
                128: (2.01, 1.91, 1.92),
                256: (1.65, 1.71, 1.53),
                512: (1.27, 1.21, 1.13),
                1024: (1.39, 1.32, 1.26),
                3072: (1.87, 1.81, 1.73),
                16384: (1.75, 1.62, 1.54),
            }
        ),
        whole=LinearTable(xs=(1, 16, 64, 80, 512, 3072, 16384), ys=(1.37, 1.20, 1.20, 1.97, 1.90, 2.12, 2.07)),
        any_router=False,
    ),
    # On Hopper vLLM 0.15 and 0.16 choose CUTLASS's kernels, and vLLM 0.17 Triton's where TP divides the experts
    # (decision 035). The former in tables of TensorRT-LLM 1.3.0rc20, over the latter in those of vLLM 0.24.0, both of
    # aiconfigurator-core 0.12.0 (PyPI): MiniMax-M2.5's experts with the loads ``power_law_1.2``.
    *(
        OlderKernels(engine="vllm", since=(0, 15), before=(0, 17), systems=(system,), divided=_times(times))
        for system, times in {
            "h200_sxm": {
                1: (2.37, 1.97, 1.84),
                4: (1.91, 1.60, 1.29),
                8: (1.63, 1.24, 1.08),
                16: (1.31, 1.17, 1.07),
                32: (1.22, 1.13, 1.03),
                64: (1.13, 1.11, 0.98),
                80: (1.00, 0.94, 0.86),
                256: (1.18, 1.03, 1.03),
                1024: (1.41, 1.19, 1.08),
                3072: (1.63, 1.34, 1.12),
                16384: (1.79, 1.43, 1.15),
            },
            # With 1,536 columns and 3,072 tokens or more: H200's.
            "h100_sxm": {
                1: (2.32, 1.88, 1.71),
                4: (1.70, 1.35, 1.15),
                8: (1.33, 1.12, 1.00),
                16: (1.10, 1.06, 1.00),
                32: (1.09, 1.06, 0.99),
                64: (1.04, 0.95, 0.96),
                80: (1.05, 0.96, 0.92),
                256: (1.15, 1.02, 1.01),
                1024: (1.39, 1.19, 1.10),
                3072: (1.66, 1.33, 1.12),
                16384: (1.84, 1.50, 1.15),
            },
        }.items()
    ),
)
FINE_EXPERTS = 128  # from so many on those of other models are as MiniMax-M2.5's 256 with as many columns


def older_kernels(system: str, engine: str, version: str | None) -> OlderKernels | None:
    """Of that version of an engine; None: they take as long as in the tables, or it is not known. ``version`` None:
    that of the tables."""
    if number := version_numbers(version or ""):
        for each in OLDER:
            if each.engine == engine and system in each.systems and each.since <= number < each.before:
                return each
    return None


def with_older(
    tables: Tabulated,
    older: OlderKernels,
    model: ModelShape,
    config: Mapping[str, Any],
    formats: Mapping[str, str],
    pool: Pool,
) -> Tabulated:
    """The steps of ``model`` with the older kernels. ``config``: its config.json. ``formats``: those that are not of
    its config. ``pool``: of one engine."""
    blocks = "weight_block_size" in (config.get("quantization_config") or {})
    in_blocks = formats.get("moe", "fp8_block" if blocks else "") == "fp8_block"
    latent = model.layers if model.kv_latent else 0
    routed = model.layers - model.dense_layers if "n_routed_experts" in config and in_blocks else 0
    router = older.any_router or (config.get("scoring_func") == "sigmoid" and not config.get("n_group"))
    longer = tables.experts if in_blocks and router and model.experts >= FINE_EXPERTS else None
    attention = older.attention if pool.tp > 1 else older.whole_attention
    columns = (model.expert_intermediate or model.hidden) / (pool.tp * pool.dp)

    def attention_s(batch: float) -> float:
        return latent * attention.at(batch)

    def experts_s(tokens: float) -> float:
        every = tokens * pool.dp
        times = older.times_as_long(every, columns, pool.expert_parallel)
        return routed * older.experts.at(every) + ((times - 1) * longer.at(tokens) if longer else 0.0)

    def plus(table: BilinearTable, *more: Any) -> BilinearTable:
        z = (tuple(each + sum(f(x) for f in more) for each in row) for x, row in zip(table.xs, table.z, strict=True))
        return table.model_copy(update={"z": tuple(z)})

    shared = tables.shared
    ys = tuple(each + experts_s(x) for x, each in zip(shared.xs, shared.ys, strict=True))
    changed = tables.model_copy(
        update={
            "shared": shared.model_copy(update={"ys": ys}),
            "decode": plus(tables.decode, attention_s, experts_s),
            "generation_attention": plus(tables.generation_attention, attention_s),
        }
    )
    if changed == tables:
        return tables
    of = f"{tables.provenance}, with kernels of {older.engine} before {_text(older.before)}"
    return changed.model_copy(update={"provenance": of})


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
