"""An ASGI middleware in front of the engines: it passes the requests that clients need and refuses all others.

Runs in Ray Serve's replicas, sent there by value: imports only the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# docs/requests.md lists them for the user.
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/tokenize")
# With them a client would steer KV or encoder-cache transfers: the engines and Ray's PD server set them themselves.
_END = "_transfer_params"
INTERNAL = (f"kv{_END}", f"ec{_END}")
# Names of the limit on generated tokens in completions, chat, responses, messages and generate.
_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MOST_TOKENS = 2**31 - 1
_CHAT = "/v1/chat/completions"
# Routes whose body is one JSON object.
OBJECTS = ("/v1/completions", _CHAT, "/tokenize")
# Where an ASGI scope has the body's JSON: `HttpFront` hands it to the routes of `OBJECTS`, which would parse it again.
PARSED = "pdlab.parsed"
# Of lists and objects within one another. Tools' JSON schemas have ten or twenty levels.
_DEEPEST = 64
# Half of a character outside the basic plane, which is none by itself: it has no UTF-8, and tokenizers refuse it.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Of an application's own complaint, and of a value that is quoted in one: vLLM's repeat what was sent.
_MESSAGE_CHARS, _VALUE_CHARS = 600, 60
# A body that is too long is read and dropped up to this multiple of the limit, so that the client
# reads the answer instead of a broken pipe.
_DRAIN = 16
# How openai_harmony's errors end when gpt-oss's chat format has no vocabulary on the node and none can be downloaded.
NO_VOCABULARY = "vocab file"
# How the error begins of Ray's ingress for a message whose parts are of no kind that it knows, which it calls its own.
_NO_CONTENT = "Validating message"
# A part of the message of a 500 or an exception that is the request's fault -> what the client reads, with a 400.
REASONS = {
    NO_VOCABULARY: "the engine's node has no vocabulary for this model's chat format (o200k_base.tiktoken) and cannot "
    "download it: fetch it there with pdlab's command `weights --model MODEL --fetch`, or use /v1/completions",
    _NO_CONTENT: "content or tool_calls of a message have a part that is of no known kind: give a text",
}


@dataclass(frozen=True)
class RequestRules:
    """Which requests a client may send: the values of `pdlab.core.deployment.RequestLimits`, and ``tools``: whether the
    engines find tool calls in the model's text."""

    expose: Sequence[str]
    max_body_bytes: int
    max_prompts: int
    max_tokens: int | None
    tools: bool

    def allows(self, path: str) -> bool:
        """Whether clients may call the path; a model's own page belongs to the list of models."""
        return path in ROUTES or path in self.expose or path.startswith("/v1/models/")


