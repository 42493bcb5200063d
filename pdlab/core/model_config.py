"""Computes the fields of a `pdlab.core.catalog.ModelShape` from the config.json of a Hugging Face model. Pure.

The keys are the keys that vLLM reads (vllm/config/model.py, vllm/transformers_utils). A shape cannot describe a KV
cache that is not K and V of equal layers: ``kv_unknown`` names such parts of a model. ``weights_unknown`` names the
parts whose number of parameters or dtype is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

Config = Mapping[str, Any]

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk",
                     "moe_top_k", "moe_k")  # fmt: skip
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
VOCAB = ("vocab_size", "padded_vocab_size")
HEAD_DIM = ("head_dim", "attention_head_dim", "hidden_size_per_head")
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups",
            "kv_n_heads")  # fmt: skip
WIDTH = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "ff_intermediate_size")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation", "ffn_act_fn")
MAMBA = ("mamba_d_state", "ssm_cfg", "state_size", "attn_layer_period", "mamba_n_heads", "mamba_num_heads")
MOST_LAYERS = 100_000  # more than any model has, few enough to go through them
# vLLM takes the smallest of these, and model_max_length before all of them.
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
           "max_sequence_length", "max_seq_length", "seq_len")  # fmt: skip
# The config.json of these models may lack layer_types. One of this many layers has full attention.
FULL_EVERY = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6, "cohere2": 4}
# Feed-forward blocks of these types have two matrices: no gate.
UNGATED = ("RefinedWeb", "RefinedWebModel", "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode",
           "gpt_neo", "gpt_neox", "gptj", "jais", "jais2", "mpt", "nanochat", "nemotron", "opt", "persimmon", "phi",
           "starcoder2")  # fmt: skip
# Those of types that begin so have a gate, whatever their activation is.
GATED = ("afmoe", "aquila", "aria", "axk", "baichuan", "bailing", "bitnet", "chatglm", "cohere", "cwm", "dbrx",
         "deepseek", "diffllama", "dots", "emu3", "ernie4", "exaone", "falcon_h1", "flex_olmo", "gemma", "glm",
         "gpt_oss", "granite", "grok", "helium", "hunyuan", "hy_v", "hyperclovax", "internlm", "jamba", "kimi",
         "laguna", "lfm", "llama", "longcat", "mellum", "mimo", "minicpm", "minimax", "ministral", "mistral", "mixtral",
         "mllama", "nemotron-nas", "olmo", "orion", "pangu", "phi3", "phi4", "phimoe", "plamo", "qwen", "seed_oss",
         "smollm", "solar", "stablelm", "step", "telechat", "vaultgemma", "xverse", "youtu", "zamba")  # fmt: skip
# Without a key for it, the inner width of these types is four times the outer one.
FOUR_TIMES = ("RefinedWeb", "RefinedWebModel", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj",
              "jais", "mpt")  # fmt: skip
# Without a key for it, the output head of these types is the embedding.
TIED = ("RefinedWeb", "RefinedWebModel", "bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "gpt2",
        "gpt_bigcode", "gpt_neo", "lfm2", "lfm2_moe", "minicpm", "minicpm3", "mpt", "opt", "recurrent_gemma", "smollm3",
        "starcoder2", "vaultgemma", "youtu", "zamba", "zamba2")  # fmt: skip
# vLLM keeps the latent vector of these types. It keeps K and V of every head of minicpm3, and of other types as well.
LATENT = ("axk1", "bailing_hybrid", "deepseek_mtp", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
          "dots3_note", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_k2", "kimi_linear", "longcat_flash",
          "longcat_flash_ngram", "pangu_ultra_moe")  # fmt: skip
TWO_ATTENTIONS = ("longcat_flash", "longcat_flash_ngram")  # and two dense blocks, in each layer with experts
# The config.json of these types lacks what is as in transformers' class of the type.
DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}  # fmt: skip
WHOLE_NUMBERS = {
    *EXPERTS, *EXPERTS_PER_TOKEN, *EXPERT_WIDTH, *SHARED_EXPERTS, *SHARED_WIDTH, *LAYERS, *HIDDEN, *HEADS, *VOCAB,
    *HEAD_DIM, *KV_HEADS, *WIDTH, *CONTEXT, "model_max_length", "sliding_window", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace", "moe_layer_interval",
    "full_attention_interval",
}  # fmt: skip
QUANTIZATION = ("quantization_config", "compression_config")  # of the language model, or beside it
MAPPINGS = {"rope_scaling", "rope_parameters", *QUANTIZATION, "ffn_config", "attn_config", "attention_other_setting"}
LISTS = {"layer_types", "mlp_layer_types", "block_configs", "hybrid_layer_pattern", "no_rope_layers", "mlp_only_layers",
         "moe_layers", "attn_type_list", "compress_ratios"}  # fmt: skip
ENCODERS = ("vision_config", "audio_config", "vision_tower_config", "visual", "audio_encoder_config", "encoder_config")
# vLLM leaves max_position_embeddings as it is for these kinds of rope scaling.
ROPE_WITHOUT_FACTOR = ("su", "longrope", "llama3", "mrope", "default", "proportional")
# From quant_method to the dtype, for formats that have one dtype for all weights.
PLAIN_METHODS = {"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4"}
ALGORITHMS = {"NVFP4": "nvfp4", "FP8": "fp8", "MXFP4": "mxfp4", "W4A16_AWQ": "awq", "W4A8_AWQ": "awq", "INT4": "int4"}
IGNORED = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
ATTENTION = ("self_attn.o_proj",)
FEED_FORWARD = ("mlp.gate_proj", "mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj")
ROUTED = ("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1", "feed_forward.experts.gate_up_proj")


def shape_fields(config: Config, modelopt: Config | None = None) -> dict[str, Any]:
    """The fields of a shape, except its name and source. ``modelopt``: the content of hf_quant_config.json.

    Raises ValueError for a config.json that lacks a key of every shape or has a wrong value there.
    """
    config = _checked(config)
    text = _text(config)
    kind = _kind(text)
    architectures = config.get("architectures") or text.get("architectures")
    fields = {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "layers": _first(text, *LAYERS),
        "hidden": _first(text, *HIDDEN),
        "heads": _first(text, *HEADS),
        "vocab": _first(text, *VOCAB) or _first(config, *VOCAB),
        "max_context": _context(text),
    }
    if kind in TWO_ATTENTIONS and text.get("num_layers"):
        fields["layers"] = 2 * text["num_layers"]
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise ValueError(f"has no {', '.join(missing)} of the model")
    for name in ("layers", "hidden", "heads", "vocab", "max_context"):
        if type(fields[name]) is not int or fields[name] < 1:
            raise ValueError(f"has {name} {fields[name]!r}, which is no whole number above 0")
    if fields["layers"] > MOST_LAYERS:
        raise ValueError(f"has layers {fields['layers']}, more than {MOST_LAYERS}")
    tied = _first(text, "tie_word_embeddings")
    tied = config.get("tie_word_embeddings") if tied is None else tied
    fields["tied_embeddings"] = kind.startswith("gemma") or kind in TIED if tied is None else bool(tied)
    fields["not_counted"] = tuple(key for key in ENCODERS if config.get(key))
    for part in (_attention, _feed_forward, _windows, _special):
        found = part(text, fields)
        for name in ("kv_unknown", "weights_unknown"):
            found[name] = (*fields.get(name, ()), *found.get(name, ()))
        found["other_parameters"] = fields.get("other_parameters", 0) + found.get("other_parameters", 0)
        fields |= found
    return fields | _dtypes(config, text, modelopt, fields)


def _checked(config: Config) -> Config:
    """The config.json with checked values of the keys that are read. Raises ValueError."""
    part = next((key for key in TEXT_CONFIGS if isinstance(config.get(key), dict)), None)
    if part is None:
        return _checked_values(config)
    text = _checked_values(config[part])
    beside = (*QUANTIZATION, *(VOCAB if _first(text, *VOCAB) is None else ()))
    return {**config, **_checked_values({key: config[key] for key in beside if key in config}), part: text}


def _checked_values(config: Config) -> Config:
    """With whole numbers as int, and a list of equal numbers, one for each layer, as one. Raises ValueError."""
    checked: dict[str, Any] = {}
    for key, value in config.items():
        if key in WHOLE_NUMBERS and isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise ValueError(f"has {key} {_short(value)}, which is not the same in every layer")
            value = value[0]
        if key in WHOLE_NUMBERS and isinstance(value, float) and value.is_integer():
            value = int(value)
        if key == "sliding_window" and value is False:
            value = None
        wrong = (
            "no whole number" if key in WHOLE_NUMBERS and value is not None and type(value) is not int
            else "no mapping" if key in MAPPINGS and not isinstance(value, dict | None)
            else "no list" if key in LISTS and not isinstance(value, list | None)
            else ""
        )  # fmt: skip
        if wrong:
            raise ValueError(f"has {key} {_short(value)}, which is {wrong}: correct it")
        checked[key] = value
    return checked


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:60]}..."


def _text(config: Config) -> Config:
    """The part about the language model, with what its type has by default, and with dbrx's inner parts."""
    text: Config = next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), dict)), config)
    known = {key: value for key, value in text.items() if value is not None}
    inner = (text.get("ffn_config") or {}) | (text.get("attn_config") or {})
    names = ("ffn_hidden_size", "moe_num_experts", "moe_top_k", "kv_n_heads")
    return {
        **DEFAULTS.get(_kind(text), {}),
        **_checked_values({key: inner[key] for key in names if key in inner}),
        **known,
    }


