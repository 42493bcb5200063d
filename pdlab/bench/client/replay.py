"""A compiled workload (`pdlab.traffic.requests`) as what vLLM's benchmark sends: prompts made of blocks, follow-ups
that wait for what they follow and contain its answer.

vLLM's benchmark keeps the schedule and its request functions send and time; between the two stands
`SessionSender.request`. On completions prompts are token ids, answers' included (``return_token_ids``), so that every
prompt has exactly the tokens of its parent's, of its parent's answer, and its own: text that a model generated need not
encode to as many tokens as it was decoded from. On chat an answer's text is the next message but one, and the server
counts.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import importlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.bench.client.protocol import ClientLevel, ComputedTokens
from pdlab.bench.client.vllm_names import REQUESTS
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.session import SESSION_HEADER
from pdlab.results.schema import ReplayedRequest
from pdlab.traffic.blocks import drawn_words
from pdlab.traffic.groups import Groups
from pdlab.traffic.prompts import token_keys
from pdlab.traffic.requests import TrafficRequest, line_offsets, read_requests, request_at

KEPT_BLOCKS = 4096
RequestFunc = Callable[..., Awaitable[Any]]
LeaveOut = Callable[[str, Any], Any]
_answer: contextvars.ContextVar[Answer] = contextvars.ContextVar("answer")


@dataclass
class Answer:
    """What the stream of one answer held beside text: its token ids and those of the ``prompt``, whether a chunk had
    any of the answer, and how many tokens of the prompt came from a cache (None: the server does not say)."""

    ids: list[int]
    prompt: Sequence[int] = ()
    begun: bool = False
    cached: int | None = None


class History(NamedTuple):
    """A prompt, or a conversation, and when its answer ended (monotonic)."""

    ids: list[int]
    messages: list[dict[str, Any]]
    ended_s: float


def id_prefix(name: str, seed: int) -> str:
    """What ids of requests begin with, as the servers get them, before the id that the file has."""
    return f"{name}-{seed:08x}-"


class Unknown(NamedTuple):
    """Why nothing can follow a request."""

    why: str


class Words:
    """The texts that blocks are drawn from: tokens of a vocabulary, and their texts."""

    def __init__(
        self, tokens: Sequence[int], texts: Sequence[str], seed: int, encode: Callable[[str], list[int]]
    ) -> None:
        """``encode``: a text's tokens, without special ones."""
        self._tokens, self._texts, self._seed, self._encode = tokens, texts, seed, encode
        self._drawn = lru_cache(maxsize=KEPT_BLOCKS)(self._draw)

    def _draw(self, key: str, tokens: int) -> tuple[int, ...]:
        return tuple(drawn_words(self._seed, key, tokens, len(self._tokens)).tolist())

    def ids(self, request: TrafficRequest) -> list[int]:
        """The tokens of a request's blocks, or of its real text where it has that."""
        if request.messages is not None:
            return self._encode("\n".join(map(_text_of, request.messages)))
        return [self._tokens[word] for key, tokens in request.blocks for word in self._drawn(key, tokens)]

    def messages(self, request: TrafficRequest) -> list[dict[str, Any]]:
        """The messages of a request: its own where it has real ones, else one of its blocks' text."""
        if request.messages is not None:
            return list(request.messages)
        words = [self._texts[word] for key, tokens in request.blocks for word in self._drawn(key, tokens)]
        return [{"role": "user", "content": "".join(words)}]


