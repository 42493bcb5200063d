"""Bounds on the prefix-cache hits of a replay whose engines cannot be simulated block by block.

They follow from two facts about vLLM:

- An engine hits only blocks that it computed or received. An earlier request had each of these blocks in its prompt or
  answer, and arrived before the first token of the request that hits them. Windowed layers and evictions reduce hits.
- If all layers have full attention, more blocks in a cache never mean fewer hits. An engine keeps every prompt that it
  computed, and every prompt and answer that it decoded, until it has received about one pool of other blocks: vLLM
  reuses first the blocks that were free longest (`vllm/v1/core/block_pool.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pdlab.bench.client.protocol import ComputedTokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

# Of a KV pool: what an engine may have been given since for a block to be held. The rest is for what is held beside it,
# such as prompts that wait for the end of a lease.
ROOM = 0.5
# How often a block's key came is counted in so many bytes. Two keys that share one make an upper bound larger.
PLACES = 2**25


class SentPrompts(NamedTuple):
    """The sent requests of a replay, in the order of arrival. ``first_token_s`` and ``finish_s`` are NaN for a request
    that was not answered. ``engines`` computed the prompts, and ``decodes`` decoded the answers; the two may be one
    engine (None: not known)."""

    arrival_s: Sequence[float]
    first_token_s: Sequence[float]
    finish_s: Sequence[float]
    engines: Sequence[str | None]
    decodes: Sequence[str | None]
    prompts: Sequence[ComputedTokens]

    def by_first_token(self) -> list[int]:
        """The places of the answered requests, in the order of their first tokens."""
        answered = [at for at, moment_s in enumerate(self.first_token_s) if not math.isnan(moment_s)]
        return sorted(answered, key=self.first_token_s.__getitem__)


def most_tokens(sent: SentPrompts, block_tokens: int, *, host: bool) -> Counts:
    """The greatest number of tokens of each answered prompt that a cache had. ``host``: host memory may be behind the
    engines; it can give the last block of a prompt too, but for the prompt's last token."""
    import numpy as np

    def places(keys: tuple[int, ...]) -> NDArray[np.int64]:
        return (np.array(keys, dtype=np.uint64) % PLACES).astype(np.int64)

    had, most, come = np.zeros(PLACES, dtype=np.uint8), np.zeros(len(sent.arrival_s), dtype=np.int64), 0
    for at in sent.by_first_token():
        while come < len(most) and sent.arrival_s[come] <= sent.first_token_s[at]:
            of_request = places(sent.prompts[come].keys)
            had[of_request] = np.minimum(had[of_request] + 1, 2)
            come += 1
        prompt = sent.prompts[at]
        missing = np.flatnonzero(had[places(_prompt_keys(prompt, block_tokens))] < 2)  # one is its own
        blocks = int(missing[0]) if len(missing) else prompt.tokens // block_tokens
        whole = prompt.tokens - 1
        most[at] = min(blocks * block_tokens, whole if host else whole // block_tokens * block_tokens)
    return most


def least_tokens(sent: SentPrompts, block_tokens: int, pool_blocks: int) -> Counts:
    """The least number of tokens of each answered prompt that the cache had. All layers must have full attention, and
    every engine's pool at least ``pool_blocks``."""
    import numpy as np

    least = np.zeros(len(sent.arrival_s), dtype=np.int64)
    blocks = np.array([-(-each.computed // block_tokens) + 1 for each in sent.prompts], dtype=np.int64)
    for engine in sorted({each for each in sent.engines if each is not None}):
        given, ends = _Given.of(sent, engine, blocks), _Ends.of(sent, engine)
        after, held = 0, dict[int, int]()  # key -> blocks that were gone when the latest request with it came
        for at, other in enumerate(sent.engines):
            if other != engine or math.isnan(sent.first_token_s[at]):
                continue
            while after < len(ends.at) and ends.moment_s[after] <= sent.arrival_s[at]:
                each, gone = sent.prompts[ends.at[after]], given.gone(sent.arrival_s[ends.at[after]])
                for key in each.keys if ends.answer[after] else _prompt_keys(each, block_tokens):
                    held[key] = max(held.get(key, gone), gone)
                after += 1
            # What was in flight when a request came, and what came since, may have taken its blocks.
            since = given.come(sent.first_token_s[at]) - int(ROOM * pool_blocks)
            prompt = sent.prompts[at]
            found = _beginning(_prompt_keys(prompt, block_tokens), held, since)
            least[at] = min(found, (prompt.tokens - 1) // block_tokens) * block_tokens
            if len(held) > pool_blocks:
                earliest = given.come(sent.arrival_s[at]) - int(ROOM * pool_blocks)
                held = {key: then for key, then in held.items() if then >= earliest}
    return least


class _Given(NamedTuple):
    """The requests that one engine may have computed or decoded: the times at which they arrived and ended, and the
    cumulated blocks at these times, from 0."""

    came_s: NDArray[np.float64]
    come_blocks: Counts
    gone_s: NDArray[np.float64]
    gone_blocks: Counts

    @classmethod
    def of(cls, sent: SentPrompts, engine: str, blocks: Counts) -> _Given:
        import numpy as np

        pairs = zip(sent.engines, sent.decodes, strict=True)
        here = np.flatnonzero([engine in pair or None in pair for pair in pairs])
        finish_s = np.asarray(sent.finish_s, dtype=float)[here]
        order = np.argsort(finish_s, kind="stable")[: int((~np.isnan(finish_s)).sum())]  # NaN is last
        return cls(
            np.asarray(sent.arrival_s, dtype=float)[here],
            np.concatenate(([0], np.cumsum(blocks[here]))),
            finish_s[order],
            np.concatenate(([0], np.cumsum(blocks[here][order]))),
        )

    def come(self, moment_s: float) -> int:
        """Blocks of the requests that had arrived by ``moment_s``."""
        return int(self.come_blocks[self.came_s.searchsorted(moment_s, "right")])

    def gone(self, moment_s: float) -> int:
        """Blocks of the requests that had ended by ``moment_s``."""
        return int(self.gone_blocks[self.gone_s.searchsorted(moment_s, "right")])


class _Ends(NamedTuple):
    """The prompts that one engine holds, by the time from which it holds them: the place of the request, and whether
    the engine holds its answer too."""

    moment_s: NDArray[np.float64]
    at: Counts
    answer: NDArray[np.bool_]

    @classmethod
    def of(cls, sent: SentPrompts, engine: str) -> _Ends:
        """What decode reads may come to it after the client's first token."""
        import numpy as np

        first_s, finish_s = np.asarray(sent.first_token_s, dtype=float), np.asarray(sent.finish_s, dtype=float)
        computed, decoded = (
            np.flatnonzero([each == engine for each in engines] & ~np.isnan(moments_s))
            for engines, moments_s in ((sent.engines, first_s), (sent.decodes, finish_s))
        )
        moment_s, at = np.concatenate((first_s[computed], finish_s[decoded])), np.concatenate((computed, decoded))
        order = np.argsort(moment_s, kind="stable")
        return cls(moment_s[order], at[order], order >= len(computed))


def _prompt_keys(each: ComputedTokens, block_tokens: int) -> tuple[int, ...]:
    return each.keys[: each.tokens // block_tokens]


def _beginning(keys: Sequence[int], held: Mapping[int, int], since: int) -> int:
    """How many of the first keys are held since ``since`` or later."""
    return next((at for at, key in enumerate(keys) if held.get(key, since - 1) < since), len(keys))
