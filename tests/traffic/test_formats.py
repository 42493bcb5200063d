"""Every format of traces: what is read of small made-up files, and that a bad line is named."""

from __future__ import annotations

import contextlib
import io
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.core.errors import UsageError
from pdlab.traffic.compiled import compiled, of_spec
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats import texts
from pdlab.traffic.requests import TrafficHead, TrafficRequest

DATA = Path(__file__).resolve().parents[1] / "data" / "traffic"


def replay(path: Path | str, **keys: Any) -> tuple[TrafficHead, dict[str, TrafficRequest]]:
    head, requests = of_spec(TrafficFile(replay=str(DATA / path), **keys), str(path))
    return head, {request.id: request for request in requests}


class TestMooncake:
    def test_recorded_prompts_are_their_blocks(self) -> None:
        head, got = replay("mooncake.jsonl", follow="recorded", spread_ticks="never")
        assert (head.kind, head.ticks_s, head.spread, head.inferred) == ("mooncake", 3.0, False, False)
        assert got["r1"] == TrafficRequest("r1", "r1", (("h0", 512), ("h1", 512), ("h3", 512), ("h4", 164)), 12, 0.0)
        assert [each.at_s for each in got.values()] == [0.0, 0.0, 3.0, 3.0, 8.999, 12.0, 12.0, 15.0]
        assert not any(each.parent for each in got.values())

    def test_a_follow_up_waits_for_its_parent_and_has_its_length(self) -> None:
        """r5 begins with the three full blocks of r1, r8 with the four of r5; r6 is as long as r1, and follows none."""
        _, got = replay("mooncake.jsonl")
        assert {name: each.parent for name, each in got.items() if each.parent} == {"r5": "r1", "r8": "r5"}
        assert got["r5"].blocks == (("r5/new", 2300 - 1700 - 12),)
        assert got["r8"].blocks == (("r8/new", 3000 - 2300 - 44),)
        assert {got[name].session for name in ("r1", "r5", "r8")} == {"r1"}
        assert got["r8"].at_s is not None, "not before it was recorded, nor before its parent has ended"

    def test_scale_divides_lengths_and_blocks(self) -> None:
        _, got = replay("mooncake.jsonl", follow="recorded", scale=16)
        assert got["r1"].blocks == (("h0", 32), ("h1", 32), ("h3", 32), ("h4", 10))
        assert (got["r1"].out, got["r4"].out, got["r4"].blocks[-1]) == (1, 1, ("h9", 6))

    def test_ticks_are_spread_within_themselves(self) -> None:
        head, got = replay("mooncake.jsonl", seed=7)
        assert head.spread
        assert head.ticks_s == 3.0
        ticks = [0, 0, 1, 1, 3, 4, 4, 5]
        for number, tick in enumerate(ticks, start=1):
            at_s = got[f"r{number}"].at_s
            assert at_s is not None
            assert 3.0 * tick <= at_s < 3.0 * (tick + 1)
            assert at_s != 3.0 * tick
        moments = [each.at_s or 0.0 for each in got.values()]
        assert moments == sorted(moments)
        assert replay("mooncake.jsonl", seed=8)[1]["r1"].at_s != got["r1"].at_s

    def test_a_window_changes_when_and_nothing_else(self) -> None:
        _, whole = replay("mooncake.jsonl", spread_ticks="never", follow="recorded")
        _, part = replay("mooncake.jsonl", spread_ticks="never", follow="recorded", window=(3, 12))
        assert [*part] == ["r3", "r4", "r5"]
        assert all(part[name].blocks == whole[name].blocks for name in part)
        assert [each.at_s for each in part.values()] == [0.0, 0.0, pytest.approx(5.999)]
        _, causal = replay("mooncake.jsonl", spread_ticks="never", window=(3, 12))
        assert causal["r5"].parent is None, "its parent is not sent"
        assert causal["r5"].blocks == whole["r5"].blocks

    def test_speed_divides_times(self) -> None:
        _, got = replay("mooncake.jsonl", spread_ticks="never", speed=2)
        assert got["r8"].at_s == 7.5

    def test_lines_out_of_order_are_sorted(self, tmp_path: Path) -> None:
        lines = (DATA / "mooncake.jsonl").read_text(encoding="utf-8").splitlines()
        path = tmp_path / "shuffled.jsonl"
        path.write_text("\n".join([*lines[3:], *lines[:3]]), encoding="utf-8")
        _, got = replay(path, follow="recorded")
        assert [(each.at_s or 0.0) for each in got.values()] == [0.0, 0.0, 3.0, 3.0, 8.999, 12.0, 12.0, 15.0]

    def test_two_that_share_a_system_prompt_are_no_conversation(self, tmp_path: Path) -> None:
        """Of all that begin with the same two blocks the second may follow the first, and no more follow any."""
        rows = [
            {"timestamp": 1000 * number, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 10 + number]}
            for number in range(5)
        ]
        rows[0]["input_length"] = 1200
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        _, got = replay(path)
        assert {name: each.parent for name, each in got.items() if each.parent} == {"r2": "r1"}


