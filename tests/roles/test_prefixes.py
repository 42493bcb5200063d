"""Which engines have the beginning of a prompt: compared with texts that are compared character by character."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.roles.prefixes import (
    CHARS_PER_TOKEN,
    CHUNK_TOKENS,
    LEAST_TOKENS,
    POOL_TOKENS,
    Prefixes,
    chunks_of,
    to_compute,
)

CHARS = CHUNK_TOKENS * CHARS_PER_TOKEN


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.text(alphabet="ab\ud800ß", max_size=3), st.text(max_size=4), st.text(max_size=4), st.integers(0, 3))
def test_two_prompts_have_the_chunks_in_common_that_begin_alike(seed: str, one: str, other: str, whole: int) -> None:
    common = (f"{seed}." * CHARS)[: CHARS * whole]
    first, second = common + (f"{one}," * CHARS)[:CHARS], common + (f"{other}," * CHARS)[:CHARS]
    assert len(chunks_of(first)) == len(first) // CHARS
    assert alike(chunks_of(first), chunks_of(second)) == alike(first, second) // CHARS


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2 * CHUNK_TOKENS, max_size=3 * CHUNK_TOKENS), st.data())
def test_ids_that_differ_at_one_place_have_the_chunks_before_it(ids: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:place], (ids[place] + 1) % 2**32, *ids[place + 1 :]]
    expected = min(place, len(ids) // CHUNK_TOKENS * CHUNK_TOKENS) // CHUNK_TOKENS
    assert alike(chunks_of(ids), chunks_of(other)) == expected


def test_what_is_apart_has_nothing_in_common() -> None:
    text = "x" * 2 * CHARS
    made = [chunks_of(text), chunks_of(text, "a salt"), chunks_of(text, "another"), chunks_of([120] * 2 * CHUNK_TOKENS)]
    assert [len(each) for each in made] == [2, 2, 2, 2]
    assert len({each[0] for each in made}) == len({each[1] for each in made}) == 4
    assert chunks_of(text) == made[0], "in every process the same"


@pytest.mark.parametrize("ids", [[-1] * 64, [2**32] * 64, [1.5] * 64, ["a"] * 64])
def test_ids_that_are_no_ids_have_no_chunks(ids: list[int]) -> None:
    assert chunks_of(ids) == []


def test_an_engine_has_what_it_kept_and_no_more() -> None:
    prefixes = Prefixes()
    chunks = chunks_of(list(range(10 * CHUNK_TOKENS)))
    assert prefixes.tokens("a", chunks) == 0
    prefixes.keep("a", chunks[:4])
    prefixes.keep("b", chunks)
    branch = chunks[:2] + chunks_of([7] * 3 * CHUNK_TOKENS)
    assert [prefixes.tokens("a", each) // CHUNK_TOKENS for each in (chunks, chunks[:3], branch, [])] == [4, 3, 2, 0]
    assert prefixes.tokens("b", chunks) == 10 * CHUNK_TOKENS
    prefixes.forget_others(["a", "c"])
    assert prefixes.tokens("b", chunks) == 0 and prefixes.tokens("a", chunks) == 4 * CHUNK_TOKENS


def test_a_full_pool_forgets_what_was_used_longest_ago_and_its_end_first() -> None:
    prefixes = Prefixes()
    old, new = chunks_of([1] * 4 * CHUNK_TOKENS), chunks_of([2] * 3 * CHUNK_TOKENS)
    pool = 5 * CHUNK_TOKENS
    prefixes.keep("a", old, pool)
    prefixes.keep("a", new, pool)
    assert prefixes.tokens("a", new) == 3 * CHUNK_TOKENS
    assert prefixes.tokens("a", old) == 2 * CHUNK_TOKENS, "its beginning is still there"
    prefixes.keep("a", old[:2], pool)
    prefixes.keep("a", chunks_of([3] * 3 * CHUNK_TOKENS), pool)
    assert prefixes.tokens("a", old) == 2 * CHUNK_TOKENS and prefixes.tokens("a", new) == 0


def test_the_beginning_of_a_prompt_is_there_while_a_later_part_is() -> None:
    """The search by halves rests on it: whatever prompts come, in whatever order, however small the pool."""
    rng = random.Random(5)
    prompts = [[rng.randrange(2) for _ in range(8 * CHUNK_TOKENS)] for _ in range(4)]
    prompts += [prompt[: 3 * CHUNK_TOKENS] + rng.choices(range(9), k=5 * CHUNK_TOKENS) for prompt in prompts]
    every = [chunks_of(prompt) for prompt in prompts]
    prefixes = Prefixes()
    for _ in range(300):
        prefixes.keep("a", rng.choice(every)[: rng.randint(1, 8)], CHUNK_TOKENS * 12)
        for chunks in every:
            there = [chunk in prefixes._held["a"] for chunk in chunks]
            assert there == sorted(there, reverse=True)
            assert prefixes.tokens("a", chunks) == CHUNK_TOKENS * sum(there)


def test_a_prompt_that_was_pulled_is_found_as_a_whole_alone() -> None:
    """Of layers with a sliding window its engine has the end, until it computes another prompt that begins so."""
    prefixes = Prefixes()
    chunks = chunks_of(list(range(8 * CHUNK_TOKENS)))
    other = chunks[:4] + chunks_of([7] * 2 * CHUNK_TOKENS)

    def found(*queries: list[int]) -> list[int]:
        return [prefixes.tokens("a", each) // CHUNK_TOKENS for each in queries]

    prefixes.keep("a", chunks[:6], pulled=True)
    assert found(chunks, chunks[:6], chunks[:5], other) == [6, 6, 0, 0]
    prefixes.keep("a", chunks, pulled=True)
    assert found(chunks, chunks[:7], other) == [8, 6, 0], "the next turn, and the one before"
    prefixes.keep("a", other)
    assert found(chunks, chunks[:7], chunks[:5], other) == [8, 6, 4, 6], "what it computed it has, and keeps"
    prefixes.keep("a", other, pulled=True)
    assert found(chunks[:3], other) == [3, 6]


def test_an_engine_that_keeps_ends_alone_has_a_fork_from_the_third_time_on() -> None:
    """As vLLM does it for gpt-oss by default: the second prompt with that beginning finds nothing of it."""
    prefixes = Prefixes()
    common = chunks_of([1] * 4 * CHUNK_TOKENS)
    forks = [common + chunks_of([9, each] * CHUNK_TOKENS) for each in range(3)]
    found = []
    for fork in forks:
        found.append(prefixes.tokens("a", fork) // CHUNK_TOKENS)
        prefixes.keep("a", fork, sparse=True)
    assert found == [0, 0, 4]
    follow_up = forks[2] + chunks_of([5] * CHUNK_TOKENS)
    assert prefixes.tokens("a", follow_up) == CHUNK_TOKENS * len(forks[2]), "the next turn finds all of the one before"
    prefixes.keep("b", forks[0], sparse=True)
    prefixes.keep("b", forks[1], pulled=True, sparse=True)
    assert prefixes.tokens("b", forks[2]) == 0, "what was pulled has no window where it parted"


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_no_prompt_is_for_nothing(tokens: int, cached: int) -> None:
    left = to_compute(tokens, cached)
    assert min(tokens, LEAST_TOKENS) <= left <= tokens
    assert left == tokens - cached or left <= LEAST_TOKENS


def test_an_engine_that_has_not_told_its_pool_has_a_bound_too() -> None:
    prefixes = Prefixes()
    prefixes.keep("a", range(2 * POOL_TOKENS // CHUNK_TOKENS))
    assert len(prefixes._held["a"]) == POOL_TOKENS // CHUNK_TOKENS
