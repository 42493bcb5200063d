"""Computes how many tokens of each prompt are in an engine's prefix cache, by vLLM's rules (0.29), without an engine.

vLLM keeps whole blocks. All groups of layers share one pool of them, and free blocks are reused least recently used
first; of one prompt the end goes before the beginning (``BlockPool``, ``SingleTypeKVCacheManager.free``).

- Layers with full attention: a hit is the longest beginning of the prompt whose blocks are all held.
- Layers with a sliding window, beside them (gpt-oss): a hit ends where the blocks of the window before it are held.
  Only those are kept that a later prompt is likely to end at: before a prompt's last token, and at the junction that a
  prompt found held by the other layers alone (``SlidingWindowManager.reachable_block_mask``). So a prompt that shares
  a beginning with one other does not hit it, and the third does. With ``retention`` (vLLM's
  ``prefix_cache_retention_interval``) also every so many tokens; None keeps every one.

The last token of a prompt is always computed, for its logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence

from pdlab.core.engine_cache import EngineCache
from pdlab.traffic.prompts import PromptBlocks

FULL, WINDOWED = "full", "window"
_Key = tuple[str, int]


def window_end(keys: Sequence[int], held: Container[_Key], begin: int, end: int, needed: int) -> int:
    """Where the last run of ``needed`` blocks of the window ends that is held, from ``begin`` to ``end``; without one
    where the run ends that starts at ``begin``."""
    run = 0
    for at in range(end - 1, begin - 1, -1):
        run = run + 1 if (WINDOWED, keys[at]) in held else 0
        if run == needed:
            return at + run
    return begin + run


class HitOracle:
    """The cache of one engine: ``blocks`` of ``block_tokens`` tokens, for all groups of layers together.

    ``window``: tokens of the sliding window of a hybrid cache; None: all layers have full attention, or one group.
    ``step_tokens``: the most tokens of a prompt that one step computes (None: all); windowed layers hold the blocks of
    the whole step until it has ended. A block that is computed again while it is held is there twice, as in vLLM.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        window: int | None = None,
        retention: int | None = 0,
        step_tokens: int | None = None,
    ) -> None:
        self.blocks = blocks - 1  # the null block holds nothing
        self.block_tokens, self.window, self.retention = block_tokens, window, retention
        # As many whole blocks as a hit needs: the window without the token that comes next.
        self.needed = 0 if window is None else -(-(window - 1) // block_tokens)
        self.step_blocks = None if step_tokens is None else -(-step_tokens // block_tokens) + self.needed + 1
        self._order: OrderedDict[int, _Key] = OrderedDict()  # blocks, least recently used first
        self._held: dict[_Key, list[int]] = {}  # what is held, and in which blocks
        self._next = 0

    def hit(self, prompt: PromptBlocks) -> int:
        """Tokens of the prompt that need not be computed now. Changes nothing."""
        return self._found(prompt)[0] * self.block_tokens

    def _end(self, prompt: PromptBlocks) -> int:
        """Whole blocks before its last token."""
        return min((prompt.tokens - 1) // self.block_tokens, len(prompt.keys))

    def _found(self, prompt: PromptBlocks) -> tuple[int, int]:
        """Blocks that are hit, and that the layers with full attention would hit alone."""
        keys, held, most = prompt.keys, self._held, self._end(prompt)
        full = 0
        while full < most and (FULL, keys[full]) in held:
            full += 1
        if not self.needed:
            return full, full
        return window_end(keys, held, 0, full, self.needed), full

    def compute(self, prompt: PromptBlocks, computed: PromptBlocks | None = None, loaded: int = 0) -> int:
        """The engine computes the prompt. Returns the tokens that it hits, and stores the blocks that are held from now
        on.

        ``computed``: the prompt and the answer, whose blocks are held too where it is given. ``loaded``: tokens behind
        the hit that come from host memory.
        """
        hit, full = self._found(prompt)
        begin = hit + -(-loaded // self.block_tokens)  # of what is computed; the window before it is there
        whole = computed or prompt
        hits = [(FULL, key) for key in prompt.keys[:hit]]
        hits += [(WINDOWED, key) for key in prompt.keys[max(hit - self.needed, 0) : hit]] if self.needed else []
        for key in hits:
            self._order.move_to_end(self._held[key][0])
        blocks = -(-prompt.tokens // self.block_tokens)
        windowed = min(blocks - hit, blocks - begin + self.needed)
        room = blocks - hit + (min(windowed, self.step_blocks or windowed) if self.needed else 0)
        self._evict(min(room, self.blocks - len(hits)))  # what is hit is in use
        kept = []
        if self.needed:
            ends = {self._end(prompt), full if full > hit else hit}
            # What lies before the hit is not there: windowed layers have no use for it.
            reached = {*self._windows(ends), *self._retained(len(whole.keys))}
            windows = self._as_freed((at for at in reached if at >= begin - self.needed), prompt.tokens, whole.tokens)
            kept = [(WINDOWED, whole.keys[at]) for at in windows]
        # Freed from the end to the beginning, the windows first.
        in_hits = {*hits}
        for key in [*kept, *((FULL, key) for key in reversed(whole.keys))]:
            if key in in_hits:
                self._order.move_to_end(self._held[key][0])
            else:
                self._add(key)
        self._evict(0)
        return hit * self.block_tokens

    def answered(self, prompt: PromptBlocks, computed: PromptBlocks) -> None:
        """The answer to a prompt that was computed here has ended: its blocks are held too, and all blocks count as
        just used.
        """
        ends = self._windows({self._end(prompt)} if self.needed else set())
        windows = [(WINDOWED, computed.keys[at]) for at in ends if (WINDOWED, computed.keys[at]) in self._held]
        for key in [*windows, *((FULL, key) for key in reversed(computed.keys))]:
            if key in self._held:
                self._order.move_to_end(self._held[key][0])
            else:
                self._add(key)
        self._evict(0)

    def _add(self, key: _Key) -> None:
        self._order[self._next] = key
        self._held.setdefault(key, []).append(self._next)
        self._next += 1

    def _evict(self, room: int) -> None:
        """Until so many blocks are free."""
        while self._order and len(self._order) + room > self.blocks:
            block, key = self._order.popitem(last=False)
            copies = self._held[key]
            copies.remove(block)
            if not copies:
                del self._held[key]

    def _as_freed(self, blocks: Iterable[int], prompt_tokens: int, tokens: int) -> list[int]:
        """Blocks of windowed layers in the order in which they are freed: those that the window has left when the
        prompt is computed, from the last to the first; those that it leaves then, one by one; the others at the end,
        from the last to the first."""
        behind, left = (max(each - (self.window or 0) + 1, 0) // self.block_tokens for each in (prompt_tokens, tokens))
        ordered = sorted(blocks)
        first = [at for at in reversed(ordered) if at < behind]
        then = [at for at in ordered if behind <= at < left]
        return [*first, *then, *(at for at in reversed(ordered) if at >= max(behind, left))]

    def _windows(self, ends: set[int]) -> Iterator[int]:
        for end in ends:
            yield from range(max(end - self.needed, 0), end)

    def _retained(self, count: int) -> Iterator[int]:
        """Blocks before the multiples of the retention interval."""
        if self.retention == 0:
            return
        each = 1 if self.retention is None else self.retention // self.block_tokens
        for at in range(count):
            if self.needed >= each or at % each >= each - self.needed:
                yield at


def oracle_of(cache: EngineCache) -> HitOracle:
    """The oracle of one engine, with an empty cache."""
    return HitOracle(cache.blocks, cache.block_tokens, cache.window, cache.retention, cache.step_tokens)
