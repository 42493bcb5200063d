"""config.json of many architectures as shapes: each test writes a small one of the architecture's form.

Parameter counts are written out per matrix; tests/contract/test_model_shapes.py compares with transformers and vLLM.
With PDLAB_HF_CONFIGS, a folder of files ORG--NAME_config.json, `PUBLISHED` is held against those.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdlab.cli import models
from pdlab.core import model_files
from pdlab.core.catalog import ModelShape, format_only_in_name, load_model, require_shape, resolve_model, why_no_shape
from pdlab.core.errors import UsageError
from pdlab.core.model_config import shape_fields
from pdlab.core.model_size import dense_bytes, expert_bytes, kv_bytes_per_token_layer, parameters
from pdlab.plan.step_findings import step_findings
from pdlab.sim.hardware import load_hardware

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256,
    "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN_MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 8,
    "experts_per_token": 2, "sliding_window": 128, "intermediate_size": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip
HEAD = 2 * 1000 * 256
ATTENTION = 256 * 64 * (2 * 4 + 2 * 2)
DENSE = 3 * 256 * 512
LATENT = 256 * 96 + 96 * 4 * 64 + 256 * 80 + 64 * 4 * (48 + 32) + 4 * 32 * 256


def shape(config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> ModelShape:
    return ModelShape(name="x", source="config.json", **shape_fields(config, modelopt))


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "count", "kv_values"),
    [
        (LLAMA, HEAD + 4 * (ATTENTION + DENSE), 2 * 2 * 64),
        ({**LLAMA, "tie_word_embeddings": True}, HEAD // 2 + 4 * (ATTENTION + DENSE), 2 * 2 * 64),
        ({**LLAMA, "head_dim": 128}, HEAD + 4 * (2 * ATTENTION + DENSE), 2 * 2 * 128),
        (QWEN_MOE, HEAD + 4 * (ATTENTION + 8 * 3 * 256 * 64), 2 * 2 * 64),
        (QWEN_MOE | {"mlp_only_layers": [0]}, HEAD + 4 * ATTENTION + 3 * 8 * 3 * 256 * 64 + DENSE, 2 * 2 * 64),
        (QWEN_MOE | {"decoder_sparse_step": 2}, HEAD + 4 * ATTENTION + 2 * (8 * 3 * 256 * 64 + DENSE), 2 * 2 * 64),
        (QWEN_MOE | {"shared_expert_intermediate_size": 128}, HEAD + 4 * (ATTENTION + 10 * 3 * 256 * 64), 2 * 2 * 64),
        (DEEPSEEK, HEAD + 4 * LATENT + 3 * 9 * 3 * 256 * 128 + DENSE, 80),
        (DEEPSEEK | {"q_lora_rank": None},
         HEAD + 4 * (LATENT - 256 * 96 - 96 * 256 + 256 * 256) + 3 * 9 * 3 * 256 * 128 + DENSE, 80),
        (GPT_OSS, HEAD + 4 * (ATTENTION + 8 * 3 * 256 * 256), 2 * 2 * 64),
        ({"architectures": ["Llama4ForConditionalGeneration"], "text_config": QWEN_MOE | {
            "model_type": "llama4_text", "interleave_moe_layer_step": 2, "intermediate_size_mlp": 512,
            "intermediate_size": 64, "moe_intermediate_size": None, "attention_chunk_size": 1024}},
         HEAD + 4 * ATTENTION + 2 * (9 * 3 * 256 * 64 + DENSE), 2 * 2 * 64),
        (LLAMA | {"moe_layer_freq": [0, 1, 1, 1], "n_routed_experts": 4, "moe_intermediate_size": 32,
                  "num_experts_per_tok": 2},
         HEAD + 4 * ATTENTION + DENSE + 3 * 4 * 3 * 256 * 32, 2 * 2 * 64),
    ],
)  # fmt: skip
def test_parameters_and_kv(config: dict[str, Any], count: int, kv_values: int) -> None:
    found = shape(config)
    assert parameters(found) == count
    assert kv_bytes_per_token_layer(found) == 2 * kv_values
    assert found.unknown == ()


UNGATED = 2 * 256 * 512
HALF_HEAD = 1000 * 256


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        # Two matrices for each feed-forward block.
        ({"model_type": "nemotron", "hidden_act": "relu2"}, HEAD + 4 * (ATTENTION + UNGATED)),
        ({"model_type": "arcee", "hidden_act": "relu2"}, HEAD + 4 * (ATTENTION + UNGATED)),
        ({"model_type": "phi", "hidden_act": "gelu_new"}, HEAD + 4 * (ATTENTION + UNGATED)),
        ({"model_type": "gpt_neox", "hidden_act": "gelu"}, HEAD + 4 * (ATTENTION + UNGATED)),
        # The same activation in a type with gates.
        ({"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"}, HEAD + 4 * (ATTENTION + DENSE)),
        # A type of tomorrow: SwiGLU has a gate.
        ({"model_type": "of_tomorrow", "hidden_act": "silu"}, HEAD + 4 * (ATTENTION + DENSE)),
        # No key has the width: it is 1,024 for an outer width of 256.
        ({"model_type": "gptj", "intermediate_size": None}, HEAD + 4 * (ATTENTION + 2 * UNGATED)),
        ({"model_type": "falcon", "intermediate_size": None}, HEAD + 4 * (ATTENTION + 2 * UNGATED)),
        ({"model_type": "bloom", "intermediate_size": None}, HEAD + 4 * (ATTENTION + 2 * UNGATED)),
        # Both matrices that read have intermediate_size together.
        ({"model_type": "qwen", "intermediate_size": 1024}, HEAD + 4 * (ATTENTION + DENSE)),
        # Without a key for it, the output head of some types is the embedding.
        ({"model_type": "cohere", "tie_word_embeddings": None}, HALF_HEAD + 4 * (ATTENTION + DENSE)),
        ({"model_type": "gemma2", "tie_word_embeddings": None}, HALF_HEAD + 4 * (ATTENTION + DENSE)),
        ({"model_type": "starcoder2", "tie_word_embeddings": None}, HALF_HEAD + 4 * (ATTENTION + UNGATED)),
        ({"model_type": "opt", "tie_word_embeddings": None}, HALF_HEAD + 4 * (ATTENTION + UNGATED)),
        ({"model_type": "llama", "tie_word_embeddings": None}, HEAD + 4 * (ATTENTION + DENSE)),
        # Layers 1 and 2 have experts.
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64,
          "moe_layer_start_index": 1, "moe_layer_end_index": 2}, HEAD + 4 * ATTENTION + 2 * (8 * 3 * 256 * 64 + DENSE)),
        ({"model_type": "step3p5", "moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 64,
          "share_expert_dim": 64, "moe_layers_enum": "1,2,3"}, HEAD + 4 * ATTENTION + 3 * 9 * 3 * 256 * 64 + DENSE),
        # One number for each layer, all equal.
        ({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2] * 4, "moe_intermediate_size": [64] * 4,
          "num_shared_expert": [1] * 4}, HEAD + 4 * (ATTENTION + 9 * 3 * 256 * 64)),
    ],
)  # fmt: skip
def test_parameters_by_type(keys: dict[str, Any], count: int) -> None:
    found = shape({**LLAMA, **keys})
    assert parameters(found) == count and found.unknown == ()


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"model_type": "of_tomorrow", "hidden_act": "gelu"}, "feed-forward blocks of type of_tomorrow"),
        ({"model_type": "of_tomorrow"}, "feed-forward blocks of type of_tomorrow"),
        ({"intermediate_size": None}, "feed-forward width"),
        (QWEN_MOE | {"mlp_only_layers": [0], "intermediate_size": None}, "feed-forward width"),
        ({"model_type": "step3_text", "share_q_dim": 64}, "queries of a lower rank"),
    ],
)
def test_parameters_that_no_key_gives_are_unknown(keys: dict[str, Any], what: str) -> None:
    found = shape({**LLAMA, **keys})
    assert found.weights_unknown == (what,)
    with pytest.raises(UsageError, match=what):
        parameters(found)
    assert kv_bytes_per_token_layer(found) == 2 * 2 * 2 * 64


@pytest.mark.parametrize(
    ("keys", "kv_values"),
    [
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2 * 2 * 64),
        ({"multi_query_attention": False, "multi_query_group_num": 2}, 2 * 4 * 64),
        ({"num_attention_groups": 1}, 2 * 1 * 64),
        ({"n_head_kv": 2, "num_kv_heads": 4}, 2 * 2 * 64),
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 4}, 2 * 1 * 64),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2},
         2 * 2 * 64),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 2 * 1 * 64),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 2}}, 2 * 2 * 64),
        ({}, 2 * 4 * 64),
    ],
)  # fmt: skip
def test_kv_heads(keys: dict[str, Any], kv_values: int) -> None:
    assert kv_bytes_per_token_layer(shape({**LLAMA, "num_key_value_heads": None, **keys})) == 2 * kv_values


def test_k_and_v_of_minicpm3_are_of_every_head() -> None:
    """Its projections are latent; vLLM keeps K of 48 + 16 values, and V padded to as many."""
    found = shape(DEEPSEEK | {"model_type": "minicpm3", "n_routed_experts": None})
    assert kv_bytes_per_token_layer(found) == 2 * 2 * 4 * 64
    assert parameters(found) == HEAD + 4 * (LATENT + DENSE)


def test_two_attentions_and_two_dense_blocks_in_a_layer() -> None:
    config = DEEPSEEK | {"model_type": "longcat_flash", "num_layers": 2, "ffn_hidden_size": 512, "n_shared_experts": 0}
    found = shape({**config, "num_hidden_layers": None, "intermediate_size": None, "first_k_dense_replace": None})
    assert (found.layers, kv_bytes_per_token_layer(found)) == (4, 2 * 80)
    assert parameters(found) == HEAD + 4 * (LATENT + DENSE) + 2 * 8 * 3 * 256 * 128


def test_layers_of_one_kind_have_more_heads() -> None:
    """And the list of layers has those for multi-token prediction too."""
    other = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 64}
    kinds = ["full_attention", "sliding_attention"] * 3
    found = shape({**LLAMA, "attention_other_setting": other, "layer_types": kinds, "sliding_window": 128})
    assert found.full_attention_layers == 2 and found.unknown == ()
    assert parameters(found) == HEAD + 4 * (ATTENTION + DENSE) + 2 * 2 * 2 * 64 * 256
    other["num_attention_groups"] = 3
    assert shape({**LLAMA, "attention_other_setting": other, "layer_types": kinds}).unknown == ("per-layer shapes",)


GEMMA_3 = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
           "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip


def test_what_a_gemma_3_has_by_default(tmp_path: Path) -> None:
    """The 4B model has 3.88 B parameters in its language model; the file says nothing about heads and vocabulary."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": GEMMA_3,
        "vision_config": {"depth": 2},
    }
    found = resolve_model(folder(tmp_path / "gemma", config)).shape
    assert found is not None and (found.max_context, found.full_attention_layers) == (131072, 5)
    assert parameters(found) / 1e9 == pytest.approx(3.88, rel=0.01)


