"""What the guard lets through and what it refuses, asked as a server asks an ASGI application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.asgi import exchange, request_rules, text_of

from pdlab.deploy.serving.guard import ROUTES, Guard, RequestRules


class RequestedRow:
    """An application that keeps what reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def ask(
    path: str,
    body: bytes | str | dict[str, Any] = b"",
    *,
    rules: RequestRules | None = None,
    **call: Any,
) -> tuple[int, str, list[bytes]]:
    """Status, text of the answer, and the bodies that reached the application."""
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    app = RequestedRow()
    sent = exchange(Guard(app, rules or request_rules()), path, data, **call)
    if sent and sent[0]["type"] == "websocket.close":
        return sent[0]["code"], "", app.bodies
    return sent[0]["status"] if sent else 0, text_of(sent), app.bodies


@pytest.mark.parametrize("path", [*ROUTES, "/v1/models/openai/gpt-oss-20b"])
def test_what_clients_need_passes(path: str) -> None:
    assert ask(path, method="GET")[0] == 200
    body = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'
    status, _, reached = ask(path, body, pieces=3)
    assert status == 200 and reached == [body]


@pytest.mark.parametrize(
    "path",
    [
        "/inference/v1/generate", "/v1/responses", "/v1/messages", "/v1/load_lora_adapter", "/docs", "/openapi.json",
        "/detokenize", "/scale_elastic_ep", "/v1/completions/", "/v1/completions/render", "//v1/completions",
        "/V1/completions", "/v1/modelsx", "/metrics/", "/", "/pause",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_everything_else_is_a_404_that_names_the_routes(path: str, method: str) -> None:
    status, text, reached = ask(path, {"prompt": "x"}, method=method)
    assert status == 404 and reached == []
    error = json.loads(text)["error"]
    assert error["code"] == 404 and path in error["message"] and "/v1/completions" in error["message"]
    assert f"--expose {path}" in error["message"]


def test_a_websocket_is_closed() -> None:
    assert ask("/v1/realtime", kind="websocket") == (1008, "", [])


def test_exposed_routes_pass_and_are_looked_at() -> None:
    rules = request_rules(expose=("/v1/responses",))
    assert ask("/v1/responses", {"input": "x"}, rules=rules)[0] == 200
    assert ask("/v1/responses", {"input": "x", "kv_transfer_params": {}}, rules=rules)[0] == 400


def test_a_route_prefix_is_no_part_of_the_route() -> None:
    assert ask("/v1/completions", {}, root="/llm")[0] == 200
    assert ask("/v1/responses", {}, root="/llm")[0] == 404


HIDDEN: list[bytes | str | dict[str, Any]] = [
    {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}},
    {"prompt": "x", "kv_transfer_params": None},
    {"prompt": "x", "ec_transfer_params": {"a": 1}},
    {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}},
    {"prompt": "x", "extra_body": {"kv_transfer_params": {}}},
    {"messages": [{"role": "user", "content": [{"kv_transfer_params": 1}]}]},
    {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {}}}},
    [{"kv_transfer_params": {}}],  # type: ignore[list-item]
    '{"kv\\u005ftransfer_params": {}}',
    '{"\\u006bv_transfer_params": {}, "prompt": "x"}',
    '{"kv_transfer_params": {}}'.encode("utf-16"),
    '{"kv_transfer_params": {}}'.encode("utf-16-le"),
    '{"kv_transfer_params": {}}'.encode("utf-32-be"),
    b'\xef\xbb\xbf{"kv_transfer_params": {}}',
    '{"kv_transfer_params": {}, "kv_transfer_params": null}',
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("number", range(len(HIDDEN)))
def test_transfer_parameters_never_come_from_a_client(number: int, path: str) -> None:
    status, text, reached = ask(path, HIDDEN[number])
    assert status == 400 and reached == []
    assert "transfer_params" in text or "not JSON" in text


def test_a_prompt_may_speak_of_them() -> None:
    assert ask("/v1/completions", {"prompt": 'What is {"kv_transfer_params": 1}? \u00e9'})[0] == 200


def test_form_data_may_not_carry_them() -> None:
    rules = request_rules(expose=("/v1/audio/transcriptions",))
    form = ((b"content-type", b"multipart/form-data; boundary=x"),)
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n{}\r\n--x--'
    requests = [
        ask("/v1/audio/transcriptions", part % name, rules=rules, headers=form)[0]
        for name in (b"file", b"kv_transfer_params")
    ]
    assert requests == [200, 400]


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_body_that_is_too_long_is_a_413(pieces: int) -> None:
    rules = request_rules(max_body_bytes=100)
    fits = {"prompt": "x" * (100 - len('{"prompt": ""}'))}
    assert ask("/v1/completions", fits, rules=rules, pieces=pieces)[0] == 200
    status, text, reached = ask("/v1/completions", {"prompt": "x" * 101}, rules=rules, pieces=pieces)
    assert status == 413 and reached == [] and "the limit is 100" in text
    assert ask("/v1/completions", b"x" * 100_000, rules=rules, pieces=50)[0] == 413


MANY, LONG = request_rules(max_prompts=8), request_rules(max_tokens=50)


