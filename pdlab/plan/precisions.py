"""The words that people write for the number format of weights and KV cache."""

from __future__ import annotations

# dtype in a model's file -> other words for it.
PRECISIONS = {
    "mxfp4": {"fp4", "w4a16", "w4a8"},
    "nvfp4": {"fp4"},
    "fp4": {"nvfp4", "mxfp4"},
    "int4": {"w4a16", "awq", "gptq"},
    "awq": {"int4", "w4a16"},
    "gptq": {"int4", "w4a16"},
    "fp8": {"fp8_e4m3", "e4m3", "w8a8"},
    "bfloat16": {"bf16"},
    "float16": {"fp16"},
    "float32": {"fp32"},
}


def is_precision(word: str, dtype: str) -> bool:
    """Whether people write that word for the dtype."""
    return word.lower() in {dtype, *PRECISIONS.get(dtype, ())}
