"""vLLM's layout of a KV cache, its split over TP ranks, and its NIXL descriptors.

Source: vLLM 0.29, vllm/distributed/kv_transfer/kv_connector/v1/nixl (base_worker, tp_mapping, base_scheduler), layout
LBHNC. A region per layer has a page per block. A page has the rank's KV heads in order, and a head has the tokens with
K and V packed. A page moves as one descriptor. Sent to the nodes by value; imports only numpy and the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD = 8  # bytes
Blocks = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True)
class KvShape:
    """A KV cache of all TP ranks together.

    ``regions``: tensors that vLLM registers, one per layer. With sliding windows the layer groups share tensors: one
    per layer of the largest group. ``head_bytes``: K and V of one head in one block. ``half_bytes``: length of a run of
    K before its V. ``windows``: most blocks that a request moves, per sliding-window group.
    """

    name: str
    layers: int
    regions: int
    kv_heads: int
    block_tokens: int
    head_bytes: int
    half_bytes: int
    windows: tuple[int, ...] = ()

    @property
    def head_words(self) -> int:
        return self.head_bytes // WORD

    @property
    def half_words(self) -> int:
        return self.half_bytes // WORD

    def heads_per_rank(self, tp: int) -> int:
        """KV heads per rank. With more ranks than heads each rank has a copy of one head."""
        return max(1, self.kv_heads // tp)

    def page_bytes(self, tp: int) -> int:
        """Bytes of a page: one block of one layer on one rank."""
        return self.heads_per_rank(tp) * self.head_bytes

    def first_head(self, tp: int, rank: int) -> int:
        """The first KV head of a rank."""
        return rank * self.kv_heads // tp

    def blocks_of(self, tokens: int) -> int:
        """Blocks that move for a prompt of ``tokens``: all of the full-attention group, and the tail of every
        sliding-window group (in vLLM the window in blocks, rounded up, plus one)."""
        full = -(-tokens // self.block_tokens)
        return full + sum(min(full, window) for window in self.windows)

    def request_bytes(self, blocks: int, decode_tp: int) -> int:
        """Bytes that all decode ranks receive for a request of ``blocks`` blocks."""
        return blocks * self.regions * self.page_bytes(decode_tp) * decode_tp


def model_kv_shape(
    name: str, *, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int, block_tokens: int,
    sliding_window: int | None, full_attention_layers: int | None, k_per_token: bool,
) -> KvShape:  # fmt: skip
    """Shape of a model's cache. ``k_per_token``: K and V alternate per token (GPU), not per block (vLLM's CPU backend).

    Raises ValueError if a run of K is not a whole number of 8-byte words. Raises it also if the layers of a model with
    sliding windows are not whole groups.
    """
    head_bytes = 2 * block_tokens * head_dim * dtype_bytes
    half_bytes = head_dim * dtype_bytes if k_per_token else head_bytes // 2
    if half_bytes % WORD:
        raise ValueError(f"K of {half_bytes} bytes is not a multiple of {WORD} bytes (head_dim {head_dim})")
    regions = layers
    windows: tuple[int, ...] = ()
    if sliding_window and full_attention_layers and full_attention_layers < layers:
        if layers % full_attention_layers:
            raise ValueError(f"{layers} layers are not whole groups of {full_attention_layers} full-attention layers")
        regions = full_attention_layers
        windows = (-(-sliding_window // block_tokens) + 1,) * (layers // full_attention_layers - 1)
    return KvShape(name, layers, regions, kv_heads, block_tokens, head_bytes, half_bytes, windows)


def plain_kv_shape(layers: int, page_bytes: int, heads: int, block_tokens: int) -> KvShape:
    """Shape without a model. ``page_bytes``: of a layer's block over all ranks, divided into ``heads`` heads.

    Raises ValueError if K and V of a head are not whole numbers of 8-byte words.
    """
    if page_bytes % (heads * 2 * WORD):
        raise ValueError(f"{page_bytes} bytes do not split into {heads} heads of K and V in words of {WORD} bytes")
    head_bytes = page_bytes // heads
    return KvShape(f"{layers}x{page_bytes}", layers, layers, heads, block_tokens, head_bytes, head_bytes // 2)


@dataclass(frozen=True)
class RankPair:
    """The slice of every page that rank ``decode`` gets from rank ``prefill``; offsets and length in bytes."""

    prefill: int
    decode: int
    prefill_offset: int
    decode_offset: int
    length: int


def refusal(prefill_tp: int, decode_tp: int, kv_heads: int) -> str | None:
    """Why vLLM's connector does not accept these TP degrees; None if it does."""
    low, high = sorted((prefill_tp, decode_tp))
    if low < 1 or high % low:
        return f"prefill TP {prefill_tp} and decode TP {decode_tp}: one must divide the other"
    for side, tp in (("prefill", prefill_tp), ("decode", decode_tp)):
        if max(tp, kv_heads) % min(tp, kv_heads):
            return f"{side} TP {tp} and {kv_heads} KV heads: one must divide the other"
    if prefill_tp > decode_tp and prefill_tp > kv_heads:
        return f"prefill TP {prefill_tp} > decode TP {decode_tp} needs prefill TP of at most the {kv_heads} KV heads"
    return None


