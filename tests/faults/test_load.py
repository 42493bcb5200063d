"""The checking load against a server that answers right, wrong, too late, with errors, half, or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from support import processes
from support.web import web_server

from pdlab.deploy.canary import CanaryAnswer
from pdlab.faults.load import Load, LoadTarget, Prompt, request_of, token_prompts
from pdlab.results.chaos import ChaosRequest

TOKENS = (11, 12, 13, 14)
REFERENCE = CanaryAnswer(tokens=TOKENS, tops=tuple({token: -0.1, 900: -5.0} for token in TOKENS))
PROMPTS = [Prompt((1, 2, 3), REFERENCE)]
WAIT_S = 30.0


class Fake:
    """``mode`` is how it answers; ``bodies`` what it was sent."""

    def __init__(self) -> None:
        self.mode = "right"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.closed = threading.Event()
        self.release = threading.Event()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.bodies.append(json.loads(handler.rfile.read(int(handler.headers["content-length"]))))
        self.keys.append(handler.headers["authorization"])
        mode = self.mode
        if mode == "hang":
            self.release.wait(WAIT_S)
            return
        if mode == "500":
            handler.send_error(500, "it is gone")
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        tokens = {"wrong": (11, 12, 99, 14), "short": TOKENS[:3]}.get(mode, TOKENS)
        try:
            for token in tokens:
                self.event(handler, {"choices": [choice(token)]})
                if mode == "cut":
                    return
                if mode == "error":
                    self.event(handler, {"error": {"message": "the engine died", "code": 500}})
                    return
                if mode == "slow":
                    self.wait_for_the_end_of(handler)
            handler.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.closed.set()

    @staticmethod
    def event(handler: BaseHTTPRequestHandler, value: dict[str, Any]) -> None:
        handler.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        handler.wfile.flush()

    @staticmethod
    def wait_for_the_end_of(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.05)
        handler.connection.settimeout(0.05)
        try:
            if handler.connection.recv(1) == b"":
                raise ConnectionResetError
        except TimeoutError:
            pass


def choice(token: int) -> dict[str, Any]:
    top = {f"token_id:{token}": -0.1, "token_id:900": -5.0}
    return {"text": "x", "token_ids": [token], "logprobs": {"top_logprobs": [top]}}


@pytest.fixture
def fake() -> Iterator[tuple[Fake, str]]:
    server = Fake()
    with web_server(server.answer) as url:
        yield server, url
        server.release.set()


@contextmanager
def loaded(url: str, concurrency: int = 1, limit_s: float = 20.0, key: str | None = None) -> Iterator[Load]:
    kept: list[ChaosRequest] = []
    load = Load(LoadTarget(url, "m", 4, limit_s, key), PROMPTS, concurrency, 0, kept.append)
    load.start()
    try:
        yield load
    finally:
        load.stop()
    assert kept == load.finished, "whatever ends is kept"


def wait_for(load: Load, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(load.finished) < count:
        assert time.monotonic() < deadline, f"{len(load.finished)} of {count}"
        load.check()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("mode", "outcome", "detail"),
    [
        ("right", "right", None),
        ("wrong", "wrong", "token 3 is 99 in place of 13"),
        ("short", "wrong", "ended as if whole with 3 of 4"),
        ("cut", "error", "closed after 1 of 4"),
        ("error", "error", "the engine died"),
        ("500", "error", "HTTP 500"),
    ],
)
def test_outcomes(mode: str, outcome: str, detail: str | None, fake: tuple[Fake, str]) -> None:
    server, url = fake
    server.mode = mode
    with loaded(url) as load:
        wait_for(load, 2)
    for request in load.finished:
        assert request.outcome == outcome
        assert (request.detail is None) if detail is None else (detail in (request.detail or ""))
        assert 0 <= request.sent_s <= request.end_s


def test_what_does_not_end_hangs(fake: tuple[Fake, str]) -> None:
    server, url = fake
    server.mode = "hang"
    with loaded(url, limit_s=0.5) as load:
        wait_for(load, 1)
    assert {request.outcome for request in load.finished} == {"hang"}
    assert all(request.end_s - request.sent_s >= 0.5 for request in load.finished)


def test_without_a_server_each_request_is_an_error_and_few_are_sent(fake: tuple[Fake, str]) -> None:
    with loaded("http://127.0.0.1:9") as load:  # the port of discard, where nothing listens
        wait_for(load, 3)
        assert load.now_s() >= 0.4, "two pauses"
    assert {request.outcome for request in load.finished} == {"error"}


def test_every_request_has_a_salt_of_its_own_and_the_key(fake: tuple[Fake, str]) -> None:
    server, url = fake
    with loaded(url, concurrency=3, key="k" * 20) as load:
        wait_for(load, 9)
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == len(salts), "no prefix cache stands in for the KV transfer"
    assert set(server.keys) == {f"Bearer {'k' * 20}"}
    body = server.bodies[0]
    assert body["temperature"] == 0 and body["return_token_ids"] and body["stream"] and body["prompt"] == [1, 2, 3]


def test_clients_that_leave_close_their_connection(fake: tuple[Fake, str]) -> None:
    server, url = fake
    server.mode = "slow"
    with loaded(url) as load:
        load.send_leaving(3, "while streaming")
        processes.wait_for(lambda: load.streaming)
        load.leave()
        assert server.closed.wait(WAIT_S), "the server's side"
        server.mode = "right"
    left = [request for request in load.finished if request.phase is not None]
    assert len(left) == 3 and {request.phase for request in left} == {"while streaming"}
    assert {request.outcome for request in left} <= {"left", "right"}
    assert "left" in {request.outcome for request in left}
    assert "left" not in {request.outcome for request in load.finished if request.phase is None}


def test_clients_that_leave_before_an_answer(fake: tuple[Fake, str]) -> None:
    server, url = fake
    server.mode = "hang"
    with loaded(url, limit_s=3.0) as load:
        load.send_leaving(2, "between")
        processes.wait_for(lambda: len(server.bodies) >= 3)
        assert (load.leaving, load.left) == (2, 0)
        load.leave()
        processes.wait_for(lambda: not load.leaving)
        assert load.left == 2
        server.release.set()
    assert [request.outcome for request in load.finished if request.phase == "between"] == ["left", "left"]


def test_clients_whose_answers_have_ended_do_not_leave(fake: tuple[Fake, str]) -> None:
    _, url = fake
    with loaded(url) as load:
        load.send_leaving(3, "while streaming")
        assert load.leaving == 3, "from the call on"
        processes.wait_for(lambda: not load.leaving)
        load.leave()
        wait_for(load, 4)
        assert (load.streaming, load.left) == (3, 0)


def test_requests_of_an_earlier_leave_are_not_counted_for_a_later_one(fake: tuple[Fake, str]) -> None:
    server, url = fake
    server.mode = "hang"
    with loaded(url, limit_s=3.0) as load:
        load.send_leaving(2, "between")
        processes.wait_for(lambda: len(server.bodies) >= 3)
        load.send_leaving(1, "between")
        load.leave()
        processes.wait_for(lambda: not load.leaving)
        server.release.set()
        processes.wait_for(lambda: len([each for each in load.finished if each.phase]) == 3)
        assert (load.leaving, load.left) == (0, 1)


def test_more_requests_at_once(fake: tuple[Fake, str]) -> None:
    _, url = fake
    with loaded(url) as load:
        load.send_more(20)
        wait_for(load, 21)
    assert {(request.outcome, request.detail) for request in load.finished} == {("right", None)}


def test_prompts_come_from_the_seed() -> None:
    one, two = token_prompts(5, (3, 8), 1), token_prompts(5, (3, 8), 1)
    assert one == two != token_prompts(5, (3, 8), 2)
    assert [len(each) for each in one] == [3, 8, 3, 8, 3]
    assert [len(each) for each in token_prompts(2, (3, 8), 1, 4)] == [3, 4], "no longer than the context"
    assert all(10 <= token < 1000 for each in one for token in each)


def test_a_reference_is_requested_without_a_salt_or_a_stream() -> None:
    body = request_of(LoadTarget("http://x", "m", 4, 1.0), [1], None, stream=False)
    assert "cache_salt" not in body and "stream" not in body and body["logprobs"] == 5