@pytest.mark.parametrize("key", ["vision_config", "audio_config"])
def test_an_encoder_is_named_as_not_counted(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, with_encoder = (folder(tmp_path / name, {**LLAMA, **keys}) for name, keys in (
        ("plain", {}), ("seeing", {key: {"hidden_size": 64, "num_hidden_layers": 2}})))  # fmt: skip
    found = require_shape(with_encoder)
    assert parameters(found) == parameters(require_shape(plain)) and found.not_counted == (key,)
    for model, count in ((plain, 0), (with_encoder, 1)):
        findings = step_findings(load_hardware("h100-vllm-0.11"), require_shape(model))
        assert sum("encoder" in each.code for each in findings) == count
        models.main(["--model", model])
        assert capsys.readouterr().err.count(f"without its encoder ({key} of config.json)") == count


@pytest.mark.parametrize(
    ("keys", "window", "full"),
    [
        ({"sliding_window": 512}, 512, 0),
        ({"sliding_window": 512, "use_sliding_window": False}, None, None),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, 512, 1),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 4}, None, None),
        ({"sliding_window": 512, "model_type": "gemma2"}, 512, 2),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, 512, 1),
        ({"sliding_window": 512, "sliding_window_pattern": "LG"}, 512, 2),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 3}, 512, 2),
        ({"model_type": "llama4_text", "attention_chunk_size": 1024}, 1024, 1),
        ({"model_type": "mimo", "attention_chunk_size": 128}, None, None),
    ],
)
def test_windows(keys: dict[str, Any], window: int | None, full: int | None) -> None:
    found = shape({**LLAMA, **keys})
    assert (found.sliding_window, found.full_attention_layers) == (window, full)


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            8192,
        ),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
        ({"model_type": "cohere", "model_max_length": 16384}, 16384),
        ({"max_position_embeddings": None, "max_seq_len": 2048}, 2048),
        ({"seq_length": 1024}, 1024),
    ],
)
def test_context(keys: dict[str, Any], tokens: int) -> None:
    assert shape({**LLAMA, **keys}).max_context == tokens


