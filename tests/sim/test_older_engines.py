"""Kernels of engines that are older than the tables."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Pool
from pdlab.sim.older_engines import OLDER, OlderKernels, older_kernels, with_older
from pdlab.sim.step_source import BilinearTable, Limits, LinearTable, Tabulated

LATENT = OLDER[0]
BLOCKS: dict[str, Any] = {"quantization_config": {"weight_block_size": [128, 128]}}
DEEPSEEK: dict[str, Any] = {"n_routed_experts": 256, **BLOCKS}
DEEPSEEK_SHAPE = require_shape("deepseek-v3")
MINIMAX: dict[str, Any] = {"num_local_experts": 256, "scoring_func": "sigmoid", **BLOCKS}
MINIMAX_SHAPE = DEEPSEEK_SHAPE.model_copy(update={"kv_latent": None, "dense_layers": 0, "expert_intermediate": 1536})


def flat(xs: tuple[float, ...]) -> BilinearTable:
    return BilinearTable(xs=xs, ys=(1.0, 1e5), z=tuple((0.01, 0.01) for _ in xs))


TABLES = Tabulated(
    shared=LinearTable(xs=(1.0, 8.0, 4096.0), ys=(0.01, 0.01, 0.01)),
    decode=flat((1.0, 8.0, 64.0)),
    generation_attention=flat((1.0, 8.0, 64.0)),
    context_attention=flat((16.0, 4096.0)),
    experts=LinearTable(xs=(1.0, 8.0, 4096.0), ys=(0.001, 0.001, 0.009)),
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
        ("b200_sxm", "vllm", "0.17", True),
        ("b200_sxm", "vllm", "0.16", False),
        ("b200_sxm", "vllm", "0.18", False),
        ("h200_sxm", "vllm", "0.16", True),
        ("h100_sxm", "vllm", "0.15.1", True),
        ("h200_sxm", "vllm", "0.14", False),
        ("h200_sxm", "vllm", "0.17", False),
        ("h200_sxm", "vllm", "0.2", False),
    ],
)
def test_only_a_version_that_is_known_to_be_older_has_other_kernels(
    system: str, engine: str, version: str | None, is_older: bool
) -> None:
    assert (older_kernels(system, engine, version) is not None) is is_older


def more_us(
    config: dict[str, Any],
    pool: Pool,
    batch: float,
    prefill: float = 0.0,
    older: OlderKernels = LATENT,
    shape: ModelShape = DEEPSEEK_SHAPE,
    **formats: str,
) -> float:
    changed = with_older(TABLES, older, shape, config, formats, pool)
    return 1e6 * (changed.step_s(batch, prefill, 1000) - TABLES.step_s(batch, prefill, 1000))


def test_older_kernels_take_longer_in_every_layer() -> None:
    assert more_us(DEEPSEEK, Pool(tp=8), 8) == pytest.approx(61 * 18 + 58 * 18)
    of_all_ranks = 61 * 11 + 58 * LATENT.experts.at(64) * 1e6
    assert more_us(DEEPSEEK, Pool(tp=1, dp=8), 8) == pytest.approx(of_all_ranks)
    assert more_us(DEEPSEEK, Pool(tp=8), 8, moe="nvfp4") == pytest.approx(61 * 18), "experts in another format"
    assert more_us({**DEEPSEEK, "quantization_config": {}}, Pool(tp=8), 8) == pytest.approx(61 * 18)


def test_a_prefill_has_the_experts_of_its_tokens() -> None:
    assert more_us(DEEPSEEK, Pool(tp=8), 0, 4096) == pytest.approx(58 * 68)
    mixed_us = 61 * 18 + 58 * 1e6 * LATENT.experts.at(4008)
    assert more_us(DEEPSEEK, Pool(tp=8), 8, 4000) == pytest.approx(mixed_us, rel=1e-3)


def of_vllm(system: str, version: str, pool: Pool, batch: float, prefill: float = 0.0, **config: Any) -> float:
    """How many times as long the experts take."""
    older = older_kernels(system, "vllm", version)
    assert older is not None
    more = more_us({**MINIMAX, **config}, pool, batch, prefill, older, MINIMAX_SHAPE)
    assert TABLES.experts is not None
    return 1 + 1e-6 * more / TABLES.experts.at(batch or prefill)


def test_experts_take_times_as_long_by_tokens_and_by_the_columns_of_an_expert_on_a_gpu() -> None:
    assert of_vllm("h200_sxm", "0.16", Pool(tp=4), 8) == pytest.approx(1.63)
    assert of_vllm("h200_sxm", "0.16", Pool(tp=2), 8) == pytest.approx(1.24)
    assert of_vllm("h100_sxm", "0.16", Pool(tp=4), 8) == pytest.approx(1.33)
    assert of_vllm("h200_sxm", "0.16", Pool(tp=1, dp=4), 8) == pytest.approx(1.22), "32 tokens of all ranks"
    assert of_vllm("b200_sxm", "0.17", Pool(tp=2), 64) == pytest.approx(1.20)
    assert of_vllm("b200_sxm", "0.17", Pool(tp=2), 0, 4096) == pytest.approx(1.795, abs=1e-3)


def test_whole_experts_have_their_own_kernels() -> None:
    assert of_vllm("h200_sxm", "0.16", Pool(tp=4, expert_parallel=True), 8) == pytest.approx(1)
    assert of_vllm("b200_sxm", "0.17", Pool(tp=4, expert_parallel=True), 64) == pytest.approx(1.20)
    assert of_vllm("b200_sxm", "0.17", Pool(tp=4, expert_parallel=True), 0, 4096) == pytest.approx(2.116, abs=1e-3)


def test_on_blackwell_only_routers_without_groups_have_other_kernels() -> None:
    assert of_vllm("b200_sxm", "0.17", Pool(tp=2), 8, n_group=8) == pytest.approx(1)
    assert of_vllm("b200_sxm", "0.17", Pool(tp=2), 8, scoring_func="softmax") == pytest.approx(1)
    assert of_vllm("h200_sxm", "0.16", Pool(tp=4), 8, scoring_func="softmax") == pytest.approx(1.63)


def test_few_large_experts_are_as_in_the_tables() -> None:
    older = older_kernels("h200_sxm", "vllm", "0.16")
    assert older is not None
    few = MINIMAX_SHAPE.model_copy(update={"experts": 8})
    assert with_older(TABLES, older, few, MINIMAX, {}, Pool(tp=4)) is TABLES


@pytest.mark.parametrize("older", OLDER)
def test_no_size_is_extrapolated(older: OlderKernels) -> None:
    for whole in (False, True):
        assert older.times_as_long(1e6, 1e5, whole) == older.times_as_long(16384, 1536, whole)
        assert 0.8 < older.times_as_long(1e6, 1e5, whole) < 2.5


@pytest.mark.parametrize("older", OLDER)
def test_a_model_without_latent_attention_or_routed_experts_is_as_in_the_tables(older: OlderKernels) -> None:
    dense = MINIMAX_SHAPE.model_copy(update={"experts": 1})
    assert with_older(TABLES, older, dense, {"num_hidden_layers": 32, **BLOCKS}, {}, Pool(tp=8)) is TABLES
