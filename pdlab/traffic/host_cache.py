"""A model of an engine's KV cache in host memory, behind its prefix cache, by the rules of vLLM's OffloadingConnector
(0.29: ``v1/kv_offload/cpu`` and ``kv_connector/v1/offloading/scheduler.py``). It computes the hits without an engine.

- Blocks of prompts are stored when a step has computed them, those of windowed layers too, wherever the prompt's window
  lies. Answers are not stored (``offload_prompt_only``). What the device had is stored if the host lacks it, unless
  something was loaded.
- A hit goes on from the device's hit: a run of blocks of the layers with full attention, which ends where the window
  before it is held. So a prompt that shares a beginning with one other hits it here, though not on the device.
- The least recently used blocks make room, never those of the same step. If the others are not enough, the step stores
  nothing, and the next one tries again. Every look-up of a prompt counts as use of what is held of it, its end first.

vLLM hands the blocks of one store or load back in no particular order (a set): here they are in the order of their
keys, which are hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdlab.traffic.oracle import FULL, WINDOWED, window_end
from pdlab.traffic.prompts import PromptBlocks

_Key = tuple[str, int]


class HostHit(NamedTuple):
    """A hit in host memory: ``tokens`` after the device's hit that are loaded, in ``blocks`` blocks of all groups."""

    tokens: int
    blocks: int


NO_HIT = HostHit(0, 0)


class HostCache:
    """Of one engine: ``blocks`` of ``block_tokens`` tokens, for all groups of layers together; ``window`` and
    ``step_tokens`` as `pdlab.traffic.oracle.HitOracle` has them."""

    def __init__(
        self, blocks: int, block_tokens: int, window: int | None = None, step_tokens: int | None = None
    ) -> None:
        self.blocks, self.block_tokens, self.window = blocks, block_tokens, window
        self.step_tokens = step_tokens
        self.needed = 0 if window is None else -(-window // block_tokens)
        self._order: OrderedDict[_Key, None] = OrderedDict()  # least recently used first

    @property
    def held(self) -> int:
        """Number of blocks in the cache."""
        return len(self._order)

    def load(self, prompt: PromptBlocks, device: int) -> HostHit:
        """Look up the prompt for an engine that has its first ``device`` tokens (whole blocks), and load the blocks
        that are held.
        """
        tokens = self._found(prompt, device)
        self._touch(prompt, device + tokens)
        if not tokens:
            return NO_HIT
        end = -(-(device + tokens) // self.block_tokens)
        first = device // self.block_tokens
        keys = [(FULL, key) for key in prompt.keys[first:end]]
        if self.window:
            first = max(first, self._window_begin(device + tokens))
            keys += [(WINDOWED, key) for key in prompt.keys[first:end]]
        for key in _as_returned(keys):
            self._order.move_to_end(key)
        return HostHit(tokens, len(keys))

    def computed(self, prompt: PromptBlocks, device: int, loaded: int) -> None:
        """The engine has computed the prompt, all but ``device`` and ``loaded`` tokens of it."""
        size, had = self.block_tokens, device + loaded
        full = stored = -(-had // size) if loaded else 0
        windowed = max(full, self._window_begin(had)) if self.window else 0
        at, step = min(had, prompt.tokens - 1), self.step_tokens or prompt.tokens
        while at < prompt.tokens:
            at = min(at + step, prompt.tokens)
            end = at // size
            keys = [(WINDOWED, key) for key in prompt.keys[max(windowed, stored) : end]] if self.window else []
            keys += [(FULL, key) for key in prompt.keys[max(full, stored) : end]]
            if self._store(keys, prompt, had):
                stored = end

    def _found(self, prompt: PromptBlocks, device: int) -> int:
        size, held, keys = self.block_tokens, self._order, prompt.keys
        # With windowed layers the last token is computed for its logits, and the block that it is in is hit but for it.
        most = min(prompt.tokens - (1 if self.window else 0), len(keys) * size)
        begin = end = device // size
        while end * size < most and (FULL, keys[end]) in held:
            end += 1
        most = min(most, end * size)
        if self.window:
            most = min(most, window_end(keys, held, begin, end, self.needed) * size)
        tokens = most - device
        return tokens if tokens >= size else 0

    def _window_begin(self, tokens: int) -> int:
        """The first block that the window before so many tokens reaches."""
        return max(tokens - (self.window or 0) + 1, 0) // self.block_tokens

    def _touch(self, prompt: PromptBlocks, hit: int) -> None:
        groups: list[Sequence[_Key]] = [[(FULL, key) for key in prompt.keys]]
        if self.window:
            first = max(hit // self.block_tokens - self.needed, 0)
            groups.insert(0, [(WINDOWED, key) for key in prompt.keys[first:]])
        for group in groups:
            for key in reversed(group):
                if key in self._order:
                    self._order.move_to_end(key)

    def _store(self, keys: Sequence[_Key], prompt: PromptBlocks, hit: int) -> bool:
        """Whether all of them are held now."""
        new = [key for key in keys if key not in self._order]
        room = self.blocks - len(self._order) - len(new)
        if room < 0:
            offered = {*keys}
            oldest = (key for key in self._order if key not in offered)
            evicted = [key for key, _ in zip(oldest, range(-room), strict=False)]
            if len(evicted) < -room:
                return False
            for key in evicted:
                del self._order[key]
        if new:
            self._touch(prompt, hit)
            self._order.update(dict.fromkeys(_as_returned(new)))
        return True


def _as_returned(keys: Iterable[_Key]) -> list[_Key]:
    return sorted(keys, key=lambda key: (key[1], key[0]))
