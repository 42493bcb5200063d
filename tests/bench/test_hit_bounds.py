"""Bounds on the hits of a replay, where the engine of a prompt, or what it holds, is unknown."""

from __future__ import annotations

import math

from pdlab.bench.client.protocol import ComputedTokens
from pdlab.bench.hit_bounds import SentPrompts, least_tokens, most_tokens

SIZE = 4


def text(name: str, tokens: int, *keys: int, answer: tuple[int, ...] = ()) -> ComputedTokens:
    """A prompt with those blocks, and with the blocks of its answer."""
    return ComputedTokens(id=name, tokens=tokens, computed=tokens + SIZE * len(answer), keys=(*keys, *answer))


A = text("a", 9, 1, 2, answer=(3,))
B = text("b", 13, 1, 2, 4)
C = text("c", 17, 1, 2, 3, 5)
D = text("d", 12, 1, 2, 4)
# All are computed by e0 and decoded by e1.
SENT = SentPrompts(
    arrival_s=(0.0, 0.5, 2.0, 4.0),
    first_token_s=(1.0, 1.5, 3.0, 5.0),
    finish_s=(1.2, 1.7, 3.2, 5.2),
    engines=("e0",) * 4,
    decodes=("e1",) * 4,
    prompts=(A, B, C, D),
)
ROOMY = 1000


def most(sent: SentPrompts, *, host: bool = False) -> list[int]:
    tokens: list[int] = most_tokens(sent, SIZE, host=host).tolist()
    return tokens


def least(sent: SentPrompts, pool_blocks: int = ROOMY) -> list[int]:
    tokens: list[int] = least_tokens(sent, SIZE, pool_blocks).tolist()
    return tokens


def test_at_most_another_request_that_came_in_time_had_the_beginning() -> None:
    # a and b were in flight at once: either may have come to an engine first. c begins with a's answer.
    assert most(SENT) == [8, 8, 12, 8], "the last token is computed"
    assert most(SENT, host=True)[3] == 11, "memory of the host has the last block but for it"
    alone = SENT._replace(arrival_s=(0.0, 1.1), first_token_s=(1.0, 1.5), prompts=(A, B))
    assert most(alone) == [0, 8], "b came when a had been computed"
    failed = alone._replace(first_token_s=(math.nan, 1.5))
    assert most(failed) == [0, 8], "a request that failed may have been computed"


def test_at_least_an_engine_has_the_prompts_that_it_computed() -> None:
    assert least(SENT) == [0, 0, 8, 8], "a's answer is elsewhere"
    assert set(least(SENT._replace(engines=(None,) * 4))) == {0}, "two that are not known may be two"
    assert least(SENT._replace(first_token_s=(math.nan, math.nan, 3.0, 5.0))) == [0, 0, 0, 8]
    assert all(low <= high for low, high in zip(least(SENT), most(SENT), strict=True))


def test_at_least_an_engine_has_the_prompts_and_answers_that_it_decoded() -> None:
    assert least(SENT._replace(engines=("e0", "e0", "e1", "e0"))) == [0, 0, 12, 8]
    assert least(SENT._replace(engines=("e0", "e0", "e2", "e0"))) == [0, 0, 0, 8]
    late = SENT._replace(engines=("e0", "e0", "e1", "e0"), finish_s=(2.5, 2.5, 3.2, 5.2))
    assert least(late) == [0, 0, 0, 8], "e1 may have read the KV cache after the first token"


def test_a_block_is_held_until_half_of_the_pool_may_be_others() -> None:
    """a, b, c and d take 5, 5, 6 and 4 blocks. Those that ended before the holder came are older than its own."""
    assert least(SENT, 32) == [0, 0, 8, 8], "a, b and c are 16"
    assert least(SENT, 30) == least(SENT, 20) == [0, 0, 0, 8], "d finds what c had, which came after the end of a and b"
    assert set(least(SENT, 18)) == {0}
    elsewhere = SENT._replace(engines=("e2", "e0", "e0", "e0"))
    assert [least(elsewhere, pool)[2] for pool in (22, 20)] == [8, 0], "b and c are 11"
    unknown = elsewhere._replace(decodes=(None, "e1", "e1", "e1"))
    assert [least(unknown, pool)[2] for pool in (32, 30)] == [8, 0], "e0 may have decoded a"
