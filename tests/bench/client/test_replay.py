"""Replays of compiled workloads: checked by a server that keeps every body."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client_levels import client_level
from support.completions import TOKEN_S, CompletionsServer, ReceivedRequest, completions_server

from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ClientLevel, ReplayedPlan
from pdlab.bench.client.replay import own_requests
from pdlab.core.errors import UsageError
from pdlab.core.workload import Closed
from pdlab.results.schema import RequestRecord
from pdlab.traffic.groups import Groups
from pdlab.traffic.requests import TrafficHead, TrafficRequest, read_requests, request_at, write_requests

SESSIONS, TURNS, GAP_S = 12, 3, 0.2


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    with completions_server() as started:
        yield started


@pytest.fixture(scope="module")
def client(warm_starts: None) -> Iterator[LoadClient]:
    with LoadClient() as started:
        yield started


@pytest.fixture(scope="module")
def four(warm_starts: None) -> Iterator[LoadClient]:
    with LoadClient(4) as started:
        yield started


def conversations(sessions: int = SESSIONS) -> list[TrafficRequest]:
    """Sessions that begin every 50 ms with a system prompt that half of them share, and two follow-ups each."""
    made = []
    for number in range(sessions):
        name = f"c{number}"
        for turn in range(TURNS):
            blocks: tuple[tuple[str, int], ...] = ((f"{name}/u{turn}", 5 + number % 3),)
            made.append(
                TrafficRequest(
                    id=f"{name}t{turn}",
                    session=name,
                    parent=f"{name}t{turn - 1}" if turn else None,
                    gap_s=GAP_S if turn else 0.0,
                    at_s=None if turn else 0.05 * number,
                    blocks=blocks if turn else ((f"sys/{number % 2}", 16), *blocks),
                    out=4 + turn,
                )
            )
    return made


def written(folder: Path, requests: list[TrafficRequest], **head: Any) -> Path:
    path = folder / "plan.jsonl"
    with path.open("w") as stream:
        write_requests(stream, TrafficHead(**head), requests)
    return path


def level(path: Path, server: CompletionsServer, tokenizer: Path, **changes: Any) -> ClientLevel:
    requests, groups = list(read_requests(path)), Groups()
    for each in requests:
        groups.add(each)
    fields: dict[str, Any] = {"path": str(path), "groups": groups.count}
    fields |= {name: changes.pop(name) for name in ("endpoint", "stretch", "block_tokens") if name in changes}
    given = {"seed": 5, "num_requests": len(requests), "tokenizer": str(tokenizer), **changes}
    return client_level(base_url=server.url, input_tokens=20, load=ReplayedPlan(**fields), **given)


def by_id(records: tuple[RequestRecord, ...]) -> dict[str, RequestRecord]:
    return {record.replayed.id: record for record in records if record.replayed}


def bodies(received: list[ReceivedRequest]) -> dict[str, str]:
    """Id of the request -> its body as it was sent."""
    return {each.headers["x-request-id"]: json.dumps(each.body) for each in received}


def test_a_follow_up_is_its_parent_its_answer_and_its_own_tokens(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    answer = client.run(level(written(tmp_path, conversations()), server, tokenizer))
    records = by_id(answer.records)
    assert len(records) == SESSIONS * TURNS and all(record.ok for record in records.values())
    came = {each.headers["x-request-id"].rpartition("-")[2]: each for each in server.received}
    for request in conversations():
        each, record = came[request.id], records[request.id]
        prompt = each.body["prompt"]
        assert each.headers["x-session-id"] == request.session
        assert record.requested == (len(prompt), request.out) == (record.input_tokens, record.output_tokens)
        assert record.replayed and record.replayed.session == request.session
        assert record.replayed.turn == int(request.id[-1]) + 1
        if request.parent is None:
            assert len(prompt) == request.new_tokens
            continue
        parent = came[request.parent]
        start = len(parent.body["prompt"]) + parent.body["max_tokens"]
        assert prompt[: len(parent.body["prompt"])] == parent.body["prompt"]
        assert len(prompt) == start + request.new_tokens and max(prompt[len(parent.body["prompt"]) : start]) < 256
        assert each.came_s - parent.ended_s >= GAP_S, "sent before the last token and the pause had passed"
        assert record.lateness_s is not None and 0 <= record.lateness_s < 0.2
    first, third, second = (came[f"c{number}t0"].body["prompt"] for number in (0, 2, 1))
    assert first[:16] == third[:16] != second[:16] and first != third, "the shared beginnings, and no more"


def test_the_same_seed_is_the_same_bytes_from_one_process_or_four(
    client: LoadClient, four: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, conversations())
    sent: list[dict[str, str]] = []
    peers: list[int] = []
    for processes, seed in ((client, 5), (four, 5), (client, 6)):
        with completions_server() as server:
            answer = processes.run(level(path, server, tokenizer, seed=seed))
            assert all(record.ok and record.lateness_s is not None for record in answer.records)
            sent.append({name.rpartition("-")[2]: body for name, body in bodies(server.received).items()})
            peers.append(answer.processes)
    one, of_four, other = sent
    assert peers == [1, 4, 1] and one == of_four and set(one) == set(other)
    assert all(one[name] != other[name] for name in one)


def test_sessions_that_wait_for_each_other_are_sent_by_one_process(
    server: CompletionsServer, four: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    requests = conversations(6)
    requests.append(
        TrafficRequest(id="join", session="other", waits=("c0t2", "c1t2"), gap_s=0.05, blocks=(("j", 7),), out=2)
    )
    path = written(tmp_path, requests)
    whole = level(path, server, tokenizer)
    assert whole.replay and whole.replay.groups == 5
    shares = [
        {requests[number].session for number in own_requests(whole.model_copy(update={"part": k, "parts": 3})).order}
        for k in range(3)
    ]
    assert sorted(session for share in shares for session in share) == sorted({each.session for each in requests})
    assert sum({"c0", "c1", "other"} <= share for share in shares) == 1 and all(shares)
    records = by_id(four.run(whole).records)
    join, ends = records["join"], [records[name].finish_s or 0.0 for name in ("c0t2", "c1t2")]
    assert join.ok and join.input_tokens == 7 and join.arrival_s >= max(ends) + 0.05 - 1e-3
    assert join.replayed and join.replayed.after == ("c0t2", "c1t2") and join.replayed.turn == 1


def test_what_follows_a_failed_request_is_not_sent(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    server.fails = lambda prompt: len(prompt) == 5 + 16  # first turns of sessions 0, 3, 6 and 9
    records = by_id(client.run(level(written(tmp_path, conversations()), server, tokenizer)).records)
    of_zero = [records[f"c0t{turn}"] for turn in range(TURNS)]
    assert [bool(record.replayed and record.replayed.sent) for record in of_zero] == [True, False, False]
    assert [record.error for record in of_zero[1:]] == ["not sent: c0t0 failed", "not sent: c0t1 was not sent"]
    assert len(records) == SESSIONS * TURNS and len(server.received) == SESSIONS * TURNS - 4 * 2
    assert sum(record.ok for record in records.values()) == SESSIONS * TURNS - 4 * 3


def test_an_answer_without_token_ids_is_followed_by_nothing(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    server.sends_ids, server.sends_cached = False, True
    records = by_id(client.run(level(written(tmp_path, conversations(2)), server, tokenizer)).records)
    assert records["c0t0"].ok and not records["c0t1"].ok
    assert records["c0t0"].replayed and records["c0t0"].replayed.cached_tokens == 21 // 2
    why = "the answer to c0t0 came with 0 token ids of 4 (return_token_ids)"
    assert records["c0t1"].error == f"not sent: {why}"


def test_chat_contains_the_answers_text_and_no_role_is_a_token(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, conversations(2), endpoint="chat")
    records = by_id(client.run(level(path, server, tokenizer, endpoint="chat")).records)
    came = {each.headers["x-request-id"].rpartition("-")[2]: each for each in server.received}
    first, second = (came[name].body["messages"] for name in ("c0t0", "c0t1"))
    assert [each["role"] for each in second] == ["user", "assistant", "user"] and second[:1] == first
    assert len(second[1]["content"].split()) == 4
    assert len(first[0]["content"].split()) == 16 + 5 == records["c0t0"].input_tokens
    assert min(record.ttft_s or 0.0 for record in records.values()) >= 0.03, "the role's chunk counts as a token"
    assert all(len(record.itl_s) == record.output_tokens - 1 for record in records.values())


@pytest.mark.parametrize("sends_ids", [True, False])
def test_reasoning_and_tool_calls_are_tokens_and_the_end_is_none(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path, sends_ids: bool
) -> None:
    server.sends_ids, server.ends_apart = sends_ids, True
    call = {"index": 0, "function": {"name": "f", "arguments": "{"}}
    server.deltas = [{"reasoning": " hm"}, {"tool_calls": [call]}, {"content": " yes"}]
    path = written(tmp_path, conversations(2), endpoint="chat")
    records = by_id(client.run(level(path, server, tokenizer, endpoint="chat")).records)
    for record in records.values():
        assert record.ok and record.requested is not None and record.output_tokens == record.requested[1]
        assert len(record.itl_s) == record.output_tokens - 1
        assert record.ttft_s is not None and record.e2el_s is not None
        # A first token is the first that came: reasoning.
        assert record.e2el_s - record.ttft_s >= (record.output_tokens - 1) * TOKEN_S * 0.9
    follow_up = next(each.body for each in server.received if each.headers["x-request-id"].endswith("c0t1"))
    assert follow_up["messages"][1]["content"].split()[0] == "yes", "the history has the content, and no reasoning"


def test_prompts_that_the_file_does_not_determine_are_reported_in_blocks(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, conversations(3), endpoint="chat")
    prompts = client.run(level(path, server, tokenizer, endpoint="chat", block_tokens=4)).prompts
    reported = {each.id: each for each in prompts}
    assert reported.keys() == {request.id for request in conversations(3)}
    first, follow_up, third, second = (reported[name] for name in ("c0t0", "c0t1", "c2t0", "c1t0"))
    assert (first.tokens, first.computed, len(first.keys)) == (16 + 5, 16 + 5 + 4 - 1, 24 // 4)
    assert follow_up.tokens == 16 + 5 + 4 + 5 and follow_up.keys[:5] == first.keys[:5]
    assert follow_up.keys[5] != first.keys[5], "the answer's text is other tokens here than the model's"
    assert third.keys[:4] == first.keys[:4] and third.keys[4] != first.keys[4]
    assert not set(first.keys) & set(second.keys)
    assert not client.run(level(path, server, tokenizer, endpoint="chat")).prompts
    drawn = written(tmp_path, conversations(1))
    assert not client.run(level(drawn, server, tokenizer, block_tokens=4)).prompts, "the file has the tokens"
    server.sends_ids = False
    path = written(tmp_path, conversations(1), endpoint="chat")
    assert not client.run(level(path, server, tokenizer, endpoint="chat", block_tokens=4)).prompts


def test_chat_and_completions_request_the_same_answer(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    for endpoint in ("completions", "chat"):
        path = written(tmp_path, conversations(1), endpoint=endpoint)
        client.run(level(path, server, tokenizer, endpoint=endpoint))
    sampling = {"ignore_eos": True, "temperature": 0.0, "return_token_ids": True}
    assert len(server.received) == 2 * TURNS
    assert all(sampling.items() <= each.body.items() for each in server.received)
    assert [each.body["max_completion_tokens"] for each in server.received[TURNS:]] == [4, 5, 6]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_an_error_in_the_stream_fails_the_request(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path, endpoint: str
) -> None:
    server.breaks = lambda prompt: len(server.received) == 1
    path = written(tmp_path, conversations(1), endpoint=endpoint)
    records = by_id(client.run(level(path, server, tokenizer, endpoint=endpoint)).records)
    first, second = records["c0t0"], records["c0t1"]
    assert not first.ok and first.error is not None and first.error.endswith("with an error: the engine has died")
    assert second.error == "not sent: c0t0 failed" and len(server.received) == 1


def test_an_error_in_the_stream_fails_a_request_of_any_level(
    server: CompletionsServer, client: LoadClient, tokenizer: Path
) -> None:
    server.breaks = lambda prompt: len(server.received) == 1
    one_by_one = client_level(
        base_url=server.url, tokenizer=str(tokenizer), input_tokens=20, num_requests=3, load=Closed(concurrency=1)
    )
    records = client.run(one_by_one).records
    assert [record.ok for record in records] == [False, True, True]
    assert records[0].error is not None and "the engine has died" in records[0].error


def test_real_text_is_sent_as_it_is(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    text = "What holds a block of words?"
    message = {"role": "user", "content": text}
    requests = [TrafficRequest(id="a", session="a", at_s=0.0, blocks=(("a", 7),), out=3, messages=(message,))]
    path = written(tmp_path, requests)
    (record,) = client.run(level(path, server, tokenizer)).records
    ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert server.received[0].body["prompt"] == ids and record.requested == (len(ids), 3)
    tools = [{"type": "function", "function": {"name": "f"}}]
    requests = [dataclasses.replace(requests[0], extra={"tools": tools})]
    client.run(level(written(tmp_path, requests, endpoint="chat"), server, tokenizer, endpoint="chat"))
    body = server.received[1].body
    assert (body["messages"], body["tools"], body["temperature"]) == ([message], tools, 0.0)


def test_times_of_a_stretched_replay_are_longer(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, conversations(3))
    client.run(level(path, server, tokenizer, stretch=3.0))
    came = {each.headers["x-request-id"].rpartition("-")[2]: each for each in server.received}
    assert came["c2t0"].came_s - came["c0t0"].came_s == pytest.approx(0.3, abs=0.1)
    assert came["c0t1"].came_s - came["c0t0"].ended_s >= 3 * GAP_S


def test_a_replay_of_another_number_of_requests_is_refused(
    server: CompletionsServer, client: LoadClient, tokenizer: Path, tmp_path: Path
) -> None:
    wrong = level(written(tmp_path, conversations(2)), server, tokenizer, num_requests=7)
    with pytest.raises(UsageError, match="6 requests, 7 are to be replayed"):
        client.run(wrong)
    assert not server.received


def test_blocks_of_what_is_to_be_sent_stay_in_the_file(tmp_path: Path) -> None:
    """A hundred blocks take some 15 kB as objects, and a request that is planned some 30 bytes."""
    blocks = [tuple((f"b{n}-{k}", 5) for k in range(100)) for n in range(2000)]
    many = [TrafficRequest(f"r{n}", f"s{n}", each, 3, at_s=0.0) for n, each in enumerate(blocks)]
    plan = ReplayedPlan(path=str(written(tmp_path, many)), groups=2000)
    whole = client_level(input_tokens=500, num_requests=2000, load=plan)
    own_requests(whole)  # what is made once
    tracemalloc.start()
    try:
        planned = own_requests(whole)
        # pydantic keeps some thousands of the latest strings.
        kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*pydantic*")])
        held = sum(each.size for each in kept.statistics("filename"))
    finally:
        tracemalloc.stop()
    assert held / len(planned.order) < 60
    assert [request_at(Path(plan.path), planned.offsets[number]) for number in planned.order] == many


def test_requests_are_handed_over_when_they_are_due_or_with_what_they_wait_for(tmp_path: Path) -> None:
    many = [
        TrafficRequest("a", "s", (("a", 5),), 3, at_s=4.0),
        TrafficRequest("b", "s", (("b", 5),), 3, parent="a"),
        TrafficRequest("c", "t", (("c", 5),), 3, at_s=1.0),
        TrafficRequest("d", "t", (("d", 5),), 3, parent="c", waits=("c",), at_s=6.0),
    ]
    plan = ReplayedPlan(path=str(written(tmp_path, many)), groups=2)
    planned = own_requests(client_level(num_requests=4, load=plan))
    assert [many[number].id for number in planned.order] == ["c", "a", "b", "d"]
    assert [*planned.due_s] == [4.0, 4.0, 1.0, 6.0] and [*planned.turns] == [1, 2, 1, 2]
    assert [*planned.followers] == [1, 0, 2, 0] and not planned.has_text


# A sender whose requests are answered at once, each with 50 tokens; the file's times are a millionth of what they are.
SEND = """
import asyncio, io, re, sys, time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from pdlab.bench.client import replay
from pdlab.bench.client.protocol import ClientLevel, ReplayedPlan
from pdlab.bench.client.worker import Meter

