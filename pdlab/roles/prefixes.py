"""Estimate which engines' KV caches have the beginning of a prompt, from the routes of earlier prompts. Pure.

A prompt is stored only as its chunks: each chunk is a hash of its bytes and of all bytes before. Two prompts share the
chunks of their common beginning.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

CHUNK_TOKENS = 64
CHARS_PER_TOKEN = 4  # estimate for a text that is not tokenized yet
_TOKEN_BYTES = 4
_HASH_BYTES = 8
# Assumed KV pool of an engine that has not reported its size.
POOL_TOKENS = 2**20
# Least cost of a prompt, also if all of it is cached: one step, which is about 10 ms at 20,000 tokens/s on an H100.
LEAST_TOKENS = 256


def to_compute(tokens: int, cached_tokens: int) -> int:
    """Tokens of a prompt that an engine with ``cached_tokens`` of them must compute."""
    return max(tokens - cached_tokens, min(tokens, LEAST_TOKENS))


def chunks_of(prompt: str | Sequence[int], apart: str = "") -> list[int]:
    """The whole chunks of a text or of token ids. Empty for ids that are not unsigned 32-bit numbers.

    ``apart``: part of every hash, for prompts that do not share a cache (a salt, the model).
    """
    if isinstance(prompt, str):
        size = CHUNK_TOKENS * CHARS_PER_TOKEN
        parts: Iterable[bytes] = (
            prompt[at : at + size].encode("utf-8", "surrogatepass") for at in range(0, len(prompt) - size + 1, size)
        )
    else:
        try:
            data = array("I", prompt).tobytes()
        except (OverflowError, TypeError):
            return []
        size = CHUNK_TOKENS * _TOKEN_BYTES
        parts = (data[at : at + size] for at in range(0, len(data) - size + 1, size))
    kind = "text" if isinstance(prompt, str) else "ids"
    before = hashlib.blake2b(f"{kind}\0{apart}".encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    chunks = []
    for part in parts:
        before = hashlib.blake2b(before + part, digest_size=_HASH_BYTES).digest()
        chunks.append(int.from_bytes(before, "big"))
    return chunks


class Prefixes:
    """The chunks of each engine, the least recently used first. The end of a prompt is dropped before its beginning, as
    vLLM frees blocks."""

    def __init__(self) -> None:
        # Engine -> chunk -> whether a prompt can hit it that continues differently after it.
        self._held: dict[str, OrderedDict[int, bool]] = {}

    def keep(
        self,
        engine: str,
        chunks: Sequence[int],
        pool_tokens: int | None = None,
        *,
        pulled: bool = False,
        sparse: bool = False,
    ) -> None:
        """Record that the engine computed a prompt with these chunks, or ``pulled`` its KV cache from another engine.

        Only the whole of a pulled prompt can be hit, because layers with a sliding window have only its end (vLLM's
        NIXL connector, gpt-oss). ``sparse``: the same holds for a computed prompt, because vLLM keeps windows only
        before the last token of a prompt (``prefix_cache_retention_interval`` 0). It also keeps them where this prompt
        left an earlier one that other layers still had, so a third prompt hits that. ``pool_tokens``: size of the
        engine's pool (None: `POOL_TOKENS`); older chunks beyond it are dropped.
        """
        held = self._held.setdefault(engine, OrderedDict())
        ends = {len(chunks) - 1}
        if sparse and not pulled:
            ends.add(bisect_left(range(len(chunks)), True, key=lambda at: chunks[at] not in held) - 1)
        for at in range(len(chunks) - 1, -1, -1):
            chunk = chunks[at]
            held[chunk] = held.get(chunk, False) or not (pulled or sparse) or at in ends
            held.move_to_end(chunk)
        most = max((POOL_TOKENS if pool_tokens is None else pool_tokens) // CHUNK_TOKENS, 1)
        while len(held) > most:
            held.popitem(last=False)

    def tokens(self, engine: str, chunks: Sequence[int]) -> int:
        """Number of first tokens of a prompt that the engine has."""
        held = self._held.get(engine)
        if not held:
            return 0
        count = bisect_left(range(len(chunks)), True, key=lambda at: chunks[at] not in held)
        while count and not held[chunks[count - 1]]:
            count -= 1
        return CHUNK_TOKENS * count

    def forget_others(self, engines: Iterable[str]) -> None:
        """Drop the chunks of all engines but these."""
        kept = set(engines)
        self._held = {engine: held for engine, held in self._held.items() if engine in kept}
