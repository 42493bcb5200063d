"""Between which bounds the hits of a replay lie where nobody can follow the prefix caches, by two facts about vLLM.

- An engine hits blocks alone that it computed or was sent. Another request had every one of them in its prompt or
  answer, and came before the first token of the request that hits them. Windowed layers and evictions make hits fewer.
- Where all layers have full attention, more blocks in a cache never mean fewer hits. While nothing is evicted, an
  engine holds every prompt that it has computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, TypeAlias

from pdlab.results.schema import RequestRecord

if TYPE_CHECKING:
    from pdlab.traffic.prompts import PromptBlocks

# Of a KV pool: what the replay may fill for nothing of it to be evicted. The rest is for what is held beside it, such
# as prompts that wait for the end of a lease.
ROOM = 0.5

Blocks: TypeAlias = "Mapping[str, tuple[PromptBlocks, PromptBlocks]]"
"""Prompts, and prompts with their answers, by the ids of the requests."""


def most_tokens(records: Iterable[RequestRecord], blocks: Blocks, block_tokens: int, *, host: bool) -> dict[str, int]:
    """Of each answered request the tokens of its prompt that a cache had at most. ``host``: memory of the host may be
    behind the engines, which gives the last block of a prompt too, but for its last token."""
    sent = [(record.arrival_s, name) for record, name in _named(records) if name in blocks]
    told = [(record.first_token_s or 0.0, name) for record, name in _named(records) if record.ok]
    coming = sorted(sent, reverse=True)
    had: Counter[int] = Counter()
    most = {}
    for first_token_s, name in sorted(told):
        while coming and coming[-1][0] <= first_token_s:
            had.update(blocks[coming.pop()[1]][1].keys)
        prompt = blocks[name][0]
        tokens = _beginning(prompt, {key for key in prompt.keys if had[key] > 1}) * block_tokens  # one is its own
        whole = prompt.tokens - 1
        most[name] = min(tokens, whole if host else whole // block_tokens * block_tokens)
    return most


def least_tokens(
    records: Iterable[RequestRecord], blocks: Blocks, block_tokens: int, engines: Mapping[str, str | None]
) -> dict[str, int]:
    """Of each answered request the tokens of its prompt that the cache had at least, if nothing is evicted and all
    layers have full attention. ``engines``: those that computed the prompts (None: not known)."""
    told = [(record, name) for record, name in _named(records) if record.ok]
    ended = sorted(((record.first_token_s or 0.0, name) for record, name in told), reverse=True)
    held: dict[str, set[int]] = {}
    least = {}
    for record, name in sorted(told, key=lambda each: each[0].arrival_s):
        while ended and ended[-1][0] <= record.arrival_s:
            before = ended.pop()[1]
            if (engine := engines[before]) is not None:
                held.setdefault(engine, set()).update(blocks[before][0].keys)
        prompt = blocks[name][0]
        hit = _beginning(prompt, held.get(engines[name] or "", set()))
        least[name] = min(hit, (prompt.tokens - 1) // block_tokens) * block_tokens
    return least


def nothing_evicted(records: Iterable[RequestRecord], blocks: Blocks, block_tokens: int, pool_blocks: int) -> bool:
    """Whether each engine could have been given all requests, to compute the prompt and to decode it, in `ROOM` of its
    pool. Then none of their blocks has made room for another: vLLM takes the free blocks first that were free longest.
    """
    given = sum(2 * (-(-blocks[name][1].tokens // block_tokens) + 1) for _, name in _named(records) if name in blocks)
    return given <= ROOM * pool_blocks


def _named(records: Iterable[RequestRecord]) -> Sequence[tuple[RequestRecord, str]]:
    """Those that were sent, with their ids."""
    return [(record, record.replayed.id) for record in records if record.replayed is not None and record.replayed.sent]


def _beginning(prompt: PromptBlocks, held: Set[int]) -> int:
    """Blocks of the prompt, first to last, until one is not held."""
    count = 0
    while count < len(prompt.keys) and prompt.keys[count] in held:
        count += 1
    return count