@pytest.mark.parametrize(
    "keys",
    [
        {"head_dim": 64.0},
        {"num_hidden_layers": 4.0, "vocab_size": 1e3, "num_key_value_heads": [2.0] * 4},
        {"sliding_window": False},
        {"kv_lora_rank": 0.0},
    ],
)
def test_numbers_that_are_whole_in_another_form(keys: dict[str, Any]) -> None:
    plain = shape({**LLAMA, "head_dim": 64})
    found = shape({**LLAMA, "head_dim": 64, **keys})
    assert found == plain and all(type(value) is not float for value in (found.layers, found.head_dim, found.kv_heads))


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
@pytest.mark.parametrize(
    "unread",
    [
        {"max_position_embeddings": 1200.5},
        {"num_attention_heads": [4, 2]},
        {"layer_types": "x"},
        {"rope_scaling": "yarn"},
        {"vocab_size": "many"},
    ],
)
def test_what_stands_beside_the_language_model_is_not_read(unread: dict[str, Any], part: str) -> None:
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], part: QWEN_MOE}
    assert shape({**config, **unread}) == shape(config)


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        ({"vocab_size": "many"}, {key: value for key, value in LLAMA.items() if key != "vocab_size"}),
        ({"quantization_config": "fp8"}, LLAMA),
        ({}, {**LLAMA, "layer_types": "x"}),
        ({}, {**LLAMA, "max_position_embeddings": 1200.5}),
    ],
)
def test_what_is_read_is_checked_wherever_it_stands(beside: dict[str, Any], text: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"which is no (whole number|mapping|list): correct it"):
        shape({"architectures": ["X"], "text_config": text, **beside})


