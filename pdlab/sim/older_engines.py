"""What kernels of an older version of an engine take longer than those that the tables have. Pure.

The database has one version of each engine. Releases of the package before it had older versions of the same
operations. Their difference is declared here where it is large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdlab.sim.step_source import BilinearTable, LinearTable, Tabulated


class OlderKernels(NamedTuple):
    """Of an engine before version ``before``, in tables of ``systems``.

    Seconds that the older kernels take more in one layer: ``attention``, latent attention by the decoding sequences of
    a rank; ``whole_attention``, the same with all heads on one GPU; ``experts``, routed experts in 8 bits with a scale
    for each block, by the tokens of all ranks.
    """

    engine: str
    before: tuple[int, int]
    systems: tuple[str, ...]
    attention: LinearTable
    whole_attention: LinearTable
    experts: LinearTable


def _microseconds(by: Mapping[float, float]) -> LinearTable:
    return LinearTable(xs=tuple(by), ys=tuple(1e-6 * each for each in by.values()))


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
)


def older_kernels(system: str, engine: str, version: str | None) -> OlderKernels | None:
    """Of that version of an engine; None: they take as long as in the tables, or it is not known. ``version`` None:
    that of the tables."""
    number = re.match(r"(\d+)\.(\d+)", version or "")
    for each in OLDER:
        if number and each.engine == engine and system in each.systems:
            return each if (int(number[1]), int(number[2])) < each.before else None
    return None


def with_older(
    tables: Tabulated, older: OlderKernels, config: Mapping[str, Any], formats: Mapping[str, str], tp: int, dp: int
) -> Tabulated:
    """The steps of a model with the older kernels. ``config``: its config.json. ``formats``: those that are not of its
    config. ``tp``, ``dp``: ranks of one engine."""
    layers = int(config.get("num_hidden_layers", 0))
    latent = layers if config.get("kv_lora_rank") else 0
    blocks = "weight_block_size" in (config.get("quantization_config") or {})
    routed = layers - int(config.get("first_k_dense_replace") or 0) if "n_routed_experts" in config else 0
    if formats.get("moe", "fp8_block" if blocks else "") != "fp8_block":
        routed = 0
    attention = older.attention if tp > 1 else older.whole_attention

    def attention_s(batch: float) -> float:
        return latent * attention.at(batch)

    def experts_s(tokens: float) -> float:
        return routed * older.experts.at(tokens * dp)

    def plus(table: BilinearTable, *more: Any) -> BilinearTable:
        z = (tuple(each + sum(f(x) for f in more) for each in row) for x, row in zip(table.xs, table.z, strict=True))
        return table.model_copy(update={"z": tuple(z)})

    shared = tables.shared
    ys = tuple(each + experts_s(x) for x, each in zip(shared.xs, shared.ys, strict=True))
    return tables.model_copy(
        update={
            "shared": shared.model_copy(update={"ys": ys}),
            "decode": plus(tables.decode, attention_s, experts_s),
            "generation_attention": plus(tables.generation_attention, attention_s),
            "provenance": f"{tables.provenance}, with kernels of {older.engine} before {_text(older.before)}",
        }
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
