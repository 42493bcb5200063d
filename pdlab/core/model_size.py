"""Bytes and parameters of a model, from its shape."""

from __future__ import annotations

from typing import NamedTuple

from pdlab.core.catalog import BYTES_PER_VALUE, ModelShape
from pdlab.core.errors import UsageError


def expert_parameters(shape: ModelShape) -> float:
    """All routed experts."""
    return routed_parameters(shape, shape.experts)


def routed_parameters(shape: ModelShape, experts: int) -> float:
    """``experts`` routed experts of every layer: layers x experts x matrices of hidden x intermediate."""
    inner = shape.expert_intermediate or shape.hidden
    return (shape.layers - shape.dense_layers) * experts * shape.feed_forward_matrices * shape.hidden * inner


def expert_bytes(shape: ModelShape) -> float:
    return expert_parameters(shape) * BYTES_PER_VALUE[shape.weight_dtype]


def dense_bytes(shape: ModelShape, *, with_embedding: bool) -> float:
    """Attention, dense and shared feed-forward layers and output head; the embedding is stored, not read."""
    head = shape.vocab * shape.hidden * BYTES_PER_VALUE["bfloat16"]
    matrices = attention_parameters(shape) * BYTES_PER_VALUE[shape.attention_dtype or shape.dense_dtype]
    matrices += feed_forward_parameters(shape) * BYTES_PER_VALUE[shape.feed_forward_dtype or shape.dense_dtype]
    return matrices + head * (2 if with_embedding and not shape.tied_embeddings else 1)


def attention_parameters(shape: ModelShape) -> float:
    value_dim = shape.value_dim or shape.head_dim
    if shape.kv_latent:
        # Multi-head latent attention: down and up projections of q and kv, output.
        wide = shape.heads * (shape.head_dim + shape.rope_dim)
        q = shape.q_latent * (shape.hidden + wide) if shape.q_latent else shape.hidden * wide
        up = (shape.kv_latent - shape.rope_dim) * shape.heads * (shape.head_dim + value_dim)
        attention = q + shape.hidden * shape.kv_latent + up + shape.heads * value_dim * shape.hidden
    else:
        attention = shape.hidden * (shape.head_dim + value_dim) * (shape.heads + shape.kv_heads)
    layers = shape.layers if shape.attention_layers is None else shape.attention_layers
    return layers * attention + shape.other_parameters


def feed_forward_parameters(shape: ModelShape) -> float:
    """Parameters of layers without experts, and of shared experts, which every token passes."""
    dense = shape.dense_layers * shape.feed_forward_matrices * shape.hidden * (shape.dense_intermediate or 0)
    return shape.shared_experts * routed_parameters(shape, 1) + dense


def dense_parameters(shape: ModelShape) -> float:
    return attention_parameters(shape) + feed_forward_parameters(shape)


def parameters(shape: ModelShape) -> float:
    """All parameters, with embedding and output head, without layers for multi-token prediction. Raises UsageError if
    the number is unknown."""
    if shape.weights_unknown:
        raise UsageError(f"{shape.name}: the parameters of {', '.join(shape.weights_unknown)} are not known")
    head = shape.vocab * shape.hidden
    return expert_parameters(shape) + dense_parameters(shape) + head * (1 if shape.tied_embeddings else 2)


def full_layers(shape: ModelShape) -> int:
    """The number of layers with attention over the whole context."""
    return shape.layers if shape.full_attention_layers is None else shape.full_attention_layers


def kv_bytes_per_token_layer(shape: ModelShape) -> float:
    """Bytes of K and V, or of the latent vector, of one token in one layer. Raises UsageError if the shape cannot
    describe the KV cache."""
    if shape.kv_unknown:
        raise UsageError(f"{shape.name}: the KV cache of {', '.join(shape.kv_unknown)} is not known")
    values = shape.kv_latent or shape.kv_heads * (shape.head_dim + (shape.value_dim or shape.head_dim))
    return values * BYTES_PER_VALUE[shape.kv_dtype]


CHECK_BLOCK_TOKENS = 16  # of a KV-transfer check without a model


class LatentCheck(NamedTuple):
    """Settings of a KV-transfer check that moves a latent KV cache as each rank reads it: whole, so at TP 1."""

    num_layers: int
    block_len_bytes: int

    def __str__(self) -> str:
        return f"--num-layers {self.num_layers} --block-len-bytes {self.block_len_bytes} --prefill-tp 1 --decode-tp 1"


def latent_check(shape: ModelShape) -> LatentCheck:
    """The check of a model with latent attention."""
    return LatentCheck(shape.layers, round(kv_bytes_per_token_layer(shape) * CHECK_BLOCK_TOKENS))


def kv_bytes(shape: ModelShape, tokens: float, *, hybrid: bool) -> float:
    """KV cache of one sequence of ``tokens``: every layer, or with ``hybrid`` the window of windowed layers."""
    windowed_layers = shape.layers - full_layers(shape)
    windowed_tokens = min(tokens, shape.sliding_window) if hybrid and shape.sliding_window else tokens
    return kv_bytes_per_token_layer(shape) * (full_layers(shape) * tokens + windowed_layers * windowed_tokens)


def kv_copies(shape: ModelShape, tp: int) -> float:
    """Copies of one token's KV cache in a TP group: heads are copied if TP exceeds their number, a latent vector
    is on every GPU."""
    return float(tp) if shape.kv_latent else max(1.0, tp / shape.kv_heads)


def moved_bytes(shape: ModelShape, tokens: float, decode_tp: int, *, hybrid: bool) -> float:
    """Bytes of a KV transfer to a decode engine of that TP: every rank reads the KV cache that it keeps, copies too."""
    return kv_bytes(shape, tokens, hybrid=hybrid) * kv_copies(shape, decode_tp)
