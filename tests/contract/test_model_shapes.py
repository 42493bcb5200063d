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
# With None a key is not in the file.
LEFT_OUT = dict.fromkeys(
    ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
     "max_position_embeddings", "tie_word_embeddings")
)  # fmt: skip
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
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **LEFT_OUT, "n_layer": 4, "n_embd": 256,
        "n_head": 4, "n_inner": None, "n_positions": 64, "activation_function": "gelu_new",
    },
    "gpt-j": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", **LEFT_OUT, "n_layer": 4, "n_embd": 256,
        "n_head": 4, "n_inner": None, "n_positions": 4096, "rotary_dim": 64, "activation_function": "gelu_new",
    },
    "gpt-neox": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "num_key_value_heads": None},
    "bloom": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", **LEFT_OUT, "hidden_size": 256, "n_layer": 4,
        "n_head": 4, "num_attention_heads": 4, "seq_length": 2048,
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", **LEFT_OUT, "hidden_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_kv_heads": 2, "multi_query": True, "bias": False,
        "new_decoder_architecture": True, "parallel_attn": True, "alibi": False, "max_position_embeddings": 2048,
    },
    "falcon-multi-query": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", **LEFT_OUT, "hidden_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_kv_heads": 4, "multi_query": True, "bias": False,
        "new_decoder_architecture": False, "parallel_attn": True, "alibi": False, "max_position_embeddings": 2048,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "num_key_value_heads": None, "ffn_dim": 1024,
        "intermediate_size": None, "tie_word_embeddings": None, "word_embed_proj_dim": 256,
        "max_position_embeddings": 64, "activation_function": "relu",
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "tie_word_embeddings": None,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "phi": {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "num_key_value_heads": 4, "intermediate_size": 1024,
    },
    "nemotron": {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2", "head_dim": 64,
    },
    "arcee": {
        "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2", "head_dim": 64,
    },
    "command-r": {
        "architectures": ["CohereForCausalLM"], "model_type": "cohere", "tie_word_embeddings": None,
        "model_max_length": 16384,
    },
    "glm-4": {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", **LEFT_OUT, "hidden_size": 256, "num_layers": 4,
        "num_attention_heads": 4, "ffn_hidden_size": 512, "kv_channels": 64, "multi_query_attention": True,
        "multi_query_group_num": 2, "padded_vocab_size": 1024, "vocab_size": 1024, "seq_length": 8192,
        "tie_word_embeddings": False, "rmsnorm": True, "add_qkv_bias": True, "post_layer_norm": True,
        "original_rope": True,
    },
    "dbrx": {
        "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", **LEFT_OUT, "d_model": 256, "n_heads": 4,
        "n_layers": 4, "max_seq_len": 2048, "tie_word_embeddings": False,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500000, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "num_key_value_heads": 4,
        "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "hidden_act": "silu", "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "tie_word_embeddings": None,
    },
    "longcat-flash": {
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", **LEFT_OUT, "num_layers": 2,
        "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512, "expert_ffn_hidden_size": 128,
        "n_routed_experts": 8, "zero_expert_num": 4, "zero_expert_type": "identity", "moe_topk": 2,
        "kv_lora_rank": 512, "q_lora_rank": 96, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 4096, "routed_scaling_factor": 6.0, "attention_method": "MLA",
    },
    "ernie": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2,
        "moe_intermediate_size": 64, "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1,
        "moe_num_shared_experts": 1, "hidden_act": "silu", "use_moe": True, "head_dim": 64,
    },
    "hunyuan": {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "head_dim": 64,
        "num_experts": 4, "moe_topk": [2] * 4, "moe_intermediate_size": [128] * 4, "num_shared_expert": [1] * 4,
        "use_mixed_mlp_moe": True, "intermediate_size": 128,
    },
    "step": {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_key_value_heads": None,
        "num_attention_groups": 2, "head_dim": 64, "moe_intermediate_size": 64, "moe_num_experts": 8, "moe_top_k": 2,
        "share_expert_dim": 64, "moe_layers_enum": "1,2,3", "sliding_window": 512, "rope_theta": 10000.0,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8,
                                    "num_attention_groups": 2, "head_dim": 64},
    },
    "gemma-3-linear": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 64, "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 64,
        "tie_word_embeddings": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma-3-defaults": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **LEFT_OUT, "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 6, "sliding_window": 1024, "vocab_size": None,
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
        config = {key: value for key, value in {**BASE, **keys}.items() if value is not None}
        (root / name / "config.json").write_text(json.dumps(config))
        folders.append(root / name)
    program = Path(__file__).with_name("vllm_layers.py")
    done = subprocess.run(
        [sys.executable, str(program), *map(str, folders)], capture_output=True, text=True, timeout=840
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
