"""Workload files: what is refused, what is generated, and that nothing but the seed changes it."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.core.errors import UsageError
from pdlab.core.workload import Level, Open, Workload
from pdlab.traffic import describe
from pdlab.traffic.bounded import percentile_of
from pdlab.traffic.compiled import compiled, of_spec
from pdlab.traffic.describe import described
from pdlab.traffic.export import WORDS, aiperf, vocabulary
from pdlab.traffic.file import TrafficFile, is_traffic, load_file
from pdlab.traffic.groups import Groups
from pdlab.traffic.requests import TrafficHead, TrafficRequest, line_of, read_requests, write_requests

DATA = Path(__file__).resolve().parents[1] / "data" / "traffic"
CHAT = {
    "rate_rps": 2,
    "sessions": 200,
    "turns": "4 geometric:max=8",
    "user_tokens": "60 lognormal:0.8",
    "answer_tokens": 40,
    "think_s": "5 lognormal:0.7",
}


def written(tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "workload.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def requests(path: Path) -> list[TrafficRequest]:
    return [*compiled(path)[1]]


def test_the_seed_of_the_file_draws_lengths_too(tmp_path: Path) -> None:
    def lengths(of_file: int, **own: int) -> list[int]:
        workload = {"input_tokens": 1000, "output_tokens": 50, "lengths": "uniform:0.5-1.5"} | own
        path = written(tmp_path, seed=of_file, random={"rate_rps": 1, "requests": 20, "workload": workload})
        return [each.new_tokens for each in requests(path)]

    own = {"seed": 5}
    assert lengths(1) == lengths(1) != lengths(2)
    assert lengths(1, **own) == lengths(2, **own) == lengths(5), "the workload's own seed, where it has one"


def test_the_limit_of_a_time_is_in_seconds(tmp_path: Path) -> None:
    got = requests(written(tmp_path, conversations={**CHAT, "think_s": "20 lognormal:0.7,max=30"}))
    gaps_s = [each.gap_s for each in got if each.parent]
    assert max(gaps_s) == 30.0
    assert 15 < statistics.fmean(gaps_s) < 20


def test_a_file_of_lengths_alone_is_no_workload_file() -> None:
    assert is_traffic({"replay": "x"})
    assert not is_traffic({"input_tokens": 5000})
    assert not is_traffic([1])


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,5,1\n1,6,2\n", encoding="utf-8")
    path = written(tmp_path, replay="trace.csv")
    assert load_file(path).replay == str(tmp_path / "trace.csv")
    assert [each.blocks for each in requests(path)] == [(("r2", 5),), (("r3", 6),)]


class TestConversations:
    def test_turns_add_to_what_came_before(self, tmp_path: Path) -> None:
        got = requests(written(tmp_path, seed=7, conversations={**CHAT, "system_tokens": 100}))
        for before, after in itertools.pairwise(got):
            if after.session == before.session:
                assert (after.parent, after.at_s, len(after.blocks)) == (before.id, None, 1)
                assert after.gap_s > 0
            else:
                assert (after.parent, after.blocks[0]) == (None, ("system/all", 100))
        assert len({each.session for each in got}) == 200

    def test_quantities_are_as_written(self, tmp_path: Path) -> None:
        got = requests(written(tmp_path, seed=7, conversations={**CHAT, "sessions": 1500}))
        turns = [sum(1 for _ in group) for group in _sessions(got)]
        user = [each.blocks[-1][1] for each in got]
        assert max(turns) == 8
        assert statistics.fmean(turns) == pytest.approx(4 * (1 - 0.75**8), rel=0.05)  # the mean of a cut geometric
        assert statistics.fmean(user) == pytest.approx(60, rel=0.05)
        assert {each.out for each in got} == {40}
        starts = [each.at_s for each in got if each.at_s is not None]
        assert starts[-1] == pytest.approx(1500 / 2, rel=0.08)

    def test_tenants_by_their_shares(self, tmp_path: Path) -> None:
        tenants = {"a": {"share": 3, "system_tokens": 64}, "b": {"share": 1}}
        got = requests(written(tmp_path, conversations={**CHAT, "sessions": 1000}, tenants=tenants))
        roots = [each for each in got if each.parent is None]
        assert sum(each.tenant == "a" for each in roots) / len(roots) == pytest.approx(0.75, abs=0.04)
        assert all((each.blocks[0] == ("system/a", 64)) == (each.tenant == "a") for each in roots)

    def test_a_context_is_bounded(self, tmp_path: Path) -> None:
        path = written(tmp_path, conversations={**CHAT, "turns": 50, "most_tokens": 1000})
        ends: dict[str, int] = {}
        for each in requests(path):
            ends[each.session] = ends.get(each.session, 0) + each.new_tokens + each.out
        assert 900 < max(ends.values()) <= 1000

    def test_more_sessions_are_the_same_ones_and_more(self, tmp_path: Path) -> None:
        few = requests(written(tmp_path, seed=3, conversations={**CHAT, "sessions": 20}))
        many = requests(written(tmp_path, seed=3, conversations={**CHAT, "sessions": 50}))
        assert many[: len(few)] == few
        assert requests(written(tmp_path, seed=4, conversations={**CHAT, "sessions": 20})) != few

    def test_a_window_keeps_whole_sessions(self, tmp_path: Path) -> None:
        whole = {each.id: each for each in requests(written(tmp_path, conversations=CHAT))}
        part = requests(written(tmp_path, conversations=CHAT, window="10-30"))
        assert 20 < len({each.session for each in part}) < 60
        for each in part:
            same = whole[each.id]
            assert (each.blocks, each.parent, each.gap_s) == (same.blocks, same.parent, same.gap_s)
            if each.at_s is not None and same.at_s is not None:
                assert each.at_s == pytest.approx(same.at_s - 10)

    def test_scale_and_speed(self, tmp_path: Path) -> None:
        whole = requests(written(tmp_path, conversations=CHAT))
        small = requests(written(tmp_path, conversations=CHAT, scale=4, speed=2))
        for a, b in zip(whole, small, strict=True):
            assert b.blocks == tuple((key, max(1, round(tokens / 4))) for key, tokens in a.blocks)
            assert (b.out, b.gap_s) == (10, a.gap_s / 2)
            assert b.at_s == (None if a.at_s is None else a.at_s / 2)


def _sessions(got: list[TrafficRequest]) -> list[list[TrafficRequest]]:
    groups: dict[str, list[TrafficRequest]] = {}
    for each in got:
        groups.setdefault(each.session, []).append(each)
    return [*groups.values()]


class TestAgents:
    def test_branches_go_on_from_one_step_and_the_next_waits_for_them(self) -> None:
        got = {each.id: each for each in requests(DATA / "agents.yaml")}
        waiting = [each for each in got.values() if each.waits]
        assert len(waiting) > 5
        for each in waiting:
            assert len(each.waits) == 2
            assert {got[branch].parent for branch in each.waits} == {each.parent}

    def test_contexts_are_compacted(self) -> None:
        got = requests(DATA / "agents.yaml")
        fresh = [each for each in got if each.fresh]
        assert fresh
        assert all(each.blocks[0][0] == "tools/all" for each in fresh)
        ends: dict[str, int] = {}
        for each in got:
            prompt = ends.get(each.continues or "", 0) + each.new_tokens
            ends[each.id] = prompt + each.out
            if each.parent and "b" not in each.id.partition("s")[2] and not each.fresh:
                assert prompt <= 1500

    def test_repositories_are_shared(self) -> None:
        got = requests(DATA / "agents.yaml")
        keys = {key for each in got for key, _ in each.blocks if key.startswith("repository/")}
        assert keys == {"repository/0", "repository/1", "repository/2"}


class TestRandom:
    def test_lengths_are_those_of_the_workload(self) -> None:
        got = requests(DATA / "random.yaml")
        lengths = {"input_tokens": 500, "output_tokens": 20, "lengths": "uniform:0.5-1.0"}
        workload = Workload.model_validate({**lengths, "shared_prefix_tokens": 100, "seed": 5})
        drawn = workload.draw(Level(load=Open(rate_rps=4), num_requests=50, seed=5))
        assert [(each.new_tokens, each.out) for each in got] == [*drawn]
        assert all(each.blocks[0] == ("prefix", 100) for each in got)

    def test_mixes_come_when_they_are_due(self, tmp_path: Path) -> None:
        workload = {"lengths": "mixes:100:10,300:30,every=5"}
        path = written(tmp_path, random={"rate_rps": 4, "requests": 60, "workload": workload})
        got = requests(path)
        assert len(got) == 60
        assert all(each.new_tokens == (100 if (each.at_s or 0.0) % 10 < 5 else 300) for each in got)


class TestWritten:
    @pytest.mark.parametrize("name", ["chat.yaml", "agents.yaml", "random.yaml", "mooncake.jsonl", "bailian.jsonl"])
    def test_same_file_same_bytes_and_they_read_back(self, tmp_path: Path, name: str) -> None:
        digests = []
        for count in range(2):
            head, made = compiled(DATA / name)
            with (tmp_path / f"{count}.jsonl").open("w", encoding="utf-8") as stream:
                digests.append(write_requests(stream, head, made))
        assert digests[0] == digests[1]
        assert [*read_requests(tmp_path / "0.jsonl")] == requests(DATA / name)
        assert compiled(tmp_path / "0.jsonl")[0] == compiled(DATA / name)[0]

    def test_what_is_waited_for_stands_before(self) -> None:
        for name in ("chat.yaml", "agents.yaml", "mooncake.jsonl", "bailian.jsonl"):
            seen: set[str] = set()
            for each in requests(DATA / name):
                assert {*each.waits, *([each.parent] if each.parent else [])} <= seen, name
                seen.add(each.id)


def big_trace(path: Path, count: int) -> Path:
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            ids = [0, *range(20 * number + 1, 20 * number + 20)]
            row = {"timestamp": 300 * number, "input_length": 512 * 20, "output_length": 50, "hash_ids": ids}
            stream.write(json.dumps(row) + "\n")
    return path


def test_59_000_requests_stream_within_10_s(tmp_path: Path) -> None:
    """Follow-ups are looked for among the last requests alone, so memory ends to grow."""
    path = big_trace(tmp_path / "big.jsonl", 59_000)
    began = time.process_time()
    assert sum(1 for _ in compiled(path)[1]) == 59_000
    assert time.process_time() - began < 10


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    spec = TrafficFile(replay=str(big_trace(tmp_path / "trace.jsonl", 6000)), follow="recorded")
    tracemalloc.start()
    try:
        at, marks = of_spec(spec, "trace")[1], []
        for count, each in enumerate(at):
            assert each.out == 50
            if count in (3000, 5500):
                marks.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert marks[1] - marks[0] < 100_000


MEASURE = """
import re, sys
from pathlib import Path
from pdlab.bench.traffic import read_traffic
from pdlab.traffic.compiled import compiled
from pdlab.traffic.describe import described
path = Path(sys.argv[1])
found = described(*compiled(path)) if sys.argv[2] == "figures" else read_traffic(path)
peak_kb = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]  # a parent's is in getrusage's
print(found.requests, found.sessions, peak_kb)
"""


def sessions_file(path: Path, count: int) -> Path:
    """Compiled: pairs of requests of one session, nine others between them."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps({"traffic": 1}) + "\n")
        for n in range(count):
            row = {"id": f"r{n}", "session": f"s{n - 10 if n // 10 % 2 else n}", "at_s": n / 10, "out": 50}
            row["blocks"] = [[f"b{n}-{part}", 100 + n % 400] for part in range(6)]
            stream.write(json.dumps(row | ({"parent": f"r{n - 10}"} if n // 10 % 2 else {})) + "\n")
    return path


@pytest.mark.long
@pytest.mark.parametrize("what", ["figures", "replay"])
def test_peak_memory_of_ten_times_as_many_requests(tmp_path: Path, what: str) -> None:
    """59,000 requests have 354,000 blocks: more than are kept of either already. What holds them grows once more by a
    third while others come and go, and then no more; all of them would take a gigabyte."""
    peaks_mb = []
    for count in (59_000, 590_000):
        path = sessions_file(tmp_path / f"{count}.jsonl", count)
        words = [sys.executable, "-c", MEASURE, str(path), what]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        requests, sessions, peak_kb = map(int, done.stdout.split())
        assert (requests, sessions) == (count, count // 2)
        peaks_mb.append(peak_kb / 1024)
    print(peaks_mb)
    assert peaks_mb[1] - peaks_mb[0] < 40, peaks_mb


class TestBounded:
    def test_what_is_waited_for_may_be_20_000_requests_before(self, tmp_path: Path) -> None:
        def file(between: int) -> Path:
            common = {"at_s": 0, "out": 1, "blocks": [["b", 1]]}
            rows: list[dict[str, Any]] = [{"id": f"r{n}", "session": f"s{n}", **common} for n in range(between + 2)]
            rows[-1]["parent"] = "r0"
            lines = [json.dumps(row) for row in ({"traffic": 1}, *rows)]
            (tmp_path / "w.jsonl").write_text("\n".join(lines) + "\n")
            return tmp_path / "w.jsonl"

        assert described(*compiled(file(19_999))).waiting == 1
        with pytest.raises(UsageError, match="line 20003: waits for 'r0', which is none of the 20,000"):
            described(*compiled(file(20_000)))

    def test_groups_are_what_can_be_reached_by_waiting(self) -> None:
        rng, groups, numbers = random.Random(3), Groups(), list[int]()
        sessions: list[str] = []
        reached: dict[str, set[str]] = {}  # of each session every session of its group
        for n in range(2000):
            before = [rng.randrange(max(0, n - 50), n) for _ in range(rng.choice((0, 0, 0, 1, 2)))] if n else []
            sessions.append(f"s{rng.randrange(900)}")
            waits = tuple(f"r{other}" for other in before)
            numbers.append(groups.add(TrafficRequest(f"r{n}", sessions[-1], (("b", 1),), 1, at_s=0.0, waits=waits)))
            joined = {sessions[-1]}.union(*(reached.get(sessions[each], {sessions[each]}) for each in (n, *before)))
            reached |= dict.fromkeys(joined, joined)
        found: dict[int, set[str]] = {}
        ranks = groups.ranks()
        for session, number in zip(sessions, numbers, strict=True):
            found.setdefault(ranks[number], set()).add(session)
        assert {frozenset(each) for each in found.values()} == {frozenset(each) for each in reached.values()}
        assert [*found] == sorted(found) == [*range(groups.count)] and groups.sessions == len(reached)

    def test_percentiles_of_counts(self) -> None:
        values = [random.Random(1).randrange(50) for _ in range(5)] + [7] * 3
        for part in (1, 37, 50, 62, 63, 99, 100):
            assert percentile_of(Counter(values), part) == sorted(values)[-(-len(values) * part // 100) - 1]

    def test_figures_name_their_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(describe, "KEPT_BLOCKS", 2)
        common = {"session": "s", "at_s": 0, "out": 1}
        rows = [{"id": f"r{n}", "blocks": [[key, 10]], **common} for n, key in enumerate("abacbb")]
        (tmp_path / "w.jsonl").write_text("\n".join(json.dumps(row) for row in ({"traffic": 1}, *rows)))
        found = described(*compiled(tmp_path / "w.jsonl"))
        # a and b are there when c comes, which takes the place of b; the last b hits the one before it.
        assert found.hit_share == pytest.approx(2 / 6) and "cache of the last 2 blocks" in found.text()


class TestDescribed:
    def test_figures(self) -> None:
        found = described(*compiled(DATA / "mooncake.jsonl"))
        assert (found.requests, found.sessions, found.waiting, found.head.ticks_s) == (8, 6, 2, 3.0)
        # Hits: the block 0 of six later roots but r5 and r8, of which r6 shares 0, 1 and 3; r7 is block 0 alone.
        assert found.hit_share == pytest.approx(
            (512 * 3 + 1712 + 512 * 3 + 512 + 2344) / (1700 + 1100 + 1100 + 600 + 2300 + 1700 + 512 + 3000)
        )
        assert "3 s, spread" in found.text()

    def test_a_follow_up_hits_its_parent_and_the_answer(self, tmp_path: Path) -> None:
        path = written(
            tmp_path,
            conversations={**CHAT, "sessions": 1, "turns": 2, "user_tokens": 10, "answer_tokens": 5, "think_s": 0},
        )
        assert described(*compiled(path)).hit_share == pytest.approx(15 / (10 + 25))


class TestAiperf:
    def test_turns_are_what_is_new_and_how_long_to_wait(self, tmp_path: Path) -> None:
        path = written(tmp_path, seed=1, conversations={**CHAT, "sessions": 3})
        head, made = compiled(path)
        lines = [json.loads(line) for line in aiperf(head, made, vocabulary(None))]
        for line, each in zip(lines, requests(path), strict=True):
            assert (line["session_id"], line["output_length"]) == (each.session, each.out)
            assert len(line["text_input"].split()) == each.new_tokens
            assert set(line["text_input"].split()) <= set(WORDS.split())
            assert line.get("delay", 0) == round(1000 * each.gap_s, 3)
            assert ("timestamp" in line) == (each.parent is None)

    def test_a_follow_up_that_has_a_moment_is_not_sent_before_it(self) -> None:
        """AIPerf sends a turn with a timestamp then, or after the answer before where that is later."""
        head, made = compiled(DATA / "mooncake.jsonl")
        lines = [json.loads(line) for line in aiperf(head, made, vocabulary(None))]
        for line, each in zip(lines, requests(DATA / "mooncake.jsonl"), strict=True):
            assert each.at_s is not None
            assert line["timestamp"] == pytest.approx(1000 * each.at_s, abs=0.001)
            assert "delay" not in line

    def test_a_moment_and_a_pause_are_refused(self) -> None:
        first = TrafficRequest("a", "s", (("a", 3),), 2, at_s=0.0)
        later = TrafficRequest("b", "s", (("b", 3),), 2, at_s=5.0, parent="a", gap_s=1.0)
        with pytest.raises(UsageError, match="request b: AIPerf waits until a moment or for a pause"):
            list(aiperf(TrafficHead(), [first, later], vocabulary(None)))

    def test_real_messages_are_sent_as_they_are(self) -> None:
        head, made = of_spec(TrafficFile(replay=str(DATA / "batch.jsonl"), rate_rps=1), "x")
        lines = [json.loads(line) for line in aiperf(head, made, vocabulary(None))]
        assert lines[0]["messages"][0] == {"role": "system", "content": "Be brief."}

    def test_branches_are_refused(self) -> None:
        with pytest.raises(UsageError, match="AIPerf sends the requests of a session one after the other"):
            list(aiperf(*compiled(DATA / "agents.yaml"), vocabulary(None)))


def test_lines_have_no_key_that_is_not_needed() -> None:
    first = next(compiled(DATA / "random.yaml")[1])
    assert {*json.loads(line_of(first))} == {"id", "session", "at_s", "blocks", "out"}