def _kind(text: Config) -> str:
    """The model type; empty: there is none."""
    return str(text.get("model_type") or "")


def _first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _context(text: Config) -> Any:
    """The longest context in tokens by the rule of vLLM: rope scaling multiplies the trained context."""
    lengths = [text[key] for key in CONTEXT if text.get(key) is not None]
    length = text.get("model_max_length") or min(lengths, default=None)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if length is None or "gemma3" in _kind(text):  # the context of Gemma 3 has the factor in it
        return length
    of_types = [each for each in rope.values() if isinstance(each, dict)]
    context = length
    for scaling in of_types or [rope]:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        factor = scaling.get("factor")
        if not isinstance(factor, int | float) or kind in ROPE_WITHOUT_FACTOR:
            continue
        trained = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
        context = (trained or length) * factor
    return int(context) if math.isfinite(context) else context


def _attention(text: Config, fields: Config) -> dict[str, Any]:
    layers, hidden, heads = fields["layers"], fields["hidden"], fields["heads"]
    head_dim = _first(text, *HEAD_DIM) or hidden // heads
    kv_heads = _kv_heads(text, heads)
    if kv_heads < 1:
        raise ValueError(f"has {kv_heads} KV heads (num_key_value_heads), fewer than 1: correct it")
    latent, value_dim = text.get("kv_lora_rank"), text.get("v_head_dim")
    if not latent:
        return {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    rope, no_rope = text.get("qk_rope_head_dim") or 0, _first(text, "qk_nope_head_dim") or head_dim
    q_latent = text.get("q_lora_rank") or 0
    if _kind(text) == "minicpm3":
        # vLLM computes K and V of every head, and pads V to the width of K.
        wide, value_dim = heads * (no_rope + rope), value_dim or hidden // heads
        q = q_latent * (hidden + wide) if q_latent else hidden * wide
        kv = hidden * (latent + rope) + latent * heads * (no_rope + value_dim)
        return {
            "kv_heads": heads,
            "head_dim": no_rope + rope,
            "value_dim": None,
            "attention_layers": 0,
            "other_parameters": layers * (q + kv + heads * value_dim * hidden),
        }
    unknown = {} if _kind(text) in LATENT else {"kv_unknown": (f"latent attention of type {_kind(text) or 'unknown'}",)}
    return {
        **unknown,
        "kv_heads": kv_heads,
        "head_dim": no_rope,
        "value_dim": value_dim,
        "kv_latent": latent + rope,
        "rope_dim": rope,
        "q_latent": q_latent,
    }


def _kv_heads(text: Config, heads: int) -> int:
    """The KV heads of a layer by the rules of vLLM."""
    falcon = _kind(text) in ("falcon", "RefinedWeb", "RefinedWebModel")
    if text.get("multi_query") and falcon and not text.get("new_decoder_architecture"):
        return 1
    names = [name for name in KV_HEADS if name != "multi_query_group_num" or text.get("multi_query_attention", True)]
    found = _first(text, *names)
    if found is not None:
        return int(found)
    return 1 if text.get("multi_query") and not falcon else heads


def _matrices_of_a_block(text: Config) -> int | None:
    """The matrices of a feed-forward block: 3 with a gate, 2 without; None: unknown."""
    kind, activation = _kind(text), str(_first(text, *ACTIVATION) or "").lower()
    if "glu" in activation:
        return 3
    if kind in UNGATED:
        return 2
    # A type that is not known here has a gate if its activation is the one of SwiGLU.
    return 3 if kind.startswith(GATED) or activation in ("silu", "swish") else None


def _feed_forward(text: Config, fields: Config) -> dict[str, Any]:
    layers, hidden, kind = fields["layers"], fields["hidden"], _kind(text)
    experts = _first(text, *EXPERTS) or 1
    width = _first(text, *WIDTH)
    if width is None and kind in FOUR_TIMES:
        width = int((text.get("expansion_ratio") or 4) * hidden)
    if kind == "qwen" and width is not None:
        width //= 2  # the gate and the other matrix together have intermediate_size
    matrices = _matrices_of_a_block(text)
    known = {"feed_forward_matrices": matrices or 3, "dense_intermediate": width}
    unknown = [] if matrices else [f"feed-forward blocks of type {kind or 'unknown'}"]
    if _first(text, "hybrid_override_pattern", "block_configs"):
        unknown = []  # each layer has its own block
    elif width is None and experts == 1:
        unknown.append("feed-forward width")
    if experts == 1 or text.get("use_moe") is False:
        return {**known, "experts": 1, "experts_per_token": 1, "dense_layers": layers, "weights_unknown": unknown}
    inner, per_token = _first(text, *EXPERT_WIDTH), _first(text, *EXPERTS_PER_TOKEN)
    if per_token is None:
        raise ValueError(f"has {experts} experts and no number of them per token (num_experts_per_tok): add it")
    shared: float = _first(text, *SHARED_EXPERTS) or 0
    shared = shared or (_first(text, *SHARED_WIDTH) or 0) / (inner or 1)
    if kind.startswith("llama4"):
        shared = 1  # a shared expert is as wide as a routed expert
    if text.get("enable_moe_block"):
        shared = text["intermediate_size"] / inner  # gemma4: each layer has a dense block too
    dense_layers = layers // 2 if kind in TWO_ATTENTIONS else layers - _expert_layers(text, layers)
    if inner is None or (dense_layers and width is None):
        unknown.append("feed-forward width")
    return {
        **known,
        "experts": experts,
        "experts_per_token": per_token,
        "expert_intermediate": inner,
        "shared_experts": shared,
        "dense_layers": dense_layers,
        "other_parameters": layers // 2 * 3 * hidden * (width or 0) if kind in TWO_ATTENTIONS else 0,
        "weights_unknown": unknown,
    }


def _expert_layers(text: Config, layers: int) -> int:
    """The number of layers with experts."""
    numbers = range(layers)
    frequency = text.get("moe_layer_freq")
    kinds = text.get("mlp_layer_types")
    if isinstance(frequency, list):
        return sum(map(bool, frequency))
    if isinstance(kinds, list):
        return sum(kind != "dense" for kind in kinds)
    if isinstance(text.get("moe_layers"), list):
        return len(text["moe_layers"])
    if isinstance(text.get("moe_layers_enum"), str):
        return len(set(map(int, re.findall(r"\d+", text["moe_layers_enum"]))) & set(numbers))
    if any(text.get(f"moe_layer_{key}") is not None for key in ("start_index", "end_index", "interval")):
        first, last = text.get("moe_layer_start_index") or 0, text.get("moe_layer_end_index")
        last, every = layers - 1 if last is None else last, text.get("moe_layer_interval") or 1
        return sum(first <= i <= last and (i + 1) % every == 0 for i in numbers)
    if step := text.get("interleave_moe_layer_step"):
        return len(range(step - 1, layers, step))
    start, every = text.get("first_k_dense_replace") or 0, frequency or 1
    dense, step = text.get("mlp_only_layers") or [], text.get("decoder_sparse_step") or 1
    return sum(i >= start and i % every == 0 and i not in dense and (i + 1) % step == 0 for i in numbers)


def _windows(text: Config, fields: Config) -> dict[str, Any]:
    """The window in tokens and the number of layers without a window.

    A window is a sliding window or a chunk of Llama 4. vLLM keeps as much KV cache for both.
    """
    layers = fields["layers"]
    if chunk := text.get("attention_chunk_size") if str(text.get("model_type")).startswith("llama4") else None:
        rope: Sequence[int] = text.get("no_rope_layers") or [(i + 1) % 4 for i in range(layers)]
        return {"sliding_window": chunk, "full_attention_layers": sum(not each for each in rope)}
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return {}
    kinds, pattern = text.get("layer_types"), text.get("hybrid_layer_pattern")
    every = text.get("sliding_window_pattern") or FULL_EVERY.get(_kind(text))
    if isinstance(kinds, list):
        full = sum(kind != "sliding_attention" for kind in kinds[:layers])
    elif isinstance(pattern, list):
        full = sum(not each for each in pattern)
    elif isinstance(every, str) and every:
        full = sum(every[i % len(every)] == "G" for i in range(layers))  # such as LLLG: three local, one global
    else:
        full = layers // every if isinstance(every, int) else 0
    return {"sliding_window": window, "full_attention_layers": full} if full < layers else {}


def _matrices(hidden: int, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """The parameters of the q, k, v and output projections of one layer."""
    return hidden * (heads * head_dim + kv_heads * head_dim + kv_heads * value_dim + heads * value_dim)


def _special(text: Config, fields: Config) -> dict[str, Any]:
    """The fields for parts of the model that a shape cannot describe. They include the parameters of the parts."""
    layers, hidden, heads = fields["layers"], fields["hidden"], fields["heads"]
    kinds: list[Any] = (text.get("layer_types") or [])[:layers]
    if text.get("hybrid_override_pattern"):
        return _nemotron_h(text, fields)
    if any(key in text for key in MAMBA):
        return _unknown("Mamba layers", weights=True)
    if text.get("block_configs"):
        return _blocks(text, fields)
    if text.get("compress_ratios"):
        q_latent, o_latent, groups = (text.get(key) or 0 for key in ("q_lora_rank", "o_lora_rank", "o_groups"))
        wide = heads * fields["head_dim"]
        q = hidden * q_latent + q_latent * wide
        kv_and_out = hidden * fields["head_dim"] + wide * o_latent + groups * o_latent * hidden
        return {**_unknown("compressed attention"), "attention_layers": 0,
                "other_parameters": layers * (q + kv_and_out)}  # fmt: skip
    if text.get("index_topk"):
        queries = (text.get("q_lora_rank") or hidden) * text["index_n_heads"] * text["index_head_dim"]
        index = queries + hidden * (text["index_head_dim"] + text["index_n_heads"])
        return {**_unknown("sparse-attention indexer"), "other_parameters": layers * index}
    if "linear_attention" in kinds or any(
        text.get(key) for key in ("full_attention_interval", "linear_attn_config", "attn_type_list", "layer_group_size")
    ):
        return _linear_attention(text, fields, kinds)
    if _first(text, "global_head_dim", "num_global_key_value_heads"):
        full = fields.get("full_attention_layers", 0)
        wide = text.get("global_head_dim") or fields["head_dim"]
        kv_heads = text.get("num_global_key_value_heads") or fields["kv_heads"]
        # With attention_k_eq_v one projection gives K and V.
        values = 0 if text.get("attention_k_eq_v") else kv_heads * wide
        matrices = hidden * (2 * heads * wide + kv_heads * wide + values)
        return {**_unknown("per-layer shapes"), "attention_layers": layers - full, "other_parameters": full * matrices}
    if text.get("swa_num_key_value_heads") not in (None, fields["kv_heads"]):
        full = fields.get("full_attention_layers", 0)
        swa_dims = text.get("swa_head_dim") or fields["head_dim"], text.get("swa_v_head_dim") or fields["head_dim"]
        swa_heads = text.get("swa_num_attention_heads") or heads, text["swa_num_key_value_heads"]
        return {**_unknown("per-layer shapes"), "attention_layers": full,
                "other_parameters": (layers - full) * _matrices(hidden, *swa_heads, *swa_dims)}  # fmt: skip
    if text.get("num_kv_shared_layers") or text.get("hidden_size_per_layer_input"):
        return _unknown("layers that share KV cache", weights=bool(text.get("hidden_size_per_layer_input")))
    if text.get("use_cla"):
        return _unknown("layers that share KV cache", weights=True)
    if text.get("share_q_dim"):
        return {"weights_unknown": ("queries of a lower rank",)}
    if other := text.get("attention_other_setting"):
        more = (other.get("num_attention_heads") or heads) - heads
        of_layers = kinds.count(other.get("attention_type"))
        same = _first(other, "num_attention_groups") in (None, fields["kv_heads"])
        if not same or _first(other, "head_dim") not in (None, fields["head_dim"]) or more < 0:
            return _unknown("per-layer shapes", weights=True)
        return {"other_parameters": of_layers * 2 * more * fields["head_dim"] * hidden}
    if text.get("is_encoder_decoder"):
        return _unknown("an encoder beside the decoder", weights=True)
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention", "chunked_attention"})
    return _unknown(f"layers of type {', '.join(others)}", weights=True) if others else {}


def _unknown(what: str, *, weights: bool = False) -> dict[str, Any]:
    return {"kv_unknown": (what,), "weights_unknown": (what,) if weights else ()}


def _nemotron_h(text: Config, fields: Config) -> dict[str, Any]:
    """Nemotron-H. In the pattern a letter is a layer: M Mamba 2, * attention, - a feed-forward block (2 matrices)."""
    pattern, hidden = text["hybrid_override_pattern"], fields["hidden"]
    named = _unknown("Mamba layers", weights=bool(set(pattern) - {"M", "*", "-"}))
    state, groups, heads = (text.get(key) or 0 for key in ("ssm_state_size", "n_groups", "mamba_num_heads"))
    inner = heads * (text.get("mamba_head_dim") or 0)
    mamba = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    block = 2 * hidden * (text.get("intermediate_size") or 0)
    other = pattern.count("M") * mamba + pattern.count("-") * block
    return {**named, "attention_layers": pattern.count("*"), "dense_intermediate": None, "other_parameters": other}


def _blocks(text: Config, fields: Config) -> dict[str, Any]:
    """A model from an architecture search. In ``block_configs`` each layer has its own attention and width, or none."""
    hidden, heads, head_dim = fields["hidden"], fields["heads"], fields["head_dim"]
    attentions = [block["attention"] for block in text["block_configs"]]
    grouped = [each["n_heads_in_group"] for each in attentions if each.get("n_heads_in_group")]
    blocks = [block["ffn"] for block in text["block_configs"]]
    widths = [int(2 * each["ffn_mult"] * hidden / 3) for each in blocks if each.get("ffn_mult")]
    feed_forward = sum(3 * hidden * (-(-width // 256) * 256) for width in widths)
    attention = sum(_matrices(hidden, heads, heads // group, head_dim, head_dim) for group in grouped)
    linear = any(each.get("replace_with_linear") for each in (*attentions, *blocks))
    return {
        **_unknown("per-layer shapes", weights=linear),
        "kv_heads": heads // grouped[0] if grouped else heads,
        "attention_layers": 0,
        "dense_intermediate": None,
        "other_parameters": attention + feed_forward,
    }


def _linear_attention(text: Config, fields: Config, kinds: Sequence[Any]) -> dict[str, Any]:
    layers, hidden = fields["layers"], fields["hidden"]
    every = text.get("full_attention_interval")
    linear = kinds.count("linear_attention") if kinds else layers - layers // every if every else layers
    if not text.get("linear_num_value_heads"):
        return _unknown("linear-attention state", weights=True)
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    layer = hidden * (2 * keys + 2 * values + 2 * text["linear_num_value_heads"]) + values * hidden
    gated = text.get("attn_output_gate", True)
    gate = (layers - linear) * hidden * fields["heads"] * fields["head_dim"] if gated else 0
    return {
        **_unknown("linear-attention state"),
        "attention_layers": layers - linear,
        "other_parameters": linear * layer + gate,
    }


def _dtypes(config: Config, text: Config, modelopt: Config | None, fields: Config) -> dict[str, Any]:
    """The dtypes of attention, of feed-forward blocks, of the KV cache, and of the experts.

    ``weight_dtype`` is the dtype of the experts. For a dense model it is the dtype of the feed-forward blocks.
    """
    plain = str(_first(text, "torch_dtype", "dtype") or _first(config, "torch_dtype", "dtype") or "bfloat16")
    # vLLM loads weights of 4 bytes as weights of 2 bytes.
    plain = "float16" if plain.removeprefix("torch.") in ("float16", "half") else "bfloat16"
    unquantised = {"weight_dtype": plain, "attention_dtype": plain, "feed_forward_dtype": plain, "kv_dtype": plain}
    found = [config.get("quantization_config"), text.get("quantization_config"), config.get("compression_config"),
             (modelopt or {}).get("quantization")]  # fmt: skip
    quantization = next((each for each in found if isinstance(each, dict) and each), None)
    if quantization is None:
        return unquantised
    layer = fields["layers"] // 2
    try:
        dtypes = {
            name: _dtype_of(quantization, [f"layers.{layer}.{module}" for module in modules]) or plain
            for name, modules in (("attention_dtype", ATTENTION), ("feed_forward_dtype", FEED_FORWARD),
                                  ("weight_dtype", ROUTED if fields["experts"] > 1 else FEED_FORWARD))
        }  # fmt: skip
    except ValueError as error:
        return {**unquantised, "weights_unknown": (*fields.get("weights_unknown", ()), str(error))}
    if text.get("expert_dtype") == "fp4":
        dtypes["weight_dtype"] = "mxfp4"  # DeepSeek-V4 has one byte of scale for 32 values
    scheme = quantization.get("kv_cache_scheme")
    eight_bits = isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    if eight_bits or str(quantization.get("kv_cache_quant_algo")).upper() == "FP8":
        dtypes["kv_dtype"] = "fp8"
    return {**unquantised, **dtypes}


def _dtype_of(quantization: Config, modules: Sequence[str]) -> str | None:
    """The dtype of the module that has one of the names ``modules``. None: the module is not quantised.

    Raises ValueError with the name of a quantisation that pdlab does not know.
    """
    names = [f"{prefix}{module}" for prefix in PREFIXES for module in modules]
    ignored: list[Any] = next((quantization[key] for key in IGNORED if quantization.get(key)), [])
    if any(_matches(str(pattern), name) for pattern in ignored for name in names):
        return None
    groups = quantization.get("config_groups")
    algorithm = quantization.get("quant_algo")
    method = str(quantization.get("quant_method") or "")
    if algorithm:
        name = str(algorithm).upper()
        dtype = ALGORITHMS.get(name) or next((ALGORITHMS[key] for key in ALGORITHMS if name.startswith(key)), None)
        if dtype is None:
            raise ValueError(f"quantisation {algorithm}")
        return dtype
    if isinstance(groups, dict):
        return _group_dtype(groups.values(), names)
    if method in PLAIN_METHODS:
        return PLAIN_METHODS[method]
    bits = _first(quantization, "bits", "w_bit") or (4 if quantization.get("load_in_4bit") else None)
    if method.startswith(("awq", "gptq")) and bits in (None, 4):
        return method[: 3 if method.startswith("awq") else 4]
    if bits in (4, 8) or quantization.get("load_in_8bit"):
        return "int4" if bits == 4 else "int8"
    raise ValueError(f"quantisation {method or 'of no known method'}")


def _group_dtype(groups: Any, names: Sequence[str]) -> str | None:
    """The dtype in the first group of compressed-tensors that has one of ``names`` as a target. None: no group has."""
    for group in groups:
        if not isinstance(group, dict):
            raise ValueError(f"quantisation compressed-tensors with the group {_short(group)}")
        targets = group.get("targets") or ["Linear"]
        if not any(target == "Linear" or _matches(str(target), name) for target in targets for name in names):
            continue
        weights = group.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (kind, bits) == ("float", 4):
            return "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
        dtype = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}.get((str(kind), int(bits or 0)))
        if dtype is None:
            raise ValueError(f"quantisation compressed-tensors with {bits} bits of type {kind}")
        return dtype
    return None


def _matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` of a list of modules means the module ``name``.

    A pattern is a name, a part of a name, a name with ``*``, or ``re:`` and a regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    if "*" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."