@pytest.mark.parametrize(
    ("rules", "body", "status"),
    [
        (MANY, {"prompt": ["a"] * 8}, 200),
        (MANY, {"prompt": ["a"] * 9}, 400),
        (MANY, {"prompt": [[1]] * 9}, 400),
        (MANY, {"prompt": [1] * 9}, 200),
        (MANY, {"prompt": ["a"] * 4, "n": 2}, 200),
        (MANY, {"prompt": ["a"] * 4, "n": 3}, 400),
        (MANY, {"messages": [], "n": 9}, 400),
        (MANY, {"token_ids": [1], "sampling_params": {"n": 9}}, 400),
        (MANY, {"prompt": "a", "n": "3"}, 200),
        (MANY, {"prompt": ["a", "b", "c"], "n": "3"}, 400),
        (LONG, {"prompt": "a"}, 200),
        (LONG, {"prompt": "a", "max_tokens": 50}, 200),
        (LONG, {"prompt": "a", "max_tokens": 51}, 400),
        (LONG, {"messages": [], "max_completion_tokens": 51}, 400),
        (LONG, {"messages": [], "max_completion_tokens": 5}, 200),
        (LONG, {"messages": []}, 400),
        (LONG, {"input": "a", "max_output_tokens": 51}, 400),
        (LONG, {"sampling_params": {"max_tokens": 51}}, 400),
    ],
)
def test_sequences_and_tokens_of_one_request(rules: RequestRules, body: dict[str, Any], status: int) -> None:
    code, text, _ = ask("/v1/completions", body, rules=rules)
    assert code == status
    assert status == 200 or f"the limit is {8 if rules is MANY else 50}" in text
    if rules is LONG:
        assert ask("/v1/completions", body)[0] == 200, "without a limit the engine knows its context"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("changes", "without", "read"),
    [
        ({"tools": [TOOL]}, 400, 200),
        ({"tools": [TOOL], "tool_choice": "auto"}, 400, 200),
        ({"tools": [TOOL], "tool_choice": None}, 400, 200),
        ({"tools": [TOOL], "tool_choice": "required"}, 400, 200),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, 200),
        ({"tools": [TOOL], "tool_choice": "none"}, 200, 200),
        ({"tools": []}, 200, 200),
        ({"tools": None}, 200, 200),
        ({"functions": [TOOL["function"]]}, 400, 400),
        ({"function_call": {"name": "f"}}, 400, 400),
        ({"functions": None, "function_call": "none"}, 200, 200),
    ],
)
def test_tools_whose_calls_nobody_would_read_are_refused(changes: dict[str, Any], without: int, read: int) -> None:
    body = {"messages": [], **changes}
    status, text, reached = ask("/v1/chat/completions", body, rules=request_rules(tools=False))
    assert (status, bool(reached)) == (without, without == 200)
    assert status == 200 or any(name in json.loads(text)["error"]["message"] for name in ("tool_call_parser", "tools"))
    assert ask("/v1/chat/completions", body, rules=request_rules(tools=True))[0] == read


def test_a_client_that_went_away_is_not_answered() -> None:
    assert ask("/v1/completions", pieces=0) == (0, "", [])


def test_lifespan_is_the_applications_own() -> None:
    app = RequestedRow()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(app, request_rules())({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    assert app.bodies == [b""]


HARMONY = "error downloading or loading vocab file: failed to download or load vocab file"


def answered(app: Any) -> list[dict[str, Any]]:
    """What the client is sent when the application answers a chat request like that."""
    return exchange(Guard(app, request_rules()), "/v1/chat/completions", b'{"messages": []}')


def fails(status: int, *parts: bytes) -> Any:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": [(b"x", b"y")]})
        for number, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts) - 1})

    return app


def raises(error: Exception, *, begun: bool = False) -> Any:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return app


@pytest.mark.parametrize(
    "app",
    [
        fails(500, b'{"error": {"message": "%s", "code": 500}}' % HARMONY.encode()),
        fails(500, b'{"error": {"message": "error downloading or loading vo', b'cab file: failed", "code": 500}}'),
        raises(RuntimeError("invalid tiktoken vocab file: No such file or directory (os error 2)")),
    ],
    ids=["answered", "in pieces", "raised"],
)
def test_chat_without_its_vocabulary_is_a_400_that_names_it(app: Any) -> None:
    sent = answered(app)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == 400
    assert "o200k_base.tiktoken" in error["message"] and "`weights --model MODEL --fetch`" in error["message"]


def test_a_part_of_no_known_kind_is_a_400() -> None:
    said = "Message: Internal Server Error, original exception: Validating message `content` raised an error. Please"
    sent = answered(fails(500, json.dumps({"error": {"message": said, "code": 500}}).encode()))
    assert sent[0]["status"] == 400 and "of no known kind" in json.loads(sent[1]["body"])["error"]["message"]


def test_other_failures_stay_what_they_are() -> None:
    for status, parts in ((500, (b"something ", b"else")), (200, (b"a vocab file", b"...")), (503, (b"",))):
        sent = answered(fails(status, *parts))
        assert sent[0]["status"] == status and sent[0]["headers"] == [(b"x", b"y")]
        assert [message["body"] for message in sent[1:]] == list(parts)
        assert [message["more_body"] for message in sent[1:]] == [True] * (len(parts) - 1) + [False]
    with pytest.raises(RuntimeError, match="something else"):
        answered(raises(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="vocab file"):
        answered(raises(RuntimeError("vocab file"), begun=True))
