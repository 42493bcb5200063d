"""Faults planted between the ranks, to test that the check finds and names them. Sent to the nodes by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdlab.transfer.rank.layout import WORD, Blocks, BlockTable, RankPair, Words

if TYPE_CHECKING:
    from pdlab.transfer.rank.codes import CodeBook

# Fault -> its name in the check's result. The first group sends wrong descriptors, so that the real transfer misplaces
# blocks. The second group rewrites received words.
WRONG_DESCRIPTORS = {
    "swap-blocks": "swapped blocks",
    "shift-block": "shifted block",
    "drop-last": "missing last block",
}
REWRITTEN = {
    "swap-kv": "swapped K and V",
    "wrong-head": "wrong head slice",
    "stale": "stale",
    "flip-bit": "flipped bit",
    "zeros": "zeros",
}
FAULTS = WRONG_DESCRIPTORS | REWRITTEN


def refusal(fault: str, blocks: int, kv_heads: int) -> str | None:
    """Why a fault cannot be planted into a request with this number of blocks; None if it can."""
    least_blocks = {"swap-blocks": 2, "drop-last": 2, "shift-block": 3}.get(fault, 1)
    if blocks < least_blocks:
        return f"fault {fault} needs a request of at least {least_blocks} blocks, this one has {blocks}"
    if fault == "wrong-head" and kv_heads < 2:
        return "fault wrong-head needs a model with at least 2 KV heads"
    return None


def misplace(fault: str | None, prefill: Blocks, decode: Blocks) -> tuple[Blocks, Blocks]:
    """The (prefill, decode) blocks for the descriptors of a request, misplaced by the fault."""
    if fault == "swap-blocks":
        prefill = prefill.copy()
        prefill[[0, -1]] = prefill[[-1, 0]]
    elif fault == "shift-block":
        prefill = np.roll(prefill, -1)
    elif fault == "drop-last":
        return prefill[:-1], decode[:-1]
    return prefill, decode


def rewrite(
    fault: str | None,
    book: CodeBook,
    regions: Sequence[Words],
    slices: Sequence[RankPair],
    prefill_tp: int,
    table: BlockTable,
) -> None:
    """Change the received first page of the request in the first layer of this decode rank."""
    if fault not in REWRITTEN:
        return
    pair, region = slices[0], regions[0]
    count = pair.length // WORD
    words = book.words(book.shape.first_head(prefill_tp, pair.prefill), pair.prefill_offset // WORD, count)
    block, request = table.prefill[:1], table.request
    page = region[table.decode[0], pair.decode_offset // WORD :][:count]
    if fault == "zeros":
        page[:] = 0
    elif fault == "flip-bit":
        page[count // 2] ^= np.uint64(1 << 17)
    elif fault == "stale":
        page[:] = book.source_pages(request - 1, pair.prefill, 0, block) | words
    elif fault == "swap-kv":
        page[:] ^= np.uint64(1 << book.shift["kv"])
    elif fault == "wrong-head":
        heads = book.field(words, "head").astype(np.uint64)
        next_heads = (heads + np.uint64(1)) % np.uint64(book.shape.kv_heads)
        shift = np.uint64(book.shift["head"])
        page[:] = page ^ (heads << shift) ^ (next_heads << shift)
