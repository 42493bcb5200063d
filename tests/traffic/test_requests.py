"""The compiled form: what is written reads back equal, and what cannot be sent is refused by line."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from pdlab.core.errors import UsageError
from pdlab.traffic.blocks import drawn_words
from pdlab.traffic.compiled import compiled
from pdlab.traffic.prompts import PromptsInFlight, TrafficPrompts
from pdlab.traffic.requests import TrafficHead, TrafficRequest, is_compiled, read_head, read_requests, write_requests

ROOT = TrafficRequest("a", "s", (("sys", 64), ("a/u", 20)), 40, at_s=1.5, tenant="t")
FOLLOW = TrafficRequest("b", "s", (("b/u", 7),), 3, parent="a", gap_s=2.0)
FRESH = TrafficRequest("c", "s", (("c/u", 7),), 3, parent="a", waits=("b",), fresh=True, gap_s=0.5)


def written(path: Path, *requests: TrafficRequest) -> str:
    with path.open("w", encoding="utf-8") as stream:
        return write_requests(stream, TrafficHead(seed=7, ticks_s=3.0), requests)


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    digest = written(path, ROOT, FOLLOW, FRESH)
    assert list(read_requests(path)) == [ROOT, FOLLOW, FRESH]
    assert read_head(path) == TrafficHead(seed=7, ticks_s=3.0)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert is_compiled(path)
    assert path.read_text(encoding="utf-8").splitlines()[2] == (
        '{"id":"b","session":"s","parent":"a","gap_s":2.0,"blocks":[["b/u",7]],"out":3}'
    )


def test_continues_is_the_parent_unless_the_prompt_begins_anew() -> None:
    assert (ROOT.continues, FOLLOW.continues, FRESH.continues) == (None, "a", None)


def test_a_head_may_have_spaces(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    written(path, ROOT)
    path.write_text(path.read_text(encoding="utf-8").replace('{"traffic":1,', '{ "traffic": 1, '), encoding="utf-8")
    assert is_compiled(path)
    assert [*compiled(path)[1]] == [ROOT]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n', encoding="utf-8")
    assert not is_compiled(path)
    with pytest.raises(UsageError, match="line 1: timestamp: is not a known key"):
        read_head(path)


def test_the_words_of_a_block_follow_from_seed_and_key_alone() -> None:
    words = drawn_words(7, "sys", 1000, 431)
    assert (drawn_words(7, "sys", 400, 431) == words[:400]).all()
    assert words.min() >= 0
    assert words.max() == 430
    assert (drawn_words(8, "sys", 1000, 431) != words).any()
    assert (drawn_words(7, "sys2", 1000, 431) != words).any()


def test_the_words_of_a_block_are_these_for_ever() -> None:
    assert drawn_words(7, "sys", 6, 1000).tolist() == [545, 908, 252, 931, 985, 240]


def test_prompts_are_made_when_they_come_and_forgotten_when_they_end() -> None:
    requests = [
        TrafficRequest(
            id=f"c{chat}t{turn}",
            session=f"c{chat}",
            parent=f"c{chat}t{turn - 1}" if turn else None,
            at_s=None if turn else 1.0 * chat,
            blocks=(("system", 40), (f"{chat}/{turn}", 30)),
            out=9,
        )
        for chat in range(3)
        for turn in range(4)
    ]
    known, prompts = TrafficPrompts(16), PromptsInFlight(requests, 16)
    for number, request in enumerate(requests):
        assert prompts.of(number) == prompts.of(number) == known.of(request)
        prompts.forget(number)
    assert not prompts._known and not prompts._prompts._ends and not prompts._prompts._left


def test_blocks_have_one_key_where_all_text_until_their_end_is_the_same() -> None:
    rng, size = random.Random(3), 4
    seen: dict[int, tuple[tuple[str, int], ...]] = {}
    of_text: dict[tuple[tuple[str, int], ...], int] = {}
    for number in range(400):
        blocks = tuple((rng.choice("abc"), rng.choice((1, 3, 4, 5, 8, 13))) for _ in range(rng.randint(1, 5)))
        request = TrafficRequest(id=f"r{number}", session="s", blocks=blocks, out=9, at_s=0.0)
        text = [(key, at) for key, tokens in (*blocks, (f"answer/r{number}", 8)) for at in range(tokens)]
        keys = TrafficPrompts(size).of(request)[1].keys
        assert len(keys) == len(text) // size
        for count, key in enumerate(keys, start=1):
            until = tuple(text[: count * size])
            assert seen.setdefault(key, until) == until and of_text.setdefault(until, key) == key
