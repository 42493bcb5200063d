"""Every bad request of the table, to a real PD deployment with two prefill replicas: a 4xx of one line, in time, and
the same engines answer as before. Prefill keeps KV cache in host memory, behind NIXL in MultiConnector: what it has
only there reaches decode right."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support import timed
from support.bad_requests import BAD_REQUESTS, BadRequest
from support.processes import replica_process, replicas, title, wait_for

from pdlab.bench.client.protocol import SESSION_HEADER
from pdlab.deploy.cpu_engine import engine_template
from pdlab.deploy.metrics_page import read_pages, samples
from tests.live.conftest import Stack
from tests.live.test_requests import engine_pids
from tests.live.test_stack import check_replay

ANSWER_S = 60.0
PROMPT_TOKENS = 1500
# Room for one request of 8,192 tokens in every engine: what OTHERS prompts of 1,500 tokens push out of it.
OFFLOADING = ("--kv-offload-gb", "0.2", "--max-model-len", "8192", "--engine-arg", "kv_cache_memory_bytes=20000000")
OTHERS = 20
# What no HTTP client sends: the begin of a request, which ends in a 4xx or in a closed connection.
BROKEN: dict[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
    "an unknown version": b"POST /v1/completions HTTP/9.9\r\nhost: x\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    "a length of words": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "a chunk of no size": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhi\r\n",
    "a header of 200 kB": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
    "a header without a name": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n: a\r\n\r\n",
    "a path of 200 kB": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
}


def send(stack: Stack, bad: BadRequest) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=ANSWER_S)
    try:
        connection.request(bad.method, bad.route, bad.body or None, bad.headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def fault(stack: Stack, bad: BadRequest) -> str | None:
    """What is wrong with the answer; None: nothing."""
    try:
        status, text = send(stack, bad)
    except (OSError, http.client.HTTPException) as error:
        # A server may close while a long body is still being sent, of which the client then has no answer.
        return None if len(bad.body) > 2**21 and isinstance(error, OSError) else f"no answer: {error!r}"
    if not 400 <= status < 500:
        return f"HTTP {status}: {text[:300]}"
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = text
    clear = 0 < len(message) < 1000 and "\n" not in message.strip() and "Traceback" not in message
    return None if clear else f"HTTP {status}, not one clear line: {text[:300]}"


@pytest.mark.parametrize("path", [pytest.param("--no-direct-streaming", marks=pytest.mark.long), "--direct-streaming"])
def test_bad_requests_are_refused_and_leave_the_engines_as_they_were(stack: Stack, path: str) -> None:
    done = stack.launch("--pd-spread", "--p-num", "2", "--p-routing", "session", *OFFLOADING, path)
    assert done.code == 0
    assert stack.running().manifest.canary.equal is True
    assert re.search(r"KV transfers: \d+ done, about [\d.]+ MB, 0 failed", done.text)
    engines = engine_pids(stack)
    before = stack.complete([7, 8, 9, 10] * 20)
    wrong: dict[str, str] = {}
    for bad in BAD_REQUESTS:
        if (how := fault(stack, bad)) is not None:
            wrong[bad.name] = how
    assert not wrong, json.dumps(wrong, indent=1)
    assert stack.complete([7, 8, 9, 10] * 20) == before
    assert engine_pids(stack) == engines, "a replica was started anew"


def test_good_requests_beside_bad_ones_are_right(stack: Stack) -> None:
    prompt = list(range(20, 90))
    alone = stack.complete(prompt)
    over = threading.Event()

    def spoil() -> int:
        count = 0
        while not over.is_set():
            assert fault(stack, BAD_REQUESTS[count % len(BAD_REQUESTS)]) is None
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        spoilers = [pool.submit(spoil) for _ in range(2)]
        try:
            assert [stack.complete(prompt) for _ in range(10)] == [alone] * 10
        finally:
            over.set()
        assert sum(spoiler.result() for spoiler in spoilers) > 5


def test_conversations_are_replayed_and_every_request_says_where_its_time_went(stack: Stack) -> None:
    check_replay(stack, "prefill_replica")
    timed.check([timed.ask(stack.url, stream=stream) for stream in (True, False) * 5], "pd")


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_http_is_refused_or_closed(stack: Stack, name: str) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=ANSWER_S) as client:
        try:
            client.sendall(BROKEN[name])
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(4096)
        except TimeoutError:
            raise
        except OSError:  # the server has closed it meanwhile
            pass
    assert not answer or answer.split()[1][:1] == b"4", answer
    assert stack.complete([5, 6, 7], tokens=1)


def loaded(stack: Stack) -> dict[str, float]:
    """Tokens by replica that came from a connector: NIXL's on decode, host memory's on prefill."""
    running = stack.running()
    counts = dict.fromkeys(("prefill", "decode"), 0.0)
    for page in read_pages(running.metrics_urls):
        for sample in samples(page, lambda name: name == "external_prefix_cache_hits"):
            if (pool := running.pools.get(sample.replica)) is not None:
                counts[pool] += sample.value
    return counts


def test_a_prompt_that_prefill_has_only_in_host_memory_is_answered_as_before(stack: Stack) -> None:
    """All of one session, so that one prefill replica gets them."""
    rng = random.Random(1)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(300, 1000) for _ in range(tokens)]

    wanted = prompt(PROMPT_TOKENS)
    first = stack.complete(wanted, session="one")
    for _ in range(OTHERS):
        stack.complete(prompt(PROMPT_TOKENS), tokens=1, session="one")
    time.sleep(3)
    before = loaded(stack)
    again = stack.complete(wanted, session="one")
    deadline = time.monotonic() + 60
    # Each engine's counters are told in their own time.
    while min((grown := {pool: tokens - before[pool] for pool, tokens in loaded(stack).items()}).values()) == 0:
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    assert grown["prefill"] >= PROMPT_TOKENS - 64, "all but the last block"
    assert grown["decode"] >= PROMPT_TOKENS - 64, "decode had evicted it too"
    assert again == first


def test_replicas_are_forked_of_one_process_that_imported_vllm(stack: Stack) -> None:
    """And one that comes in the place of another is, too: last, for a replaced replica makes later levels invalid. A
    request that the lost one was to prefill says what that took."""
    nodes = stack.nodes()
    before = {role: replicas(nodes, role) for role in ("Prefill", "Decode")}
    assert {role: len(found) for role, found in before.items()} == {"Prefill": 2, "Decode": 1}
    (template,) = {psutil.Process(pid).ppid() for found in before.values() for pid in found}
    assert engine_template.__name__ in title(template)
    assert "not forked" not in (Path(nodes.temp_dir) / "template.log").read_text()
    session = {SESSION_HEADER: "one"}
    name = timed.ask(stack.url, stream=True, headers=session).role_p
    lost = replica_process(nodes, "Prefill", name)
    timed.check_retried(timed.killed_in_its_call(stack.url, lost, headers=session), name)
    wait_for(lambda: len(now := replicas(nodes, "Prefill")) == 2 and lost not in now)
    assert {psutil.Process(pid).ppid() for pid in replicas(nodes, "Prefill")} == {template}