def pairs(shape: KvShape, prefill_tp: int, decode_tp: int) -> tuple[RankPair, ...]:
    """The slices of every page between prefill and decode ranks, in the order of reads by vLLM's decode ranks.

    Raises ValueError for TP degrees that vLLM does not accept.
    """
    if reason := refusal(prefill_tp, decode_tp, shape.kv_heads):
        raise ValueError(reason)
    decode_page, prefill_page = shape.page_bytes(decode_tp), shape.page_bytes(prefill_tp)
    all_pairs = []
    for decode in range(decode_tp):
        if decode_tp >= prefill_tp:
            prefill = decode * prefill_tp // decode_tp
            if decode_tp == prefill_tp:
                slot = 0
            elif decode_tp > shape.kv_heads:
                slot = shape.first_head(decode_tp, decode) - shape.first_head(prefill_tp, prefill)
            else:
                slot = decode % (decode_tp // prefill_tp)
            all_pairs.append(RankPair(prefill, decode, slot * decode_page, 0, decode_page))
        else:
            ratio = prefill_tp // decode_tp
            for slot in range(ratio):
                all_pairs.append(RankPair(decode * ratio + slot, decode, 0, slot * prefill_page, prefill_page))
    return tuple(all_pairs)


@dataclass(frozen=True)
class BlockTable:
    """One request's blocks: block ``prefill[i]`` of prefill moves to block ``decode[i]`` of decode."""

    request: int
    prefill: Blocks
    decode: Blocks


def block_tables(
    first_request: int, requests: int, blocks: int, num_blocks: int, *, scattered: bool, seed: int
) -> tuple[BlockTable, ...]:
    """Block tables of requests that are in flight together. Each block belongs to one request.

    ``scattered``: random blocks of the pool, as after hours of serving; else contiguous blocks at a random place.
    Raises ValueError if the pool is too small.
    """
    if requests * blocks > num_blocks:
        raise ValueError(f"{requests} x {blocks} blocks do not fit into a cache of {num_blocks} blocks")
    rng = np.random.default_rng((seed, first_request, blocks))
    sides = []
    for _ in range(2):
        if scattered:
            order = rng.permutation(num_blocks)
        else:
            start = int(rng.integers(0, num_blocks - requests * blocks + 1))
            order = np.arange(start, start + requests * blocks)
        sides.append(order[: requests * blocks].astype(np.int64).reshape(requests, blocks))
    return tuple(BlockTable(first_request + i, sides[0][i], sides[1][i]) for i in range(requests))


def descriptors(
    bases: Sequence[int], num_blocks: int, page_bytes: int, offset: int, length: int, device: int
) -> npt.NDArray[np.uint64]:
    """NIXL descriptors (address, length, device) of a slice of every page, by region: shape (regions * num_blocks, 3).

    vLLM prepares descriptors of all blocks once and selects from them by index.
    """
    blocks = np.arange(num_blocks, dtype=np.uint64) * np.uint64(page_bytes) + np.uint64(offset)
    descriptor_table = np.empty((len(bases) * num_blocks, 3), dtype=np.uint64)
    descriptor_table[:, 0] = (np.array(bases, dtype=np.uint64)[:, None] + blocks[None, :]).ravel()
    descriptor_table[:, 1] = length
    descriptor_table[:, 2] = device
    return descriptor_table


def descriptor_ids(blocks: Blocks, regions: int, num_blocks: int) -> npt.NDArray[np.int32]:
    """Indexes into `descriptors` of the blocks in every region, by region: shape (regions * blocks,)."""
    ids = np.arange(regions, dtype=np.int64)[:, None] * num_blocks + blocks[None, :]
    return ids.ravel().astype(np.int32)
