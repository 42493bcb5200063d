"""Tables of the performance database: from the cache without the package, and refused in one line without both."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Pool
from pdlab.core.errors import UsageError
from pdlab.core.model_files import CONFIG, MODELOPT
from pdlab.core.model_size import kv_bytes_per_token_layer
from pdlab.sim import aic
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import load_hardware
from pdlab.sim.step_source import Tabulated
from pdlab.sim.step_time import StepCosts
from pdlab.sim.steps import steps_of, waits_of

KEPT = Path(__file__).parent / "step_tables"
GPT_OSS = require_shape("gpt-oss-120b")
TP4 = Pool(tp=4)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aic, "_known", {})
    kept = tmp_path / "step-times"
    kept.mkdir()
    for path in KEPT.glob("*.json"):
        (kept / path.name).write_bytes(path.read_bytes())


def tables(shape: ModelShape = GPT_OSS, pool: Pool = TP4, **quant: str) -> Tabulated:
    return aic.tabulate(shape, "h200_sxm", "vllm", "current", pool, quant, "SILICON")


def test_kept_tables_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    found = tables()
    assert found.provenance == "aiconfigurator-core 0.12.0: vllm 0.24.0, SILICON tables"
    # Values of the package itself, EngineHandle.predict_decode_latency(batch, context, 2) in ms, and the rotation of q
    # and k, of which it has none: 3 us in each of 36 layers.
    for batch, context, milliseconds in ((1, 1000, 3.217), (48, 1000, 7.51), (128, 9000, 11.143)):
        assert 1e3 * found.step_s(batch, 0, context) == pytest.approx(milliseconds + 36 * 0.003, rel=2e-3)
    # There: 5.722 ms. Its experts have a kink.
    assert 1e3 * found.step_s(32, 0, 1000) == pytest.approx(6.24 + 36 * 0.003, rel=2e-3)


@pytest.mark.parametrize(
    "change", [{"pool": Pool(tp=2)}, {"pool": Pool(tp=4, expert_parallel=True)}, {"kvcache": "fp8"}]
)
def test_what_is_not_kept_says_what_to_install(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aic, "PACKAGE", "no-such-package")
    with pytest.raises(UsageError, match=r"setup-perf"):
        tables(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kept", "architecture", "quant", "kvcache", "fmha"),
    [
        ("bfloat16", "any", {}, "bfloat16", "bfloat16"),
        ("float16", "any", {}, "bfloat16", "bfloat16"),
        ("fp8", "any", {}, "fp8", None),  # the engine's own choice of attention over 8 bits
        ("bfloat16", "any", {"kvcache": "fp8"}, "fp8", None),
        ("fp8", "any", {"kvcache": "bfloat16"}, "bfloat16", "bfloat16"),
        ("bfloat16", "any", {"fmha": "fp8"}, "bfloat16", "fp8"),
        ("bfloat16", "DeepseekV3ForCausalLM", {"kvcache": "fp8"}, "fp8", "bfloat16"),
    ],
)
def test_steps_have_the_kv_cache_of_memory_and_transfers(
    kept: str, architecture: str, quant: dict[str, str], kvcache: str, fmha: str | None
) -> None:
    used = aic.USED_FORMATS.get(("sglang", architecture, None), aic.AS_IT_IS)
    found = aic.formats_of(GPT_OSS.model_copy(update={"kv_dtype": kept}), used, quant)
    assert (found["kvcache"], found.get("fmha")) == (kvcache, fmha)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_a_checkpoint_in_8_bits_reads_as_many_bytes_of_kv_cache_as_it_keeps(tmp_path: Path) -> None:
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    (tmp_path / CONFIG).write_bytes((source / f"Qwen--Qwen3-32B-FP8_{CONFIG}").read_bytes())
    shape = require_shape(str(tmp_path))
    assert shape.kv_dtype == "bfloat16"
    # Its tables of fp8_block are in doubt.
    usual, half = (tables(shape, gemm="fp8", **kept) for kept in ({}, {"kvcache": "fp8"}))
    more_s = [each.step_s(64, 0, 16_000) - each.step_s(64, 0, 8000) for each in (usual, half)]
    read_bytes = 64 * 8000 * kv_bytes_per_token_layer(shape) * shape.layers / 4  # by each of four GPUs
    assert more_s[0] == pytest.approx(read_bytes / 4.8e12, rel=0.15)  # the data sheet's rate of H200
    assert more_s[1] < 0.75 * more_s[0]


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
@pytest.mark.parametrize(
    ("quant", "doubted", "other"),
    [
        ({}, "gemm=fp8_block", "gemm=fp8"),
        ({"gemm": "fp8", "moe": "fp8"}, "moe=fp8", "moe=fp8_block"),  # three times as long as in bfloat16
        ({"gemm": "fp8"}, None, None),
    ],
)
def test_tables_of_8_bits_that_are_slower_than_those_of_16(
    tmp_path: Path, quant: dict[str, str], doubted: str | None, other: str | None
) -> None:
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    (tmp_path / CONFIG).write_bytes((source / f"Qwen--Qwen3-235B-A22B-FP8_{CONFIG}").read_bytes())
    shape = require_shape(str(tmp_path))
    if doubted is None:
        assert tables(shape, **quant).step_s(32, 0, 1024) < 0.025
        return
    with pytest.raises(UsageError, match=rf"the tables of {doubted},.* name another format \(--quant {other}\)"):
        tables(shape, **quant)


def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aic, "PACKAGE", "pydantic")
    with pytest.raises(UsageError, match=r"pydantic .* is installed, and its tables are others"):
        tables(pool=Pool(tp=2))


def test_tables_of_another_question_or_damaged_ones_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aic, "PACKAGE", "no-such-package")
    (kept,) = (tmp_path / "step-times").glob("*.json")
    data = json.loads(kept.read_text())
    for text in (json.dumps({**data, "of": {**data["of"], "parallel": "tp8 dp1"}}), "{", json.dumps({**data, "x": 1})):
        kept.write_text(text)
        with pytest.raises(UsageError, match=r"setup-perf"):
            tables()


def test_tables_of_another_grid_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aic, "PACKAGE", "no-such-package")
    assert tables().limits == aic.LIMITS
    monkeypatch.setattr(aic, "LIMITS", aic.LIMITS.model_copy(update={"prefill_tokens": 4096}))
    with pytest.raises(UsageError, match=r"setup-perf"):
        tables()


def test_a_cache_that_cannot_be_written_costs_the_keeping_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tables()
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(blocked))
    monkeypatch.setattr(aic, "_known", {})
    monkeypatch.setattr(aic, "PACKAGE", "pydantic")
    monkeypatch.setattr(aic, "VERSION", importlib.metadata.version("pydantic"))
    monkeypatch.setattr(aic, "_compiled", lambda folder, *_: aic._Compiled(None, "0", {}) if folder.exists() else None)
    monkeypatch.setattr(aic, "_grid", lambda *_: found)
    assert tables() == found


OVER_ALL_HEADS = {"use_qk_norm": True, "qk_norm_type": "per_layer"}


def test_ranks_that_normalize_over_all_heads_wait_once_more_in_every_layer() -> None:
    usual = waits_of(GPT_OSS, TP4)
    assert usual == GPT_OSS.layers * 2
    assert waits_of(GPT_OSS.model_copy(update={"config": OVER_ALL_HEADS}), TP4) == 1.5 * usual
    assert waits_of(GPT_OSS.model_copy(update={"config": {**OVER_ALL_HEADS, "qk_norm_type": "per_head"}}), TP4) == usual
    assert waits_of(GPT_OSS.model_copy(update={"config": OVER_ALL_HEADS}), Pool(tp=1)) == 0


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_the_exchange_of_variances_is_in_the_steps(tmp_path: Path) -> None:
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    config = json.loads((source / "MiniMaxAI--MiniMax-M2.5_config.json").read_text())
    took_ms = {}
    for kind in ("per_layer", "per_head"):
        (folder := tmp_path / kind).mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "qk_norm_type": kind}))
        of = {"system": "h100_sxm", "engine": "vllm", "mode": "SILICON", "version": "current"}
        handle = aic._compiled(folder, of, TP4, {"gemm": "fp8"}).handle
        took_ms[kind] = handle.predict_decode_latency(8, 1000, 2)
    a_layer_us = 1e3 * (took_ms["per_layer"] - took_ms["per_head"]) / config["num_hidden_layers"]
    assert 8 < a_layer_us < 20  # four kernels of about 2 us, and an all-reduce of 5


@pytest.mark.parametrize(
    ("engine", "capability", "apart"), [("vllm", 90, True), ("vllm", 100, False), ("trtllm", 90, False)]
)
def test_attention_of_vllm_gives_8_bits_on_blackwell_only(engine: str, capability: int, apart: bool) -> None:
    assert aic.quantizes_after_attention(engine, capability) is apart


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_the_kernel_that_quantizes_after_attention_is_in_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    name = "nvidia--Llama-3.1-70B-Instruct-FP8"
    for file in (CONFIG, MODELOPT):
        (tmp_path / file).write_bytes((source / f"{name}_{file}").read_bytes())
    layers = json.loads((tmp_path / CONFIG).read_text())["num_hidden_layers"]
    of = {"system": "h100_sxm", "engine": "vllm", "mode": "SILICON", "version": "current"}

    def step_ms() -> float:
        return float(aic._compiled(tmp_path, of, TP4, {}).handle.predict_decode_latency(8, 1000, 2))

    apart_ms = step_ms()
    monkeypatch.setattr(aic, "quantizes_after_attention", lambda *_: False)
    assert 1 < 1e3 * (apart_ms - step_ms()) / layers < 3  # the database has 2 us for its smallest inputs


LLAMA_FP8 = "nvidia--Llama-3.1-70B-Instruct-FP8"


def _model_folder(name: str, folder: Path) -> Path:
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    for file in (CONFIG, MODELOPT):
        if (packaged := source / f"{name}_{file}").exists():
            (folder / file).write_bytes(packaged.read_bytes())
    return folder


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_norms_quantize_for_the_matrices_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _model_folder(LLAMA_FP8, tmp_path)
    of = {"system": "h100_sxm", "engine": "vllm", "mode": "SILICON", "version": "current"}

    def prefill_ms() -> float:
        return float(aic._compiled(folder, of, TP4, {}).handle.predict_prefill_latency(1, 4096, 0))

    fused_ms = prefill_ms()
    monkeypatch.setattr(aic, "STATIC", "none")
    # Less is written and read: 2 x 4096 x 8192 values of 16 bits by two kernels of every layer.
    assert 0.90 < fused_ms / prefill_ms() < 0.97


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
@pytest.mark.parametrize(("engine", "kernels"), [("vllm", 1), ("trtllm", 0)])
def test_q_and_k_are_rotated_by_a_kernel_of_vllm(
    engine: str, kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _model_folder(LLAMA_FP8, tmp_path)
    of = {"system": "h200_sxm", "engine": engine, "mode": "SILICON", "version": "current"}

    def step_ms() -> float:
        return float(aic._compiled(folder, of, TP4, {}).handle.predict_decode_latency(8, 1000, 2))

    rotated_ms = step_ms()
    monkeypatch.setattr(aic, "_rotations", lambda _: [])
    assert 1e3 * (rotated_ms - step_ms()) / 80 == pytest.approx(3 * kernels, abs=0.2)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_fewer_rows_take_no_longer_on_b200(tmp_path: Path) -> None:
    folder = _model_folder(LLAMA_FP8, tmp_path)
    took_s = {}
    for system in ("b200_sxm", "gb200"):
        of = {"system": system, "engine": "vllm", "mode": "SILICON", "version": "current"}
        compiled = aic._compiled(folder, of, TP4, {})
        assert len(compiled.matrices) == (4 if system == "b200_sxm" else 0)
        more_s = [sum(each.without_faults_s(rows, aic.FAULT) for each in compiled.matrices) for rows in (4.0, 8.0)]
        step_s = [1e-3 * float(compiled.handle.predict_decode_latency(rows, 1000, 2)) for rows in (4, 8)]
        took_s[system] = [one + more for one, more in zip(step_s, more_s, strict=True)]
    # Of its own tables on B200 a step of 4 sequences takes 10.9 ms, and one of 8 takes 7.8 ms.
    assert took_s["b200_sxm"] == pytest.approx(took_s["gb200"], rel=0.12)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_latent_attention_of_vllm_takes_as_long_on_every_blackwell(tmp_path: Path) -> None:
    kimi = "nvidia--Kimi-K2.5-NVFP4"
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    (tmp_path / CONFIG).write_bytes((source / f"{kimi}_{CONFIG}").read_bytes())
    step_ms, prefill_ms = {}, {}
    for system in ("b200_sxm", "gb200"):
        of = {"system": system, "engine": "vllm", "mode": "SILICON", "version": "current"}
        compiled = aic._compiled(tmp_path, of, TP4, {})
        assert (compiled.latent is None) == (system == "b200_sxm")
        decode_s, prefill_s = (
            (compiled.latent.decode_s(16, 2000), compiled.latent.prefill_s(8192)) if compiled.latent else (0, 0)
        )
        step_ms[system] = compiled.handle.predict_decode_latency(16, 2000, 2) + 1e3 * decode_s
        prefill_ms[system] = compiled.handle.predict_prefill_latency(1, 8192, 0) + 1e3 * prefill_s
    # By its own table GB200 takes 4 ms longer for the step, and 15 ms for the prompt.
    assert step_ms["gb200"] == pytest.approx(step_ms["b200_sxm"], rel=0.05)
    assert prefill_ms["gb200"] == pytest.approx(prefill_ms["b200_sxm"], rel=0.05)


DEEPSEEK = {"fp8": "deepseek-ai--DeepSeek-V3", "fp4": "nvidia--DeepSeek-V3.1-NVFP4"}
WIDE, NODE = Pool(dp=32, expert_parallel=True), Pool(dp=8, expert_parallel=True)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
def test_a_layer_of_deepseek_has_two_all_reduces_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiconfigurator_core.sdk import operations

    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    (tmp_path / CONFIG).write_bytes((source / f"{DEEPSEEK['fp8']}_{CONFIG}").read_bytes())
    of = {"system": "h200_sxm", "engine": "vllm", "mode": "SILICON", "version": "current"}
    handle = aic._compiled(tmp_path, of, Pool(tp=8), {}).handle
    two = aic._seconds_of(handle, [operations.CustomAllReduce("two", 2 * 61, 7168, 8)])
    step_ms = handle.predict_decode_latency(64, 1000, 2)
    monkeypatch.setattr(aic, "ALL_REDUCES_OF_TP", "none")
    four_ms = aic._compiled(tmp_path, of, Pool(tp=8), {}).handle.predict_decode_latency(64, 1000, 2)
    assert four_ms - step_ms == pytest.approx(1e3 * two(64), rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
@pytest.mark.parametrize(
    ("precision", "system", "engine", "pool", "faster"),
    [
        ("fp8", "gb200", "sglang", WIDE, ("exchange", "experts", "experts")),
        ("fp4", "gb200", "trtllm", WIDE, ("exchange", "experts")),
        ("fp4", "gb300", "trtllm", Pool(tp=8, expert_parallel=True), ("experts",)),
        ("fp8", "b200_sxm", "trtllm", Pool(tp=8), ("experts",)),
        ("fp8", "h200_sxm", "trtllm", NODE, ()),
        ("fp8", "h200_sxm", "sglang", NODE, ("experts", "experts")),
        ("fp8", "gb200", "sglang", NODE, ("experts", "experts")),
    ],
)
def test_what_engines_do_in_another_way_than_the_tables(
    precision: str, system: str, engine: str, pool: Pool, faster: tuple[str, ...], tmp_path: Path
) -> None:
    source = Path(str(importlib.util.find_spec("aiconfigurator_core").origin)).parent / "model_configs"  # type: ignore[union-attr]
    for file in (CONFIG, MODELOPT):
        if (bundled := source / f"{DEEPSEEK[precision]}_{file}").exists():
            (tmp_path / file).write_bytes(bundled.read_bytes())
    of = {"system": system, "engine": engine, "mode": "SILICON", "version": "current"}
    compiled = aic._compiled(tmp_path, of, pool, {"fmha": "bfloat16"})
    exchange = () if compiled.exchange is None else (compiled.exchange,)
    assert ("exchange",) * len(exchange) + ("experts",) * len(compiled.other_experts) == faster
    for way in (*exchange, *compiled.other_experts):
        assert any(-way.table_s(tokens) < way.more_s(tokens) < 0 for tokens in (16.0, 256.0, 8192.0))


def test_a_grid_has_numbers_of_rows_that_were_measured_at_the_end_of_a_tile() -> None:
    axes = aic._axes()
    assert {rows % 256 for rows in axes.tokens if rows > 256} == {0}
    assert {rows % 16 for rows in axes.batches if rows > 8} == {0}


def test_a_model_without_the_keys_of_a_config_is_refused() -> None:
    bare = GPT_OSS.model_copy(update={"config": {}, "hf_id": None, "read_from": None})
    with pytest.raises(UsageError, match=r"config\.json"):
        tables(bare)


def test_fitted_constants_stay_the_first_choice() -> None:
    assert isinstance(steps_of(load_hardware("h100-vllm-0.11"), GPT_OSS, Pool(tp=4)), StepCosts)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra perf")
@pytest.mark.parametrize(
    ("name", "gpu", "fix"),
    [
        # Its experts' width of 1,536 over 8 ranks is no multiple of the 128 columns that share a scale.
        ("MiniMaxAI--MiniMax-M2.5", "H200", "name another TP, or other formats (--quant)"),
        ("openai--gpt-oss-120b", "A100-80G", "--table-mode HYBRID takes what is missing"),
    ],
)
def test_a_refusal_names_a_fix_that_mends_it(name: str, gpu: str, fix: str, tmp_path: Path) -> None:
    """Similar tables help where measured ones are missing, and not where the package builds no such model."""
    shape = require_shape(str(_model_folder(name, tmp_path)))
    with pytest.raises(UsageError) as refused:
        steps_of(computed(gpu), shape, Pool(tp=8))
    assert fix in str(refused.value)
    assert ("HYBRID" in str(refused.value)) is ("HYBRID" in fix)
