"""Models of other architectures than gpt-oss, served with prefill and decode apart: Llama, and DeepSeek-V3's latent
attention with experts. A prompt's KV cache moves, and the canary compares answers with an engine alone."""

from __future__ import annotations

import pytest

from tests.live.conftest import Stack


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
def test_prefill_and_decode_apart_answer_like_an_engine_alone(model: str, stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--model", model)
    try:
        assert done.code == 0
        running = stack.running()
        assert running.model_id == model
        assert running.manifest.canary.equal is True
        assert running.manifest.wire is not None
    finally:
        stack.shutdown()
