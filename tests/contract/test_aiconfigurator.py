"""What pdlab relies on in aiconfigurator-core, where it is installed (the extra perf)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Pool
from pdlab.core.errors import UsageError
from pdlab.sim import aic
from pdlab.sim.older_engines import COLUMNS, older_kernels

core = pytest.importorskip("aiconfigurator_core")
GPT_OSS = require_shape("gpt-oss-120b")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aic, "_known", {})


# The rotation of q and k in each of gpt-oss-120b's 36 layers. vLLM has this kernel, and the facade does not (decision
# 034). It takes 3 us in decode.
ROTATIONS_MS = 36 * 3e-3


def test_a_grid_has_the_times_of_the_public_facade_and_the_rotation() -> None:
    from aiconfigurator_core.sdk import EngineHandle

    handle = EngineHandle.compile(
        "openai/gpt-oss-120b", "h100_sxm", "vllm", backend_version="current", tp_size=2, moe_tp_size=2, moe_ep_size=1
    )
    tables = aic.tabulate(GPT_OSS, "h100_sxm", "vllm", "current", Pool(tp=2), {}, "SILICON")
    assert tables.estimated == ()
    for batch in (1, 3, 11, 50, 200, 900):
        for context in (100, 700, 5000, 12_000):
            expected = handle.predict_decode_latency(batch, context, 2) + ROTATIONS_MS
            assert 1e3 * tables.step_s(batch, 0, context) == pytest.approx(expected, rel=0.03)
    for prefill in (600, 2500, 8000):
        expected = handle.mixed_step_latency(prefill, 20, prefill, 2) + ROTATIONS_MS
        assert 1e3 * tables.step_s(20, prefill, prefill, prefill / 2) == pytest.approx(expected, rel=0.03)


def test_it_raises_where_it_has_no_data() -> None:
    with pytest.raises(UsageError, match=r"^no step times of gpt-oss-120b on h100_sxm, vllm 0\.29\.0"):
        aic.tabulate(GPT_OSS, "h100_sxm", "vllm", "0.29.0", Pool(tp=2), {}, "SILICON")


def experts_ms(system: str, engine: str, version: str) -> dict[tuple[int, float], float]:
    """MiniMax-M2.5's experts that TP divides, by tokens and the columns of an expert on a GPU."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = Path(core.__file__).parent / "systems" / "data" / system / "moe" / engine / version / "moe_perf.parquet"
    of = {"hidden_size": 3072, "inter_size": 1536, "num_experts": 256, "topk": 8, "moe_ep_size": 1}
    of |= {"moe_dtype": "fp8_block", "distribution": "power_law_1.2"}
    rows = parquet.read_table(table, filters=[(name, "=", value) for name, value in of.items()]).to_pylist()
    return {(each["num_tokens"], 1536 / each["moe_tp_size"]): each["latency"] for each in rows}


# Of vLLM 0.17's kernels on B200 the package has later measurements, of vLLM 0.19.0.
@pytest.mark.parametrize(
    ("system", "planned", "engine", "version", "off"),
    [
        ("b200_sxm", "0.17", "vllm", "0.19.0", 0.06),
        ("h200_sxm", "0.16", "trtllm", "1.3.0rc20", 0.01),
        ("h100_sxm", "0.16", "trtllm", "1.3.0rc20", 0.01),
    ],
)
def test_its_kernels_take_as_many_times_as_long_as_declared(
    system: str, planned: str, engine: str, version: str, off: float
) -> None:
    declared = older_kernels(system, "vllm", planned)
    assert declared is not None
    assert declared.divided is not None
    older, current = experts_ms(system, engine, version), experts_ms(system, "vllm", "0.24.0")
    both = [
        (tokens, columns)
        for tokens in declared.divided.xs
        for columns in COLUMNS
        if {(tokens, columns)} <= older.keys() & current.keys()
    ]
    assert len(both) >= 31
    for each in both:
        assert declared.divided.at(*each) == pytest.approx(older[each] / current[each], rel=off)


def test_the_formats_of_quant_are_the_databases() -> None:
    from aiconfigurator_core.sdk import common

    kinds = {"gemm": "GEMMQuantMode", "moe": "MoEQuantMode", "kvcache": "KVCacheQuantMode", "fmha": "FMHAQuantMode"}
    known = {part: {each.name for each in getattr(common, kind)} for part, kind in kinds.items()}
    assert {part: set(names) for part, names in aic.FORMATS.items()} == known