@dataclass
class Request:
    prompt: list
    prompt_len: int
    output_len: int
    request_id: str
    extra_headers: dict | None = None

async def answer(request, session, pbar):
    own = replay._answer.get()
    own.begun, own.ids = True, [7] * 50
    now_s, gaps_s = time.perf_counter(), [0.001 * number for number in range(49)]
    return SimpleNamespace(success=True, start_time=now_s, ttft=0.1, latency=2.0, prompt_len=len(request.prompt),
                           output_tokens=50, itl=gaps_s, error="", generated_text="")

path, count = sys.argv[1], int(sys.argv[2])
level = ClientLevel(name="replay1", base_url="http://x", input_tokens=5, output_tokens=3, seed=5, num_requests=count,
                    model="m", tokenizer="t", load=ReplayedPlan(path=path, groups=count, stretch=1e-6))
words = replay.WordTexts(range(1000), ["w"] * 1000, 1, list)
sender, meter = replay.SessionSender(level, replay.own_requests(level), words), Meter(level, io.StringIO())
asyncio.run(sender.run(Request, partial(meter.request, answer), meter.keep, None))
records = sum(len(part.records) for part in meter.ended.parts())
failed, waiting = meter.ended.failed, len(sender._awaited)
print(records, failed, waiting, re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.long
def test_peak_memory_of_ten_times_as_many_requests(tmp_path: Path) -> None:
    """Every tenth request has a follow-up. What is kept of a request that has ended is where its line begins, and when
    it was due; its record would take 3 kB."""
    peaks_mb = []
    for count in (59_000, 590_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as stream:
            stream.write(json.dumps({"traffic": 1}) + "\n")
            for n in range(count):
                row = {"id": f"r{n}", "session": f"s{n - n % 10 // 9}", "blocks": [[f"b{n}", 5 + n % 9]], "out": 50}
                stream.write(json.dumps(row | ({"parent": f"r{n - 1}"} if n % 10 == 9 else {"at_s": n / 10})) + "\n")
        words = [sys.executable, "-c", SEND, str(path), str(count)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        records, failed, waiting, peak_kb = map(int, done.stdout.split())
        assert (records, failed, waiting) == (count, 0, 0)
        peaks_mb.append(peak_kb / 1024)
    print(peaks_mb)
    assert peaks_mb[1] - peaks_mb[0] < 40, peaks_mb
