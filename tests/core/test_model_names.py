from __future__ import annotations

import pytest

from pdlab.core.model_names import model_name, same_model


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("openai/gpt-oss-120b", "openai/gpt-oss-120b", True),
        ("openai/gpt-oss-120b", "gpt-oss-120b", True),
        ("openai/gpt-oss-120b", "/data/models/GPT-OSS-120b/", True),
        ("/srv/hub/models--openai--gpt-oss-120b/snapshots/0f3a", "openai/gpt-oss-120b", True),
        ("openai/gpt-oss-120b", "openai/gpt-oss-20b", False),
        ("meta/llama-8b", "other/llama-8b", False),
        ("/models/llama-8b", "/models/llama-405b", False),
    ],
)
def test_models_by_name(one: str, other: str, same: bool) -> None:
    assert same_model(one, other) is same_model(other, one) is same
    assert "/data" not in model_name(one) + model_name(other)