def test_bailian_follows_the_chats_that_it_names() -> None:
    head, got = replay("bailian.jsonl")
    assert (head.kind, head.ticks_s, head.inferred) == ("bailian", None, False)
    assert got["c1"].blocks == (("h10", 16), ("h11", 16), ("h12", 8))
    assert (got["c2"].parent, got["c2"].blocks, got["c2"].fresh) == ("c1", (("c2/new", 70 - 40 - 6),), False)
    assert (got["c3"].parent, got["c3"].fresh, got["c3"].blocks) == ("c2", True, (("h10", 16), ("h30", 4)))
    assert {each.session for each in got.values()} == {"c1", "c5"}
    assert got["c2"].at_s == pytest.approx(1.25)


@pytest.mark.parametrize("name", ["azure-2023.csv", "azure-2024.csv"])
def test_azure(name: str) -> None:
    head, got = replay(name)
    first = next(iter(got.values()))
    assert (head.kind, first.blocks, first.out, first.at_s) == ("csv", (("r2", 374),), 44, 0.0)
    assert got["r3"].at_s == pytest.approx(0.052 if name == "azure-2023.csv" else 1 - 0.123456)


def test_burstgpt_leaves_failed_requests_out_and_counts_them() -> None:
    head, got = replay("burstgpt-1.csv")
    assert (head.left_out, [*got]) == (1, ["r2", "r3", "r5", "r6"])
    assert (got["r3"].blocks, got["r3"].out, got["r6"].at_s) == ((("r3", 1087),), 230, 113.0)


def test_burstgpt_3_has_sessions_and_columns_between() -> None:
    _, got = replay("burstgpt-3.csv")
    assert [each.session for each in got.values()] == ["s1111aa", "s2222bb", "s1111aa"]
    assert (got["r2"].blocks, got["r2"].out, got["r4"].at_s) == ((("r2", 520),), 30, 33.5)


class TestWeka:
    def test_agents_wait_for_what_they_called(self) -> None:
        _, got = replay("weka.json", rate_rps=1)
        name = "fix-a-test"
        assert [*got] == [f"{name}/{part}" for part in ("0", "1", "2/0", "2/1", "3", "4")]
        first, second, sub, sub_end, third, last = got.values()
        assert first.blocks == tuple((f"{name}/h{n}", tokens) for n, tokens in ((1, 64), (2, 64), (3, 64), (4, 8)))
        assert (first.at_s, first.parent) == (0.0, None)
        assert (second.parent, second.gap_s, second.blocks) == (first.id, 1.3, ((f"{name}/1/new", 230 - 200 - 9),))
        assert (sub.parent, sub.fresh, sub.blocks[0]) == (second.id, True, (f"{name}/h1", 64))
        assert (sub_end.parent, sub_end.gap_s) == (sub.id, 0.2)
        assert (third.parent, third.waits, third.gap_s) == (second.id, (sub_end.id,), 0.5)
        assert third.blocks == ((f"{name}/3/new", 300 - 230 - 12),)
        assert (last.parent, last.fresh) == (third.id, True), "its prompt was compacted"
        assert all(each.at_s is None for each in (second, sub, sub_end, third, last))

    def test_recorded_has_the_times_of_the_file(self) -> None:
        _, got = replay("weka.json", rate_rps=1, follow="recorded")
        assert [each.at_s for each in got.values()] == [0.0, 4.5, 6.1, 9.0, 12.0, 40.0]
        assert not any(each.parent for each in got.values())

    def test_a_line_or_a_file_per_conversation(self, tmp_path: Path) -> None:
        row = json.loads((DATA / "weka.json").read_text(encoding="utf-8"))
        other = {**row, "id": "other"}
        lines = tmp_path / "two.jsonl"
        lines.write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n", encoding="utf-8")
        for number, each in enumerate((row, other)):
            (tmp_path / f"{number}.json").write_text(json.dumps(each), encoding="utf-8")
        _, by_line = replay(lines, rate_rps=1)
        _, by_file = replay(tmp_path, rate_rps=1)
        assert len(by_line) == 12
        assert by_line == by_file
        assert by_line["other/0"].blocks[0][0] == "other/h1", "hashes count within a conversation"