def _text_of(message: dict[str, Any]) -> str:
    """Of a chat message whose content is text or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


class PlannedRequest(NamedTuple):
    """What is kept of a request until it is sent: its text or blocks stay in the file, at ``offset``."""

    id: str
    session: str
    parent: str | None
    waits: tuple[str, ...]
    at_s: float
    new_tokens: int
    out: int
    has_text: bool
    offset: int

    @property
    def after(self) -> tuple[str, ...]:
        """As of a `TrafficRequest`."""
        return (*((self.parent,) if self.parent is not None else ()), *self.waits)


def own_requests(level: ClientLevel) -> list[PlannedRequest]:
    """This process's requests of the level's file, in its order. Raises UsageError.

    What waits for each other is sent by one process. Of several processes each takes every ``parts``-th of these
    groups, in the order of the hash of their first session.
    """
    assert level.replay is not None
    path, groups = Path(level.replay.path), Groups()
    requests = []
    for request, offset in zip(read_requests(path), line_offsets(path), strict=True):
        if level.parts > 1:
            groups.add(request)
        requests.append(
            PlannedRequest(
                id=request.id,
                session=request.session,
                parent=request.parent,
                waits=request.waits,
                at_s=request.at_s or 0.0,
                new_tokens=request.new_tokens,
                out=request.out,
                has_text=request.messages is not None,
                offset=offset,
            )
        )
    if len(requests) != level.num_requests:
        raise UsageError(f"{path}: {len(requests)} requests, {level.num_requests} are to be replayed")
    if level.parts == 1:
        return requests
    ranked = sorted(groups.names, key=lambda name: hashlib.blake2b(name.encode()).digest())
    own = set(ranked[level.part :: level.parts])
    return [request for request in requests if groups.of(request.session) in own]


class SessionSender:
    """The requests of one process, while they are sent."""

    def __init__(self, level: ClientLevel, requests: Sequence[PlannedRequest], words: Words) -> None:
        assert level.replay is not None
        self._file = Path(level.replay.path)
        self._stretch, self.chat = level.replay.stretch, level.replay.endpoint == "chat"
        self._name, self._words = id_prefix(level.name, level.seed), words
        # Of real text, and of answers by their text, the file does not have the tokens.
        unforeseen = self.chat or any(request.has_text for request in requests)
        self._block_tokens = level.replay.block_tokens if unforeseen else None
        self.prompts: dict[str, ComputedTokens] = {}
        self._requests = {self._name + request.id: request for request in requests}
        self._turns: dict[str, int] = {}
        for request in requests:
            self._turns[request.id] = 1 + (self._turns[request.parent] if request.parent is not None else 0)
        # Prompts are kept until the last request that follows them has them.
        self._wanted = Counter(other for request in requests for other in request.after)
        self._ended: dict[str, asyncio.Future[History | Unknown]] = {}
        self._began_s: float | None = None
        self._late_s: dict[str, float] = {}  # of what waited: how long after it was due it was sent
        self._asked: dict[str, tuple[int, int]] = {}
        self._unsent: set[str] = set()
        self._cached: dict[str, int | None] = {}

    def samples(self) -> list[Any]:
        """vLLM's requests, without prompts, by when they are to be handed to `request`: when they are due by the
        file, or with what they wait for."""
        from pdlab.bench.client.vllm_names import SampleRequest

        at_s: dict[str, float] = {}
        for request in self._requests.values():
            waits_s = (at_s[other] for other in request.after)
            at_s[request.id] = max((request.at_s, *waits_s))
        ordered = sorted(self._requests.items(), key=lambda item: at_s[item[1].id])
        return [
            SampleRequest(
                prompt=[],
                prompt_len=request.new_tokens,
                expected_output_len=request.out,
                request_id=name,
                timestamp=at_s[request.id] * self._stretch,
            )
            for name, request in ordered
        ]

    def facts(self, name: str, late_s: float | None) -> dict[str, Any]:
        """What a record keeps of the request of that id; ``late_s``: by the schedule of what waits for nothing."""
        request = self._requests[name]
        waits = request.after
        replayed = ReplayedRequest(
            id=request.id,
            session=request.session,
            turn=self._turns[request.id],
            parent=request.parent,
            waits=request.waits,
            sent=name not in self._unsent,
            cached_tokens=self._cached.get(name),
        )
        late_s = self._late_s.get(name) if waits else late_s
        return {"asked": self._asked.get(name), "lateness_s": late_s, "replayed": replayed}

    async def request(
        self, send: RequestFunc, leave_out: LeaveOut, request_func_input: Any, session: Any, pbar: Any = None
    ) -> Any:
        """Wait until a request is due, and have its prompt sent by ``send``, one of vLLM's request functions. Of one
        that is not sent ``leave_out`` is told the output."""
        name = request_func_input.request_id
        request = request_at(self._file, self._requests[name].offset)
        if self._began_s is None:
            self._began_s = time.perf_counter() - (request.at_s or 0.0) * self._stretch
        told: History | Unknown = Unknown(f"{request.id} failed")
        try:
            before = {other: await self._end_of(other) for other in request.after}
            unknown = next((each for each in before.values() if isinstance(each, Unknown)), None)
            if unknown is not None:
                from pdlab.bench.client.vllm_names import RequestFuncOutput

                self._unsent.add(name)
                told = Unknown(f"{request.id} was not sent")
                output = RequestFuncOutput(error=f"not sent: {unknown.why}", start_time=time.perf_counter())
                return leave_out(name, replace(output, prompt_len=request.new_tokens))
            known = {other: each for other, each in before.items() if isinstance(each, History)}
            output, told = await self._answered(send, request, known, request_func_input, session, pbar)
            return output
        finally:
            self._end(request.id, told)  # what follows it must not wait for ever

    async def _answered(
        self,
        send: RequestFunc,
        request: TrafficRequest,
        before: dict[str, History],
        asked: Any,
        session: Any,
        pbar: Any,
    ) -> tuple[Any, History | Unknown]:
        base = before[request.continues] if request.continues is not None else History([], [], 0.0)
        ids = [] if self.chat else base.ids + self._words.ids(request)
        messages = base.messages + self._words.messages(request) if self.chat else []
        due_s = None
        if before:
            assert self._began_s is not None
            due_s = max(each.ended_s for each in before.values()) + request.gap_s * self._stretch
            due_s = max(due_s, self._began_s + (request.at_s or 0.0) * self._stretch)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        own = Answer([])
        _answer.set(own)
        headers = {**(asked.extra_headers or {}), SESSION_HEADER: request.session}
        changed = replace(asked, prompt=ids, prompt_len=len(ids) or request.new_tokens, extra_headers=headers)
        if self.chat:
            body = {**(asked.extra_body or {}), **(request.extra or {})}
            changed = replace(changed, chat_messages=messages, extra_body=body)
        output = await send(changed, session, pbar)
        self._cached[asked.request_id] = own.cached
        if due_s is not None:
            self._late_s[asked.request_id] = output.start_time - due_s
        if output.success and not own.begun:
            output.success, output.error = False, "the answer's stream held no token"
        self._asked[asked.request_id] = (output.prompt_len if self.chat else len(ids), request.out)
        if not output.success:
            return output, Unknown(f"{request.id} failed")
        prompt = own.prompt if self.chat else ids
        if self._block_tokens and prompt and len(own.ids) == output.output_tokens:
            computed = [*prompt, *own.ids[:-1]]
            keys = token_keys(computed, self._block_tokens)
            self.prompts[request.id] = ComputedTokens(tokens=len(prompt), computed=len(computed), keys=keys)
        if self.chat:
            messages = [*messages, {"role": "assistant", "content": output.generated_text}]
        elif self._wanted[request.id] and len(own.ids) != output.output_tokens:
            counts = f"{len(own.ids)} token ids of {output.output_tokens}"
            return output, Unknown(f"the answer to {request.id} came with {counts} (return_token_ids)")
        return output, History(ids + own.ids, messages, output.start_time + output.latency)

    async def _end_of(self, other: str) -> History | Unknown:
        end = await asyncio.shield(self._future(other))
        self._wanted[other] -= 1
        if not self._wanted[other]:
            del self._ended[other]
        return end

    def _future(self, name: str) -> asyncio.Future[History | Unknown]:
        if name not in self._ended:
            self._ended[name] = asyncio.get_running_loop().create_future()
        return self._ended[name]

    def _end(self, name: str, prompt: History | Unknown) -> None:
        if self._wanted[name] and not self._future(name).done():
            self._future(name).set_result(prompt)


def tee_answers() -> None:
    """Have vLLM's request functions fail a request whose stream holds an error, which they pass over, and tell
    `SessionSender` what the streams of a replay hold. Of these chunks without a token are dropped, such as the role of
    chat: TTFT would begin with them, and they would be gaps between tokens."""
    requests: Any = importlib.import_module(REQUESTS)
    handler = requests.StreamedResponseHandler
    if getattr(handler, "tees", False):
        return

    class TeeingHandler(handler):  # type: ignore[misc, valid-type]
        tees = True

        def add_chunk(self, chunk_bytes: bytes) -> list[str]:
            answer = _answer.get(None)
            return [message for message in super().add_chunk(chunk_bytes) if _holds(message, answer)]

    requests.StreamedResponseHandler = TeeingHandler


def _holds(message: str, answer: Answer | None) -> bool:
    """Whether a message of a stream is for vLLM's function; ``answer`` keeps what it says. Raises BenchError for an
    error event."""
    text = message.removeprefix("data: ")
    # Only replays pay for reading every message twice.
    if message == text or text == "[DONE]" or (answer is None and '"error"' not in text):
        return True
    data = json.loads(text)
    if error := data.get("error"):
        told = error.get("message") if isinstance(error, dict) else error
        raise BenchError(f"the answer's stream ended with an error: {' '.join(str(told or error).split())}")
    if answer is None:
        return True
    details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
    answer.cached = details.get("cached_tokens", answer.cached)
    answer.prompt = data.get("prompt_token_ids") or answer.prompt
    choices = data.get("choices") or ()
    for choice in choices:
        answer.ids.extend(choice.get("token_ids") or ())
    token = any(map(_has_token, choices))
    answer.begun = answer.begun or token
    return token or not choices


def _has_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return True
    return bool(choice.get("token_ids") or any(value for name, value in delta.items() if name != "role"))
