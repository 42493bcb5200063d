"""The table of bad requests against the guard: what it decides is a 4xx of one clear line, the rest passes unchanged.

What it lets through is asked of real engines in tests/live/test_bad_requests.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.asgi import exchange, request_rules, text_of
from support.bad_requests import BAD_REQUESTS, BadRequest

from pdlab.deploy.serving.guard import Guard

REFUSED = [bad for bad in BAD_REQUESTS if bad.guard]
PASSED = [bad for bad in BAD_REQUESTS if not bad.guard]


def ask(bad: BadRequest, answer: list[dict[str, Any]] | None = None) -> tuple[int, str, list[bytes]]:
    """Status and text of what the client gets, and the bodies that reached the application, which says ``answer``."""
    reached: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append((await receive())["body"])
        for message in answer or [{"type": "http.response.start", "status": 299, "headers": []},
                                  {"type": "http.response.body", "body": b""}]:  # fmt: skip
            await send(message)

    headers = [(key.encode(), value.encode()) for key, value in bad.headers.items()]
    sent = exchange(Guard(app, request_rules()), bad.route, bad.body, method=bad.method, headers=headers)
    return sent[0]["status"], text_of(sent), reached


def test_there_are_a_hundred_kinds() -> None:
    names = [bad.name for bad in BAD_REQUESTS]
    assert len(names) == len(set(names)) >= 100
    assert len(REFUSED) > 50 and len(PASSED) > 50


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.name)
def test_refused(bad: BadRequest) -> None:
    status, text, reached = ask(bad)
    error = json.loads(text)["error"]
    assert 400 <= status < 500 and reached == [] and error["code"] == status
    message = error["message"]
    assert 10 < len(message) < 700 and "\n" not in message and "Traceback" not in message
    # Why, and what to do: every sentence of the guard's has a part behind a colon, or a reason in brackets.
    assert ": " in message or "(" in message


@pytest.mark.parametrize("bad", PASSED, ids=lambda bad: bad.name)
def test_what_engines_decide_reaches_them_as_it_was_sent(bad: BadRequest) -> None:
    status, _, reached = ask(bad)
    assert status == 299 and reached == [bad.body]


def says(status: int, body: Any, pieces: int = 1) -> list[dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    step = -(-len(data) // pieces)
    parts = [data[i : i + step] for i in range(0, len(data), step)]
    start: dict[str, Any] = {
        "type": "http.response.start", "status": status, "headers": [(b"content-length", str(len(data)).encode())]
    }  # fmt: skip
    bodies = [
        {"type": "http.response.body", "body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)
    ]
    return [start, *bodies]


LONG = "1 validation error:\n  {'type': 'int_type', 'input': " + "7, " * 9000 + "}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says(400, {"error": {"message": "top_p must be in (0, 1],\n  got 2.", "code": 400}}),
         "top_p must be in (0, 1], got 2."),
        (says(404, {"error": {"message": "no such model"}}, pieces=5), "no such model"),
        (says(405, {"detail": "Method Not Allowed"}), "Method Not Allowed"),
        (says(422, {"detail": [{"loc": ["body", "n"], "msg": "Input should be a number"}]}),
         "body.n: Input should be a number"),
        (says(400, {"error": "a text"}), "a text"),
    ],
)  # fmt: skip
def test_what_engines_complain_of_is_one_line_in_openais_form(answer: list[dict[str, Any]], message: str) -> None:
    status, text, _ = ask(PASSED[0], answer)
    assert status == answer[0]["status"]
    assert json.loads(text)["error"] | {"message": message, "code": status} == json.loads(text)["error"]


def test_a_complaint_does_not_repeat_what_was_sent_at_length() -> None:
    message = json.loads(ask(PASSED[0], says(400, {"error": {"message": LONG}}, pieces=3))[1])["error"]["message"]
    assert message.startswith("1 validation error: {'type': 'int_type', 'input': 7, 7,") and message.endswith("...")
    assert len(message) < 700


@pytest.mark.parametrize("body", [b"not JSON", b"[]", b'{"error": {"message": 5}}', b'{"detail": []}', b'{"a": 1}'])
def test_a_complaint_of_another_form_is_left_as_it_is(body: bytes) -> None:
    status, text, _ = ask(PASSED[0], says(418, body, pieces=2))
    assert (status, text.encode()) == (418, body)
