"""Bounds on the hits of a replay, where nobody knows which engine computed a prompt or what it holds."""

from __future__ import annotations

from typing import Any

from pdlab.bench.hit_bounds import least_tokens, most_tokens, nothing_evicted
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.traffic.prompts import PromptBlocks

SIZE = 4


def record(name: str, arrival_s: float, first_token_s: float | None, **own: Any) -> RequestRecord:
    return RequestRecord(
        arrival_s=arrival_s,
        first_token_s=first_token_s,
        finish_s=first_token_s,
        input_tokens=1,
        output_tokens=1,
        error=None if first_token_s else "x",
        replayed=ReplayedRequest(id=name, session=name, **own),
    )


def text(tokens: int, *keys: int, answer: tuple[int, ...] = ()) -> tuple[PromptBlocks, PromptBlocks]:
    """A prompt with those blocks, and with the blocks of its answer."""
    return PromptBlocks(tokens, keys), PromptBlocks(tokens + SIZE * len(answer), (*keys, *answer))


BLOCKS = {
    "a": text(9, 1, 2, answer=(3,)),
    "b": text(13, 1, 2, 4),
    "c": text(17, 1, 2, 3, 5),
    "d": text(12, 1, 2, 4),
}


def test_at_most_another_request_that_came_in_time_had_the_beginning() -> None:
    records = [record("a", 0.0, 1.0), record("b", 0.5, 1.5), record("c", 2.0, 3.0), record("d", 4.0, 5.0)]
    most = most_tokens(records, BLOCKS, SIZE, host=False)
    # a and b were in flight at once: either may have come to an engine first. c begins with a's answer.
    assert most == {"a": 8, "b": 8, "c": 12, "d": 8}, "the last token is computed"
    assert most_tokens(records, BLOCKS, SIZE, host=True)["d"] == 11, "memory of the host has the last block but for it"
    alone = most_tokens([record("a", 0.0, 1.0), record("b", 1.1, 1.5)], BLOCKS, SIZE, host=False)
    assert alone == {"a": 0, "b": 8}, "b came when a had been computed"
    failed = most_tokens([record("a", 0.0, None), record("b", 1.1, 1.5)], BLOCKS, SIZE, host=False)
    assert failed == {"b": 8}, "a request that failed may have been computed"
    unsent = most_tokens([record("a", 0.0, None, sent=False), record("b", 1.1, 1.5)], BLOCKS, SIZE, host=False)
    assert unsent == {"b": 0}


def test_at_least_an_engine_has_the_prompts_that_it_computed() -> None:
    records = [record("a", 0.0, 1.0), record("b", 0.5, 1.5), record("c", 2.0, 3.0), record("d", 4.0, 5.0)]
    engines: dict[str, str | None] = {"a": "e0", "b": "e0", "c": "e0", "d": "e0"}
    assert least_tokens(records, BLOCKS, SIZE, engines) == {"a": 0, "b": 0, "c": 8, "d": 8}, "a's answer is elsewhere"
    assert least_tokens(records, BLOCKS, SIZE, {**engines, "c": "e1"})["c"] == 0
    unknown = dict.fromkeys(engines)
    assert set(least_tokens(records, BLOCKS, SIZE, unknown).values()) == {0}, "two that are not known may be two"
    most = most_tokens(records, BLOCKS, SIZE, host=False)
    assert all(tokens <= most[name] for name, tokens in least_tokens(records, BLOCKS, SIZE, engines).items())


def test_nothing_is_evicted_where_half_of_a_pool_takes_all_twice() -> None:
    records = [record("a", 0.0, 1.0), record("b", 0.5, None)]
    given = 2 * (4 + 1) + 2 * (4 + 1)  # a: 13 tokens with its answer, b: 13
    assert nothing_evicted(records, BLOCKS, SIZE, 2 * given)
    assert not nothing_evicted(records, BLOCKS, SIZE, 2 * given - 1)
