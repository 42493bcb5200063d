"""A prompt as an engine's cache sees it: blocks, whose keys depend on all text up to the block's end.

A prompt is a sequence of pieces of text (key, tokens). Two prompts share the blocks of their common beginning, for any
block size of the engine.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdlab.traffic.requests import Block, TrafficRequest

_HASH_BYTES = 8
# The keys of whole blocks within one piece of text follow from the first one, without a hash of each: they differ,
# because the step is odd.
_STEP, _MOST = 0x9E3779B97F4A7C15, 2 ** (8 * _HASH_BYTES) - 1


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt of ``tokens``; ``keys`` are of its whole blocks, first to last."""

    tokens: int
    keys: tuple[int, ...]


@dataclass(slots=True)
class _Content:
    """Text so far: whole blocks, and the pieces (key, from, tokens) of the one that is not whole."""

    keys: tuple[int, ...] = ()
    rest: tuple[tuple[str, int, int], ...] = ()

    @property
    def rest_tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.rest)

    def and_then(self, blocks: Iterable[Block], size: int) -> _Content:
        """The content with more text after it, in blocks of ``size`` tokens."""
        keys, rest, filled = [*self.keys], [*self.rest], self.rest_tokens
        for key, tokens in blocks:
            at = 0
            while at < tokens:
                if not filled and (whole := (tokens - at) // size):
                    first = _hash(keys[-1] if keys else 0, [(key, at)])
                    keys += [(first + _STEP * number) & _MOST for number in range(whole)]
                    at += whole * size
                    continue
                take = min(size - filled, tokens - at)
                rest.append((key, at, take))
                at, filled = at + take, filled + take
                if filled == size:
                    keys.append(_hash(keys[-1] if keys else 0, rest))
                    rest, filled = [], 0
        return _Content(tuple(keys), tuple(rest))


def token_keys(ids: Sequence[int], size: int) -> tuple[int, ...]:
    """Keys of the whole blocks of ``size`` tokens of a row of token ids. They are no keys of `TrafficPrompts`."""
    keys: list[int] = []
    for at in range(0, len(ids) - size + 1, size):
        keys.append(_hash(keys[-1] if keys else 0, ids[at : at + size]))
    return tuple(keys)


def _hash(before: int, pieces: Sequence[object]) -> int:
    digest = hashlib.blake2b(f"{before}\0{pieces}".encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES)
    return int.from_bytes(digest.digest(), "big")


class TrafficPrompts:
    """The prompts of a workload in an engine's blocks of ``block_tokens``. A prompt begins with its parent's prompt and
    answer; the latest ``remembered`` requests can be parents, where the number of their followers is not given."""

    def __init__(self, block_tokens: int, remembered: int = 100_000) -> None:
        self.block_tokens, self.remembered = block_tokens, remembered
        self._ends: OrderedDict[str, tuple[int, _Content]] = OrderedDict()
        self._left: dict[str, int] = {}

    def of(self, request: TrafficRequest, followers: int | None = None) -> tuple[PromptBlocks, PromptBlocks]:
        """The prompt of a request, and prompt and answer, but for the answer's last token: no engine computes its KV.
        Parents come before those that go on from them. ``followers``: so many will (None: not known).
        Raises KeyError for a parent that did not come."""
        before = (0, _Content()) if request.continues is None else self._end_of(request.continues)
        prompt = before[1].and_then(request.blocks, self.block_tokens)
        tokens = before[0] + request.new_tokens
        answer = f"answer/{request.id}"
        end = prompt.and_then(((answer, request.out),), self.block_tokens)
        if followers != 0:
            self._ends[request.id] = (tokens + request.out, end)
        if followers:
            self._left[request.id] = followers
        elif len(self._ends) > self.remembered:
            self._ends.popitem(last=False)
        computed = (tokens + request.out - 1) // self.block_tokens
        return PromptBlocks(tokens, prompt.keys), PromptBlocks(tokens + request.out - 1, end.keys[:computed])

    def _end_of(self, parent: str) -> tuple[int, _Content]:
        end = self._ends[parent]
        if parent in self._left:
            self._left[parent] -= 1
            if not self._left[parent]:
                del self._ends[parent], self._left[parent]
        return end


class PromptsInFlight:
    """The prompts of ``requests`` by their numbers, each from its first use until it is forgotten. What a follow-up
    begins with is kept until the last one has come, so that memory grows with what is in flight."""

    def __init__(self, requests: Sequence[TrafficRequest], block_tokens: int) -> None:
        self._requests = requests
        self._prompts = TrafficPrompts(block_tokens)
        self._followers = Counter(request.continues for request in requests)
        self._known: dict[int, tuple[PromptBlocks, PromptBlocks]] = {}

    def of(self, number: int) -> tuple[PromptBlocks, PromptBlocks]:
        """See `TrafficPrompts.of`: a request comes after the one that it continues, and not again once forgotten."""
        known = self._known.get(number)
        if known is None:
            request = self._requests[number]
            known = self._known[number] = self._prompts.of(request, self._followers[request.id])
        return known

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._known.pop(number, None)
