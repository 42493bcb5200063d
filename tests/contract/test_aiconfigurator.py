"""What pdlab relies on in aiconfigurator-core, where it is installed (the extra perf)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Pool
from pdlab.core.errors import UsageError
from pdlab.sim import aic

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
