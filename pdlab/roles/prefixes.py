"""Which engines' KV caches have the beginning of a prompt, as far as that follows from where prompts went. Pure.

A prompt is known by its chunks alone: each is a hash of its bytes and of all that come before, so that no prompt is
kept, and two prompts have as many chunks in common as they begin alike.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

CHUNK_TOKENS = 64
CHARS_PER_TOKEN = 4  # of a text that nobody has tokenized yet
_TOKEN_BYTES = 4
_HASH_BYTES = 8
# Of an engine that has not told how much its KV pool holds.
POOL_TOKENS = 2**20
# What a prompt costs at least, however much of it is cached: the step that it takes all the same, of an H100 some 10 ms
# at some 20,000 tokens/s.
LEAST_TOKENS = 256


def to_compute(tokens: int, cached_tokens: int) -> int:
    """Tokens of a prompt of ``tokens`` that an engine with so many of them is to compute."""
    return max(tokens - cached_tokens, min(tokens, LEAST_TOKENS))


def chunks_of(prompt: str | Sequence[int], apart: str = "") -> list[int]:
    """The whole chunks of a text or of token ids, first to last; what an engine finds in its cache only if ``apart`` is
    the same too (a salt, the model) makes others of them. Empty for ids that are no unsigned 32-bit numbers."""
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
    """What each engine has, least recently used first; of one prompt its end goes before its beginning, as vLLM frees
    blocks."""

    def __init__(self) -> None:
        # Of every chunk whether a prompt that goes on otherwise behind it finds it.
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
        """The engine has computed a prompt with these chunks, or ``pulled`` its KV cache from another one.

        A pulled prompt is found as a whole alone, for layers with a sliding window have only its end (vLLM's NIXL
        connector, gpt-oss). ``sparse``: so is a computed one, for vLLM keeps windows before a prompt's last token
        alone, and where this prompt parted from one that the other layers still had: who comes third finds that
        (``prefix_cache_retention_interval`` 0). What the engine's pool of so many tokens (None: `POOL_TOKENS`) cannot
        hold beside is forgotten."""
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
        """Tokens of that prompt, from its first on, that the engine has."""
        held = self._held.get(engine)
        if not held:
            return 0
        count = bisect_left(range(len(chunks)), True, key=lambda at: chunks[at] not in held)
        while count and not held[chunks[count - 1]]:
            count -= 1
        return CHUNK_TOKENS * count

    def forget_others(self, engines: Iterable[str]) -> None:
        """Only these engines are there."""
        kept = set(engines)
        self._held = {engine: held for engine, held in self._held.items() if engine in kept}
