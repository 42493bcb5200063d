"""Kernels of engines that are older than the tables."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.sim.older_engines import OLDER, older_kernels, with_older
from pdlab.sim.step_source import BilinearTable, Limits, LinearTable, Tabulated

DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "quantization_config": {"weight_block_size": [128, 128]},
}


def flat(xs: tuple[float, ...]) -> BilinearTable:
    return BilinearTable(xs=xs, ys=(1.0, 1e5), z=tuple((0.01, 0.01) for _ in xs))


TABLES = Tabulated(
    shared=LinearTable(xs=(1.0, 8.0, 4096.0), ys=(0.01, 0.01, 0.01)),
    decode=flat((1.0, 8.0, 64.0)),
    generation_attention=flat((1.0, 8.0, 64.0)),
    context_attention=flat((16.0, 4096.0)),
    limits=Limits(tokens=4096, batch=64, context=1e5, prefill_tokens=4096, prefix=1e5),
    provenance="made up",
)


@pytest.mark.parametrize(
    ("system", "engine", "version", "is_older"),
    [
        ("h200_sxm", "trtllm", "1.2", True),
        ("h100_sxm", "trtllm", "1.2.0rc6", True),
        ("h200_sxm", "trtllm", "1.3", False),
        ("h200_sxm", "trtllm", "1.10", False),
        ("h200_sxm", "trtllm", None, False),
        ("h200_sxm", "trtllm", "2026-Q1", False),
        ("b200_sxm", "trtllm", "1.2", False),
        ("h200_sxm", "sglang", "0.5", False),
    ],
)
def test_only_a_version_that_is_known_to_be_older_has_other_kernels(
    system: str, engine: str, version: str | None, is_older: bool
) -> None:
    assert (older_kernels(system, engine, version) is not None) is is_older


def more_us(config: dict[str, Any], tp: int, dp: int, batch: float, prefill: float = 0.0, **formats: str) -> float:
    older = with_older(TABLES, OLDER[0], config, formats, tp, dp)
    return 1e6 * (older.step_s(batch, prefill, 1000) - TABLES.step_s(batch, prefill, 1000))


def test_older_kernels_take_longer_in_every_layer() -> None:
    assert more_us(DEEPSEEK, 8, 1, 8) == pytest.approx(61 * 18 + 58 * 18)
    assert more_us(DEEPSEEK, 1, 8, 8) == pytest.approx(61 * 11 + 58 * OLDER[0].experts.at(64) * 1e6), "of all ranks"
    assert more_us(DEEPSEEK, 8, 1, 8, moe="nvfp4") == pytest.approx(61 * 18), "experts in another format"
    assert more_us({**DEEPSEEK, "quantization_config": {}}, 8, 1, 8) == pytest.approx(61 * 18)


def test_a_prefill_has_the_experts_of_its_tokens() -> None:
    assert more_us(DEEPSEEK, 8, 1, 0, 4096) == pytest.approx(58 * 68)
    mixed_us = 61 * 18 + 58 * 1e6 * OLDER[0].experts.at(4008)
    assert more_us(DEEPSEEK, 8, 1, 8, 4000) == pytest.approx(mixed_us, rel=1e-3)


def test_a_model_without_latent_attention_or_routed_experts_is_as_in_the_tables() -> None:
    assert more_us({"num_hidden_layers": 32}, 8, 1, 8) == pytest.approx(0, abs=1e-6)