def test_layers_are_few_enough_to_go_through_them() -> None:
    with pytest.raises(ValueError, match="more than 100000"):
        shape({**GPT_OSS, "num_hidden_layers": 10**30, "layer_types": None})


def test_an_infinite_context_is_refused() -> None:
    with pytest.raises(ValueError, match="has max_context inf, which is no whole number"):
        shape({**LLAMA, "rope_scaling": {"type": "linear", "factor": float("inf")}})


def compressed(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **more}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("quantization", "experts", "attention", "kv"),
    [
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8", "bfloat16"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["gate", "lm_head"]}, "fp8", "fp8", "bfloat16"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4", "bfloat16",
         "bfloat16"),
        ({"quant_method": "awq", "bits": 4}, "awq", "awq", "bfloat16"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "int8", "bfloat16"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", "gptq", "bfloat16"),
        (compressed(8, "float"), "fp8", "fp8", "bfloat16"),
        (compressed(8, "int"), "int8", "int8", "bfloat16"),
        (compressed(4, "int"), "int4", "int4", "bfloat16"),
        (compressed(4, "float", group_size=16), "nvfp4", "nvfp4", "bfloat16"),
        ({**compressed(4, "int"), "ignore": ["re:.*self_attn.*"]}, "int4", "bfloat16", "bfloat16"),
        ({**compressed(8, "float"), "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8", "fp8", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.*.self_attn*"]}, "nvfp4",
         "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_quantisation(quantization: dict[str, Any] | None, experts: str, attention: str, kv: str) -> None:
    found = shape(QWEN_MOE | ({"quantization_config": quantization} if quantization else {}))
    assert (found.weight_dtype, found.attention_dtype, found.kv_dtype) == (experts, attention, kv)


def test_the_file_of_modelopt_counts() -> None:
    """NVIDIA's checkpoints before 2026 have no quantization_config in config.json."""
    modelopt = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
                                 "exclude_modules": ["lm_head", "model.layers.2.self_attn*"]}}  # fmt: skip
    found = shape(QWEN_MOE, modelopt)
    assert (found.weight_dtype, found.attention_dtype, found.kv_dtype) == ("nvfp4", "bfloat16", "fp8")
    whole = expert_bytes(shape(QWEN_MOE))
    assert expert_bytes(found) == pytest.approx(whole * 4.5 / 16)


def test_an_unknown_quantisation_leaves_the_weights_unknown() -> None:
    found = shape(LLAMA | {"quantization_config": {"quant_method": "of_tomorrow"}})
    assert found.weights_unknown == ("quantisation of_tomorrow",) and found.kv_unknown == ()
    with pytest.raises(UsageError, match="of_tomorrow"):
        parameters(found)


LINEAR = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_num_value_heads": 4,
          "linear_value_head_dim": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "what", "countable"),
    [
        ({"layer_types": (["linear_attention"] * 3 + ["full_attention"]), **LINEAR}, "linear-attention state", True),
        ({"full_attention_interval": 4, **LINEAR}, "linear-attention state", True),
        ({"attn_type_list": [0, 1, 0, 1]}, "linear-attention state", False),
        ({"hybrid_override_pattern": "M*M-", "ssm_state_size": 16, "n_groups": 2, "mamba_num_heads": 8,
          "mamba_head_dim": 32}, "Mamba layers", True),
        ({"attn_layer_period": 8, "mamba_d_state": 16}, "Mamba layers", False),
        (DEEPSEEK | {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 16}, "sparse-attention indexer", True),
        ({"compress_ratios": [0, 4, 128, 4], "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2},
         "compressed attention", True),
        ({"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
                            {"attention": {"n_heads_in_group": None}, "ffn": {"ffn_mult": 1.0}}] * 2},
         "per-layer shapes", True),
        ({"global_head_dim": 128, "num_global_key_value_heads": 1, "sliding_window": 64,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, "per-layer shapes", True),
        ({"swa_num_key_value_heads": 4, "sliding_window": 64, "hybrid_layer_pattern": [0, 1, 1, 1]},
         "per-layer shapes", True),
        ({"layer_types": ["attention_of_tomorrow"] * 4}, "layers of type attention_of_tomorrow", False),
        ({"is_encoder_decoder": True}, "an encoder beside the decoder", False),
        (DEEPSEEK | {"model_type": "bailing_hybrid", "layer_group_size": 2}, "linear-attention state", False),
        (DEEPSEEK | {"model_type": "of_tomorrow", "hidden_act": "silu"}, "latent attention of type of_tomorrow", True),
        ({"mamba_num_heads": 8, "layers_block_type": ["mamba", "attention"] * 2}, "Mamba layers", False),
        ({"use_cla": True}, "layers that share KV cache", False),
    ],
)  # fmt: skip
def test_what_no_field_of_a_shape_holds_is_named(
    keys: dict[str, Any], what: str, countable: bool, tmp_path: Path
) -> None:
    model = folder(tmp_path / "model", {**LLAMA, **keys})
    found = resolve_model(model).shape
    assert found is not None and found.unknown == (what,)
    with pytest.raises(UsageError, match=what):
        kv_bytes_per_token_layer(found)
    with pytest.raises(UsageError, match=f"{what}.*: launch and measure it"):
        require_shape(model)
    assert bool(found.weights_unknown) is not countable
    if countable:
        assert parameters(found) > HEAD


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_hidden_layers": None}, "layers"),
        ({"architectures": None}, "architecture"),
        ({"max_position_embeddings": None}, "max_context"),
        ({"hidden_size": "wide"}, "hidden"),
        ({"num_hidden_layers": True}, "layers"),
        ({"num_key_value_heads": [2, 4, 2, 4]}, "num_key_value_heads [2, 4, 2, 4]"),
        ({"num_key_value_heads": 0}, "0 KV heads (num_key_value_heads)"),
        ({"quantization_config": "fp8"}, "quantization_config 'fp8', which is no mapping"),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn', which is no mapping"),
        ({"num_experts": 4, "moe_intermediate_size": [64, 32, 64, 64]}, "moe_intermediate_size [64, 32, 64, 64]"),
        ({"num_experts": 4, "moe_intermediate_size": 64}, "num_experts_per_tok"),
        ({"head_dim": "sixty-four"}, "head_dim"),
        ({"layer_types": 7}, "layer_types 7, which is no list"),
        # Sizes that no model has: their products leave the range of floats.
        ({"hidden_size": 10**308}, "hidden"),
        ({"intermediate_size": 10**400}, "dense_intermediate"),
        ({"intermediate_size": 10**22}, "dense_intermediate"),
        ({"vocab_size": 10**20}, "vocab x hidden"),
        ({"head_dim": 10**12}, "head_dim"),
        ({"max_position_embeddings": 10**12}, "max_context"),
    ],
)
def test_a_config_without_what_every_shape_has(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    """The model can still be served; what depends on its shape is unknown, with the reason."""
    model = folder(tmp_path / "model", {**LLAMA, **change})
    assert resolve_model(model).shape is None
    assert part in why_no_shape(model)


class TestWhere:
    """A folder, the Hugging Face cache, the hub."""

    @pytest.fixture
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        return tmp_path / "home" / "hub"

    def cached(self, hub: Path, model: str, config: dict[str, Any]) -> None:
        place = hub / f"models--{model.replace('/', '--')}"
        folder(place / "snapshots" / "abc", config)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("abc")

    def test_of_the_cache(self, hub: Path) -> None:
        self.cached(hub, "org/small", LLAMA)
        found, source = resolve_model("org/small")
        assert found is not None and (found.name, found.layers, source) == ("org/small", 4, "org/small")

    def test_an_id_that_is_nowhere(self, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve_model("org/nowhere") == (None, "org/nowhere")
        assert "config.json" in why_no_shape("org/nowhere")
        with pytest.raises(UsageError, match="org/nowhere"):
            require_shape("org/nowhere")

    def test_of_the_hub(self, hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The hub is asked for the two small files, and its answer is read as a folder's."""
        huggingface_hub = pytest.importorskip("huggingface_hub")
        fetched = []

        def download(model: str, name: str, **_: object) -> str:
            fetched.append((model, name))
            return str(Path(folder(tmp_path / "downloaded", LLAMA)) / name)

        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(model_files, "_why_unreached", lambda _: "")
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        found = resolve_model("org/on-the-hub").shape
        assert found is not None and found.layers == 4
        assert fetched == [("org/on-the-hub", "config.json"), ("org/on-the-hub", "hf_quant_config.json")]

    def test_a_hub_that_is_not_reached(self, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """At once: what huggingface_hub would try again for half a minute is not begun."""
        huggingface_hub = pytest.importorskip("huggingface_hub")
        downloads: list[object] = []
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *words, **_: downloads.append(words))
        assert resolve_model("org/unreached").shape is None
        assert "not reached" in why_no_shape("org/unreached") and downloads == []


class TestMatched:
    """Measured facts of a model of configs/models/ are another's with the same architecture and numbers."""

    def config_of(self, name: str) -> dict[str, Any]:
        known = load_model(name)
        assert known is not None
        return dict(known.config)

    def test_by_numbers_whatever_the_name(self, tmp_path: Path) -> None:
        known = load_model("deepseek-v3")
        found, source = resolve_model(folder(tmp_path / "anything", self.config_of("deepseek-v3")))
        assert known is not None and found is not None
        assert found.engine_kwargs == known.engine_kwargs != {}
        assert (found.name, source) == ("anything", str(tmp_path / "anything"))

    def test_another_number_or_architecture_is_another_model(self, tmp_path: Path) -> None:
        config = self.config_of("deepseek-v3")
        for number, change in enumerate([{"num_hidden_layers": 60}, {"architectures": ["OtherForCausalLM"]}]):
            found = resolve_model(folder(tmp_path / f"deepseek-v3-{number}", {**config, **change})).shape
            assert found is not None and found.engine_kwargs == {}

    def test_what_was_measured_with_other_weights_is_left_out(self, tmp_path: Path) -> None:
        known = load_model("gpt-oss-120b")
        assert known is not None and known.engine_kwargs_by_tp
        config = self.config_of("gpt-oss-120b")
        same = resolve_model(folder(tmp_path / "same", config)).shape
        wide = resolve_model(folder(tmp_path / "wide", {**config, "quantization_config": None})).shape
        assert same is not None and same.engine_kwargs_by_tp == known.engine_kwargs_by_tp
        assert wide is not None and wide.engine_kwargs_by_tp == {} and wide.engine_kwargs == known.engine_kwargs

    def test_ids_of_the_same_numbers_keep_their_own_weights(self) -> None:
        found, source = resolve_model("deepseek-ai/DeepSeek-R1-0528")
        assert found is not None and found.name == source == "deepseek-ai/DeepSeek-R1-0528"
        assert found.layers == 61


# Billions of parameters as the models' own pages give them.
PUBLISHED = {
    "MiniMaxAI/MiniMax-M2.5": 230, "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3-235B-A22B-FP8": 235, "Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-32B-FP8": 32.8,
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": 32.8, "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480,
    "Qwen/Qwen3.5-397B-A17B": 397, "XiaomiMiMo/MiMo-V2-Flash": 309, "deepseek-ai/DeepSeek-R1": 671,
    "deepseek-ai/DeepSeek-V3": 671, "deepseek-ai/DeepSeek-V3.2": 671, "deepseek-ai/DeepSeek-V4-Flash": 284,
    "deepseek-ai/DeepSeek-V4-Pro": 1600, "google/gemma-4-26B-A4B": 25.2,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400, "meta-llama/Llama-4-Scout-17B-16E-Instruct": 109,
    "meta-llama/Meta-Llama-3.1-405B": 405, "meta-llama/Meta-Llama-3.1-70B": 70.6,
    "meta-llama/Meta-Llama-3.1-8B": 8.03, "mistralai/Mixtral-8x7B-v0.1": 46.7, "moonshotai/Kimi-K2-Instruct": 1040,
    "nvidia/DeepSeek-V3.1-NVFP4": 671, "nvidia/Llama-3.1-70B-Instruct-FP8": 70.6,
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": 49.9, "nvidia/Nemotron-H-56B-Base-8K": 56,
    "nvidia/Qwen3-235B-A22B-NVFP4": 235, "openai/gpt-oss-120b": 117, "openai/gpt-oss-20b": 20.9,
    "zai-org/GLM-5": 744, "zai-org/GLM-5-FP8": 744,
}  # fmt: skip


@pytest.mark.skipif("PDLAB_HF_CONFIGS" not in os.environ, reason="no folder of real config.json files")
@pytest.mark.parametrize("model", sorted(PUBLISHED))
def test_within_three_per_cent_of_what_is_published(model: str) -> None:
    path = Path(os.environ["PDLAB_HF_CONFIGS"]) / f"{model.replace('/', '--')}_config.json"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    assert parameters(shape(json.loads(path.read_text()))) / 1e9 == pytest.approx(PUBLISHED[model], rel=0.03)


def test_catalogue_sizes() -> None:
    """The keys in configs/models/ give the published sizes; gpt-oss-120b has 65 GB on disk."""
    for name, billions in (("gpt-oss-120b", 117), ("gpt-oss-20b", 20.9), ("deepseek-v3", 671)):
        known = load_model(name)
        assert known is not None and parameters(known) / 1e9 == pytest.approx(billions, rel=0.01)
    known = load_model("gpt-oss-120b")
    assert known is not None
    assert (expert_bytes(known) + dense_bytes(known, with_embedding=True)) / 1e9 == pytest.approx(65, rel=0.02)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("org--Model-8B-NVFP4", {}, "NVFP4"),
        ("org--Model-8B-FP8-Static-PerTensor", {}, "FP8"),
        ("org--Model-8B-GPTQ-Int4", {"torch_dtype": "float16"}, "GPTQ INT4"),
        ("org--Model-8B-FP8", {"quantization_config": {"quant_method": "fp8"}}, None),
        ("org--Model-8B", {}, None),
        ("org--Wafp8er-8B", {}, None),
    ],
)
def test_a_format_that_only_the_name_has_is_a_note(
    name: str, changes: dict[str, Any], named: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}_config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    shape = require_shape(str(path))
    findings = [each for each in step_findings(load_hardware("h100-vllm-0.11"), shape) if "name" in each.code]
    models.main(["--model", str(path)])
    notes = [each.text for each in findings], capsys.readouterr().err.splitlines()
    assert [len(each) for each in notes] == [named is not None] * 2
    for (text,) in notes if named else ():
        assert f"has {named}, and its config.json has weights of" in text and "hf_quant_config.json" in text


def test_a_name_is_not_doubted_where_modelopt_has_the_format(tmp_path: Path) -> None:
    folder = tmp_path / "Model-8B-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert format_only_in_name(require_shape(str(folder)))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert format_only_in_name(require_shape(str(folder))) == ""


def test_a_name_is_not_doubted_where_the_weights_are_unknown(tmp_path: Path) -> None:
    """The file has a quantization_config, which pdlab does not know."""
    config = {**LLAMA, "quantization_config": {"quant_method": "quark"}}
    found = resolve_model(folder(tmp_path / "Model-8B-FP8", config)).shape
    assert found is not None and found.weights_unknown == ("quantisation quark",)
    assert format_only_in_name(found) == ""
