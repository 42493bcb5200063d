"""Between which bounds the hits of a replay lie where nobody can follow the prefix caches, by two facts about vLLM.

- An engine hits blocks alone that it computed or was sent. Another request had every one of them in its prompt or
  answer, and came before the first token of the request that hits them. Windowed layers and evictions make hits fewer.
- Where all layers have full attention, more blocks in a cache never mean fewer hits. While nothing is evicted, an
  engine holds every prompt that it has computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from pdlab.bench.client.protocol import ComputedTokens
from pdlab.results.columns import each, room, sorted_order

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pdlab.results.level_data import Codes, Column

UNKNOWN = -1
# Of a KV pool: what the replay may fill for nothing of it to be evicted. The rest is for what is held beside it, such
# as prompts that wait for the end of a lease.
ROOM = 0.5
# How often a block's key came is counted in so many bytes. Two keys that share one make an upper bound larger.
PLACES = 2**25


class SentPrompts(NamedTuple):
    """Requests of a replay that were sent, in the order in which they came. ``first_token_s``: NaN: not answered.
    ``engines``: the numbers of those that computed their prompts, or `UNKNOWN`."""

    arrival_s: Column
    first_token_s: Column
    engines: Codes
    prompts: Sequence[ComputedTokens]

    def by_first_token(self) -> Codes:
        """The places of those that were answered, in the order of their first tokens."""
        import numpy as np

        return sorted_order(self.first_token_s)[: np.count_nonzero(~np.isnan(self.first_token_s))]


def most_tokens(sent: SentPrompts, block_tokens: int, *, host: bool) -> Codes:
    """Of each answered request the tokens of its prompt that a cache had at most. ``host``: memory of the host may be
    behind the engines, which gives the last block of a prompt too, but for its last token."""
    import numpy as np

    def places(keys: tuple[int, ...]) -> NDArray[np.int64]:
        return (np.array(keys, dtype=np.uint64) % PLACES).astype(np.int64)

    had, most, come = np.zeros(PLACES, dtype=np.uint8), room(len(sent.arrival_s), "q"), 0
    for at in each(sent.by_first_token()):
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


def least_tokens(sent: SentPrompts, block_tokens: int) -> Codes:
    """Of each answered request the tokens of its prompt that the cache had at least, if nothing is evicted and all
    layers have full attention."""
    least, ended, after = room(len(sent.arrival_s), "q"), sent.by_first_token(), 0
    held: dict[int, set[int]] = {}
    for at, engine in enumerate(each(sent.engines)):
        while after < len(ended) and sent.first_token_s[ended[after]] <= sent.arrival_s[at]:
            if (other := int(sent.engines[ended[after]])) != UNKNOWN:
                held.setdefault(other, set()).update(_prompt_keys(sent.prompts[ended[after]], block_tokens))
            after += 1
        if engine in held and not math.isnan(sent.first_token_s[at]):
            prompt = sent.prompts[at]
            blocks = _beginning(_prompt_keys(prompt, block_tokens), held[engine])
            least[at] = min(blocks, (prompt.tokens - 1) // block_tokens) * block_tokens
    return least


def nothing_evicted(prompts: Iterable[ComputedTokens], block_tokens: int, pool_blocks: int) -> bool:
    """Whether each engine could have been given all requests, to compute the prompt and to decode it, in `ROOM` of its
    pool. Then none of their blocks has made room for another: vLLM takes the free blocks first that were free longest.
    """
    return sum(2 * (-(-each.computed // block_tokens) + 1) for each in prompts) <= ROOM * pool_blocks


def _prompt_keys(each: ComputedTokens, block_tokens: int) -> tuple[int, ...]:
    return each.keys[: each.tokens // block_tokens]


def _beginning(keys: Sequence[int], held: Set[int]) -> int:
    """Keys, first to last, until one is not held."""
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))
