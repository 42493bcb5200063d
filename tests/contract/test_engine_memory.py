"""The memory that pdlab.deploy.engine_memory says one request reserves is what vLLM's own specs say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from contract.conftest import quietly

from pdlab.core.catalog import resolve_model
from pdlab.core.vllm_limits import default_utilization
from pdlab.deploy.engine_memory import STEPS_AHEAD, reserved_bytes

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")
BLOCK = 16


@pytest.mark.parametrize("tokens", [4096, 16384, 131072])
def test_a_request_of_gpt_oss(tokens: int) -> None:
    shape = resolve_model("gpt-oss-120b")[0]
    assert shape is not None and shape.full_attention_layers is not None
    specs, torch = quietly("vllm.v1.kv_cache_interface"), quietly("torch")
    common = {"block_size": BLOCK, "num_kv_heads": shape.kv_heads, "head_size": shape.head_dim, "dtype": torch.bfloat16}
    full = specs.FullAttentionSpec(**common)
    windowed = specs.SlidingWindowSpec(**common, sliding_window=shape.sliding_window)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=tokens),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        max_in_flight_tokens=STEPS_AHEAD["gpu"] * 8192,
    )
    layers = shape.full_attention_layers
    theirs = layers * full.max_memory_usage_bytes(config)
    theirs += (shape.layers - layers) * windowed.max_memory_usage_bytes(config)
    ours = reserved_bytes(shape, tokens, {}, "gpu")
    blocks = 2 * shape.layers * full.page_size_bytes  # of each layer at most two are not full
    assert theirs - blocks <= ours <= theirs


def test_the_share_of_the_memory_is_the_default_of_the_installed_version() -> None:
    theirs = quietly("vllm.config").CacheConfig
    assert theirs().gpu_memory_utilization == default_utilization()
