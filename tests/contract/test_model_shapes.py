"""Shapes of config.json files are what vLLM builds of the same files: KV cache per layer, windows, parameters, context.

vLLM builds each model without weights and its own attention layers say what they keep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlab.core.catalog import resolve_model
from pdlab.core.model_size import kv_bytes_per_token_layer, parameters

BASE = {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 1024},
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
        "kv_lora_rank": 512, "q_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": 128, "intermediate_size": 256, "layer_types": SLIDING * 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512,
                         "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "gemma-3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 64, "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The folder of each model, and what vLLM says of it."""
    root = tmp_path_factory.mktemp("models")
    folders = []
    for name, keys in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**BASE, **keys}))
        folders.append(root / name)
    program = Path(__file__).with_name("vllm_layers.py")
    done = subprocess.run(
        [sys.executable, str(program), *map(str, folders)], capture_output=True, text=True, timeout=600
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(folders), done.stderr[-3000:]
    return {folder.name: (folder, line) for folder, line in zip(folders, lines, strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_as_vllm_builds_it(name: str, built: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    folder, theirs = built[name]
    shape = resolve_model(str(folder)).shape
    assert shape is not None
    assert theirs["bytes_per_token"] == [kv_bytes_per_token_layer(shape)] * shape.layers
    assert set(theirs["windows"]) - {None} == ({shape.sliding_window} if shape.sliding_window else set())
    full = shape.layers if shape.full_attention_layers is None else shape.full_attention_layers
    assert theirs["windows"].count(None) == full
    assert theirs["context"] == shape.max_context
    # vLLM's tables of experts are padded, and gpt-oss has a table of biases: less than one in a hundred.
    assert theirs["parameters"] == pytest.approx(parameters(shape), rel=0.01)
