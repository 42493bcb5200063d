"""Bytes and parameters of a model, from its shape alone."""

from __future__ import annotations

from pdlab.core.catalog import BYTES_PER_VALUE, ModelShape

# In a model with experts these formats hold the experts alone: gpt-oss in mxfp4, DeepSeek in nvfp4.
EXPERTS_ALONE = {"mxfp4", "nvfp4", "fp4"}


def expert_bytes(shape: ModelShape) -> float:
    """All routed experts: layers x experts x 3 matrices of hidden x intermediate."""
    inner = shape.expert_intermediate or shape.hidden
    return (
        (shape.layers - shape.dense_layers)
        * shape.experts
        * 3
        * shape.hidden
        * inner
        * BYTES_PER_VALUE[shape.weight_dtype]
    )


def dense_bytes(shape: ModelShape, *, with_embedding: bool) -> float:
    """Attention, dense and shared feed-forward layers and output head; the embedding is stored, not read."""
    wide = "bfloat16" if shape.experts > 1 and shape.weight_dtype in EXPERTS_ALONE else shape.weight_dtype
    head = shape.vocab * shape.hidden * BYTES_PER_VALUE["bfloat16"]
    return dense_parameters(shape) * BYTES_PER_VALUE[wide] + head * (2 if with_embedding else 1)


def dense_parameters(shape: ModelShape) -> float:
    if shape.kv_latent:
        # Multi-head latent attention, as published for DeepSeek-V3: down and up projections of q (rank 1536)
        # and kv, output.
        q = 1536 * (shape.hidden + shape.heads * (shape.head_dim + 64))
        kv = shape.hidden * shape.kv_latent + (shape.kv_latent - 64) * shape.heads * 2 * shape.head_dim
        attention = q + kv + shape.heads * shape.head_dim * shape.hidden
    else:
        attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    inner = shape.expert_intermediate or shape.hidden
    shared = (shape.layers - shape.dense_layers) * shape.shared_experts * 3 * shape.hidden * inner
    dense = shape.dense_layers * 3 * shape.hidden * (shape.dense_intermediate or 0)
    return shape.layers * attention + shared + dense


def full_layers(shape: ModelShape) -> int:
    """Layers whose attention sees the whole context."""
    return shape.layers if shape.full_attention_layers is None else shape.full_attention_layers


def kv_bytes_per_token_layer(shape: ModelShape) -> float:
    """K and V of one token in one layer (the latent vector alone where the model has one)."""
    values = shape.kv_latent or 2 * shape.kv_heads * shape.head_dim
    return values * BYTES_PER_VALUE[shape.kv_dtype]


def kv_bytes(shape: ModelShape, tokens: float, *, hybrid: bool) -> float:
    """KV cache of one sequence of ``tokens``: every layer, or with ``hybrid`` the window of windowed layers."""
    windowed_layers = shape.layers - full_layers(shape)
    windowed_tokens = min(tokens, shape.sliding_window) if hybrid and shape.sliding_window else tokens
    return kv_bytes_per_token_layer(shape) * (full_layers(shape) * tokens + windowed_layers * windowed_tokens)


def kv_copies(shape: ModelShape, tp: int) -> float:
    """Copies of one token's KV cache in a TP group: heads are copied if TP exceeds their number, a latent vector
    is on every GPU."""
    return float(tp) if shape.kv_latent else max(1.0, tp / shape.kv_heads)
