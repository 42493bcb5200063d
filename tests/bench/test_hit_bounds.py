"""Bounds on the hits of a replay, where nobody knows which engine computed a prompt or what it holds."""

from __future__ import annotations

import math

import numpy as np

from pdlab.bench.client.protocol import ComputedTokens
from pdlab.bench.hit_bounds import UNKNOWN, SentPrompts, least_tokens, most_tokens, nothing_evicted

SIZE = 4


def text(name: str, tokens: int, *keys: int, answer: tuple[int, ...] = ()) -> ComputedTokens:
    """A prompt with those blocks, and with the blocks of its answer."""
    return ComputedTokens(id=name, tokens=tokens, computed=tokens + SIZE * len(answer), keys=(*keys, *answer))


A = text("a", 9, 1, 2, answer=(3,))
B = text("b", 13, 1, 2, 4)
C = text("c", 17, 1, 2, 3, 5)
D = text("d", 12, 1, 2, 4)
SENT = SentPrompts(np.array([0.0, 0.5, 2.0, 4.0]), np.array([1.0, 1.5, 3.0, 5.0]), np.zeros(4, int), (A, B, C, D))


def most(sent: SentPrompts, *, host: bool = False) -> list[int]:
    tokens: list[int] = most_tokens(sent, SIZE, host=host).tolist()
    return tokens


def least(sent: SentPrompts) -> list[int]:
    tokens: list[int] = least_tokens(sent, SIZE).tolist()
    return tokens


def test_at_most_another_request_that_came_in_time_had_the_beginning() -> None:
    # a and b were in flight at once: either may have come to an engine first. c begins with a's answer.
    assert most(SENT) == [8, 8, 12, 8], "the last token is computed"
    assert most(SENT, host=True)[3] == 11, "memory of the host has the last block but for it"
    alone = SENT._replace(arrival_s=np.array([0.0, 1.1]), first_token_s=np.array([1.0, 1.5]), prompts=(A, B))
    assert most(alone) == [0, 8], "b came when a had been computed"
    failed = alone._replace(first_token_s=np.array([math.nan, 1.5]))
    assert most(failed) == [0, 8], "a request that failed may have been computed"


def test_at_least_an_engine_has_the_prompts_that_it_computed() -> None:
    assert least(SENT) == [0, 0, 8, 8], "a's answer is elsewhere"
    assert least(SENT._replace(engines=np.array([0, 0, 1, 0]))) == [0, 0, 0, 8]
    assert set(least(SENT._replace(engines=np.full(4, UNKNOWN)))) == {0}, "two that are not known may be two"
    assert least(SENT._replace(first_token_s=np.array([math.nan, math.nan, 3.0, 5.0]))) == [0, 0, 0, 8]
    assert all(low <= high for low, high in zip(least(SENT), most(SENT), strict=True))


def test_nothing_is_evicted_where_half_of_a_pool_takes_all_twice() -> None:
    given = 2 * (4 + 1) + 2 * (4 + 1)  # a: 13 tokens with its answer, b: 13
    assert nothing_evicted((A, B), SIZE, 2 * given)
    assert not nothing_evicted((A, B), SIZE, 2 * given - 1)