class Refused(Exception):
    """The request is refused: HTTP status, a sentence with the reason and the fix, and OpenAI's type of the error."""

    def __init__(self, status: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("not_found_error" if status == 404 else "invalid_request_error")


class Guard:
    """Answers 4xx with a JSON error in OpenAI's form, before the application sees the request."""

    def __init__(self, app: App, rules: RequestRules) -> None:
        self.app = app
        self.rules = rules

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            path = _path(scope)
            if not self.rules.allows(path):
                raise Refused(404, _not_served(path, self.rules))
            if scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
                await self.app(scope, receive, send)
                return
            body = await self._body(scope, receive)
            if body is None:  # the client has gone
                return
            coding = header_of(scope, b"content-encoding").strip().lower()
            if coding not in (b"", b"identity"):
                raise Refused(415, f"a body in {_shown(coding.decode('latin-1'))} is not decoded here: send plain JSON")
            parsed = check_body(body, header_of(scope, b"content-type"), self.rules, path)
        except Refused as refused:
            await refuse(scope, refused, send)
            return
        explained = _Explained(scope, send)
        try:
            await self.app({**scope, PARSED: parsed}, _replay(body, receive), explained)
        except Exception as error:
            if not await explained.refuse(str(error)):
                raise

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
        """The whole body; None when the client went away before it was sent. Raises Refused."""
        limit = self.rules.max_body_bytes
        parts: list[bytes] = []
        size = 0
        more = True
        while more and size <= _DRAIN * limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                parts.append(part)
            more = message.get("more_body", False)
        if size > limit:
            length_text = header_of(scope, b"content-length").decode("latin-1") or f"more than {limit}"
            raise Refused(
                413,
                f"the body has {length_text} bytes, the limit is {limit}: send a shorter prompt, or fewer in one "
                "request",
            )
        return b"".join(parts)


class _Explained:
    """Sends what the application answers, but a 4xx in place of a 500 whose reason is known and no fault of it, and a
    4xx of its own as one line: vLLM's have several, and repeat what was sent.

    vLLM's app answers such an error or raises it, by route and version.
    """

    def __init__(self, scope: MutableMapping[str, Any], send: Send) -> None:
        self._scope = scope
        self._send = send
        self._held: list[Message] = []
        self._sent = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._held = [message]
            return
        if self._held:
            self._held.append(message)
            if message.get("more_body"):
                return
            body = b"".join(part.get("body", b"") for part in self._held)
            status = self._held[0]["status"]
            if status >= 500 and await self.refuse(body.decode(errors="replace")):
                return
            if status < 500 and (line := _one_line(body)) is not None:
                self._held, self._sent = [], True
                await refuse(self._scope, Refused(status, line), self._send)
                return
        for part in self._held or (message,):
            self._sent = True
            await self._send(part)
        self._held = []

    async def refuse(self, reason: str) -> bool:
        """Answer for that error; False: its reason is not known, or an answer has begun."""
        why = next((answer for mark, answer in REASONS.items() if mark in reason), None)
        if self._sent or why is None:
            return False
        self._held = []
        self._sent = True
        await refuse(self._scope, Refused(400, why), self._send)
        return True


def check_body(body: bytes, content_type: bytes, rules: RequestRules, path: str) -> Any:
    """Check the body that a client posts to the route ``path``. Returns its JSON; None: it has none. Raises Refused
    with 400, 413 or 415.
    """
    whole = path in OBJECTS
    kind = content_type.split(b";")[0].strip().lower()
    if whole and content_type and kind != b"application/json" and not kind.endswith(b"+json"):
        raise Refused(415, f"content-type is {_shown(content_type.decode('latin-1'))}: send application/json")
    if kind in (b"multipart/form-data", b"application/x-www-form-urlencoded"):
        for name in INTERNAL:
            if name.encode() in body:
                raise Refused(400, _internal(name))
        return None
    if not body:
        if whole:
            raise Refused(400, "the body is empty: send a JSON object")
        return None
    try:
        request = json.loads(body, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON ({_shown(str(error), _MESSAGE_CHARS)})") from error
    # A search for one byte is ten times as fast as one for two.
    escaped = b"\\" in body and b"\\u" in body
    if escaped or _may_name_internals(body):
        for name in _keys(request):
            if name in INTERNAL:
                raise Refused(400, _internal(name))
    if body.count(b"[") + body.count(b"{") > _DEEPEST and _depth(request) > _DEEPEST:
        raise Refused(400, f"lists and objects are nested deeper than {_DEEPEST} levels: send a flatter body")
    if escaped and _SURROGATE.search(body):
        try:
            json.dumps(request, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(400, "a text has half of a surrogate pair, which is no character: leave it out") from error
    if isinstance(request, dict):
        _check_amounts(request, rules)
        model = request.get("model")
        if whole and model is not None and not (isinstance(model, str) and model.strip()):
            raise Refused(400, f"model is {_shown(json.dumps(model))}: give a name of /v1/models")
        if path == _CHAT:
            _check_messages(request.get("messages"))
            _check_tools(request, rules)
    elif whole:
        raise Refused(400, f"the body is {_shown(json.dumps(request))}: send a JSON object")
    return request


def _check_messages(messages: Any) -> None:
    """Their frame: Ray's ingress makes a 500 of what vLLM cannot walk through."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused(400, f"messages is {_shown(json.dumps(messages))}: give a list of objects with role and content")
    for message in messages:
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise Refused(400, f"tool_calls of a message is {_shown(json.dumps(calls))}: give a list")


def _check_tools(request: dict[str, Any], rules: RequestRules) -> None:
    """Tools whose calls would be missing from an answer with HTTP 200."""
    old = next((name for name in ("functions", "function_call") if request.get(name) not in (None, [], "none")), None)
    if old:
        raise Refused(400, f"{old} is OpenAI's old name, and vLLM ignores it: give tools and tool_choice")
    if request.get("tools") and request.get("tool_choice") != "none" and not rules.tools:
        raise Refused(
            400,
            "tools are given, and no parser reads the calls of this model: launch with --engine-arg "
            "enable_auto_tool_choice=true --engine-arg tool_call_parser=NAME (vLLM's name for this kind of model), or "
            'send "tool_choice": "none"',
        )


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{_shown(text)} is out of range")
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects within one another, counted up to one beyond the deepest allowed."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        inner: list[Any] = []
        for element in level:
            items = element.values() if isinstance(element, dict) else element if isinstance(element, list) else ()
            inner += [item for item in items if isinstance(item, (dict, list))]
        depth += any(isinstance(element, (dict, list)) for element in level)
        level = inner
    return depth


def _check_amounts(request: dict[str, Any], rules: RequestRules) -> None:
    prompt = request.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1
    within = request.get("sampling_params")
    token_limits: dict[str, int] = {}
    for values in (request, within if isinstance(within, dict) else {}):
        amounts = {name: _whole_number(name, values.get(name), least=0) for name in _TOKENS}
        n = _whole_number("n", values.get("n"), least=1) or 1
        if prompts * n > rules.max_prompts:
            raise Refused(
                400,
                f"the request has {prompts * n} sequences ({prompts} prompts times n={n}), the limit is "
                f"{rules.max_prompts}: send several requests",
            )
        token_limits |= {name: amount for name, amount in amounts.items() if amount}
    if rules.max_tokens is None:
        return
    for name, amount in token_limits.items():
        if amount > rules.max_tokens:
            raise Refused(400, f"{name} is {amount}, the limit is {rules.max_tokens}: request fewer tokens")
    if not token_limits and "messages" in request:
        raise Refused(
            400,
            f"max_completion_tokens is not given, and the answer could take the whole context: the limit is "
            f"{rules.max_tokens}, give max_completion_tokens up to it",
        )


def _whole_number(name: str, value: Any, *, least: int) -> int | None:
    """A whole number that engines can count, as they take it: 16, 16.0, "16", or none. Raises Refused."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,20}(\.0{1,20})?", text):
        raise Refused(400, f"{name} is {_shown(text)}: give a whole number")
    amount = int(text.partition(".")[0])
    if not least <= amount <= _MOST_TOKENS:
        raise Refused(400, f"{name} is {_shown(text)}: give a whole number from {least} to {_MOST_TOKENS}")
    return amount


def _shown(text: str, chars: int = _VALUE_CHARS) -> str:
    """The begin of a text, in one line."""
    line = " ".join(text[: 4 * chars].split())
    return line if len(line) <= chars else f"{line[:chars]}..."


def _one_line(body: bytes) -> str | None:
    """The message of an application's error, as one line; None where it has no known form."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed)
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        if isinstance(message, list):  # FastAPI's, of which the first is enough
            where = ".".join(str(part) for part in message[0].get("loc", ()))
            message = f"{where}: {message[0]['msg']}"
        return _shown(message, _MESSAGE_CHARS) if isinstance(message, str) else None
    except (ValueError, AttributeError, LookupError, TypeError):
        return None


def _may_name_internals(body: bytes) -> bool:
    """False when no key of the JSON text without escapes can be one of `INTERNAL`: a search of bytes, for walking a
    long prompt's token ids costs more than parsing them. UTF-16 and UTF-32 could hide a name, and give True."""
    if b"\0" in body[:4] or body[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return True
    return _END.encode() in body and any(name.encode() in body for name in INTERNAL)


def _keys(value: Any) -> Iterator[str]:
    """Every key of every object in a JSON value."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, dict):
            yield from current
            waiting += current.values()
        elif isinstance(current, list):
            waiting += [item for item in current if isinstance(item, (dict, list))]


def _path(scope: MutableMapping[str, Any]) -> str:
    """The path as the application's own routes will see it."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    return path[len(root) :] if root and path.startswith(root) else path


def header_of(message: MutableMapping[str, Any], name: bytes) -> bytes:
    """The header of that name (in lower case) of an ASGI scope or of the start of an answer; empty without it."""
    return next((bytes(value) for key, value in message.get("headers", ()) if key.lower() == name), b"")


def _internal(name: str) -> str:
    return f"{name} is set by the deployment itself and never taken from a client: leave it out"


def _not_served(path: str, rules: RequestRules) -> str:
    listed = ", ".join((*ROUTES, *rules.expose))
    return f"{path} is not served here; the routes are {listed} (launch with --expose {path} to add it)"


async def refuse(scope: MutableMapping[str, Any], refused: Refused, send: Send) -> None:
    """Answer a request with the error of ``refused``."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "not served here"})
        return
    error = {"message": str(refused), "type": refused.kind, "param": None, "code": refused.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """What the application reads: the body that was read already, then whatever comes from the server."""
    answered = False

    async def next_message() -> Message:
        nonlocal answered
        if answered:
            return await receive()
        answered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