def test_vllm_custom() -> None:
    head, got = replay("custom.jsonl", rate_rps=2)
    assert (head.kind, head.tokens) == ("vllm custom", "estimated")
    assert got["r1"].messages == ({"role": "user", "content": "What is a block of a cache?"},)
    assert (got["r1"].new_tokens, got["r1"].out, got["r1"].at_s) == (7, 12, 0.0)
    assert (got["r2"].at_s or 0.0) > 0


def test_sharegpt_turns_follow_each_other() -> None:
    _, got = replay("sharegpt.json", rate_rps=2, think_s="3")
    assert [*got] == ["s1t0", "s1t1", "s2t0"]
    first, second, other = got.values()
    assert [each["role"] for each in first.messages or ()] == ["system", "user"]
    assert (second.parent, second.gap_s, second.at_s) == ("s1t0", 3.0, None)
    assert second.messages == ({"role": "user", "content": "And a share?"},)
    assert (first.out, other.messages) == (16, ({"role": "user", "content": "Count to three."},))


def test_openai_batch() -> None:
    _, got = replay("batch.jsonl", rate_rps=2)
    assert [*got] == ["r1", "r2"]
    assert len(got["r1"].blocks) == 2
    tools = [{"type": "function", "function": {"name": "wait"}}]
    assert (got["r1"].extra, got["r2"].extra) == ({"tools": tools, "reasoning_effort": "low"}, None)
    assert (got["r2"].messages, got["r2"].out) == (({"role": "user", "content": "Once upon a time"},), 9)


def test_equal_texts_are_equal_blocks(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "same"}\n{"prompt": "other"}\n{"prompt": "same"}\n', encoding="utf-8")
    _, got = replay(path, rate_rps=1, output_tokens=3)
    assert got["r1"].blocks == got["r3"].blocks
    assert got["r1"].blocks != got["r2"].blocks


MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'
CSV = "arrival_s,input_tokens,output_tokens\n"
TEXT = {"rate_rps": 1.0}


@pytest.mark.parametrize(
    ("text", "keys", "complaint"),
    [
        (MOONCAKE + '{"x": ' + 10**5 * "[" + 10**5 * "]" + "}", {}, "line 2: is no JSON"),
        (CSV + "0,5,1\n0,5," + 200_000 * "9" + "\n", {}, "line 3: is no CSV (field larger than field limit"),
        ("[" + 10**5 * "[", TEXT, "conversation 1: is no JSON"),
    ],
)  # fmt: skip
def test_a_bad_line_of_any_length_is_named(tmp_path: Path, text: str, keys: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        replay(path, **keys)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_broken_list_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one wrong character would have the whole of a large file in memory."""
    monkeypatch.setattr(texts, "CHUNK_CHARS", 64)
    path = tmp_path / "trace.json"
    good = '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}'
    path.write_text(f"[{good}, {good.replace(':', ' ')}{1000 * (', ' + good)}]", encoding="utf-8")
    read: list[int] = []

    def chars(stream: io.StringIO, size: int) -> str:
        read.append(size)
        return stream.read(size)

    @contextlib.contextmanager
    def opened(_: Path) -> Iterator[Any]:
        stream = io.StringIO(path.read_text(encoding="utf-8"))
        yield types.SimpleNamespace(read=lambda size: chars(stream, size))

    monkeypatch.setattr(texts, "opened", opened)
    with pytest.raises(UsageError, match=r"conversation 2: is no JSON$"):
        [*texts.sharegpt(path, TrafficFile(replay=str(path), rate_rps=1))]
    assert sum(read) < 1000


def test_a_folder_without_a_conversation_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \*\.json in this folder"):
        replay(tmp_path)


def test_empty_lines_before_the_names_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n\n" + CSV + "0,5,1\n", encoding="utf-8")
    assert replay(path)[1]["r4"].new_tokens == 5


def test_a_trace_by_itself_is_replayed_as_it_is() -> None:
    head, requests = compiled(DATA / "mooncake.jsonl")
    assert (head.kind, head.source, len([*requests])) == ("mooncake", "mooncake.jsonl", 8)
