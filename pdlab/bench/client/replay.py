"""Sends a compiled workload (`pdlab.traffic.requests`) with vLLM's request functions. Prompts are made of blocks. A
follow-up waits for the request before it and contains its answer.

vLLM's request functions send and time. `SessionSender` has the schedule: vLLM's benchmark would keep every request
until the last one has ended. On completions prompts are token ids, answers' included (``return_token_ids``), so that
every prompt has exactly the tokens of its parent's, of its parent's answer, and its own: text that a model generated
need not encode to as many tokens as it was decoded from. On chat an answer's text is the next message but one, and the
server counts.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.bench.client.protocol import SESSION_HEADER, ClientLevel, ComputedTokens
from pdlab.bench.client.vllm_names import REQUESTS
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.text import counted
from pdlab.deploy.serving.events import DONE, data_of
from pdlab.traffic.blocks import drawn_words
from pdlab.traffic.bounded import LatestKeys
from pdlab.traffic.groups import Groups
from pdlab.traffic.prompts import token_keys
from pdlab.traffic.requests import TrafficRequest, line_offsets, read_requests, request_at

KEPT_BLOCKS = 4096
RequestFunc = Callable[..., Awaitable[Any]]
Keep = Callable[..., None]
_answer: contextvars.ContextVar[StreamedAnswer] = contextvars.ContextVar("answer")


@dataclass
class StreamedAnswer:
    """What the stream of one answer held beside text: its token ids and those of the ``prompt``, whether a chunk had
    any of the answer, and how many tokens of the prompt came from a cache (None: the server does not report it)."""

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
    """The prefix of request ids at the servers, before the id from the file."""
    return f"{name}-{seed:08x}-"


class NoFollowUp(NamedTuple):
    """Why nothing can follow a request."""

    why: str


class WordTexts:
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
    """The text of a chat message, whose content is text or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


class PlannedRequests(NamedTuple):
    """The requests of a file that one process sends. ``order``: their numbers in the file, in sending order. For every
    request of the file it has the due time (by the file, or that of the request that it waits for), the offset of its
    line, the number of its turn, and how many requests wait for it. Everything else stays in the file. ``has_text``:
    one of them has real text.
    """

    order: Any
    due_s: Sequence[float]
    offsets: Sequence[int]
    turns: Sequence[int]
    followers: Sequence[int]
    has_text: bool


def own_requests(level: ClientLevel) -> PlannedRequests:
    """This process's requests of the level's file. Raises UsageError.

    One process sends all requests that wait for each other. With several processes each takes every ``parts``-th of
    these groups, in the order of their first sessions.
    """
    import numpy as np

    assert level.replay is not None
    path, groups, known = Path(level.replay.path), Groups(), LatestKeys[str, int]()
    due_s, offsets, turns, followers, sessions = array("d"), array("q"), array("i"), array("i"), array("i")
    has_text = False
    for request, offset in zip(read_requests(path), line_offsets(path), strict=True):
        before = [known[other] for other in request.after]
        due_s.append(max((request.at_s or 0.0, *(due_s[each] for each in before))))
        turns.append(1 + (turns[known[request.parent]] if request.parent is not None else 0))
        for each in before:
            followers[each] += 1
        known[request.id] = len(offsets)
        offsets.append(offset)
        followers.append(0)
        has_text = has_text or request.messages is not None
        if level.parts > 1:
            sessions.append(groups.add(request))
    if len(offsets) != level.num_requests:
        raise UsageError(f"{path}: {counted(len(offsets), 'request')}, {level.num_requests} are to be replayed")
    order = np.argsort(due_s, kind="stable")
    if level.parts > 1:
        part = np.asarray(groups.ranks())[np.asarray(sessions)] % level.parts
        order = order[part[order] == level.part]
    return PlannedRequests(order, due_s, offsets, turns, followers, has_text)


@dataclass
class AwaitedEnd:
    """The end of a request that others wait for: ``followers`` do not have it yet."""

    end: asyncio.Future[History | NoFollowUp]
    followers: int


class SessionSender:
    """Sends the requests of one process. It stores only what requests in flight and waiting requests need."""

    def __init__(self, level: ClientLevel, planned: PlannedRequests, words: WordTexts) -> None:
        assert level.replay is not None
        self.planned = planned
        self.chat = level.replay.endpoint == "chat"
        self._file, self._stretch = Path(level.replay.path), level.replay.stretch
        self._name, self._words = id_prefix(level.name, level.seed), words
        # Of real text, and of answers by their text, the file does not have the tokens.
        self._block_tokens = level.replay.block_tokens if self.chat or planned.has_text else None
        self._awaited: dict[str, AwaitedEnd] = {}
        self._began_s = 0.0

    async def run(self, make_input: Callable[..., Any], send: RequestFunc, keep: Keep, session: Any) -> None:
        """Send every request when it is due, by ``send``, one of vLLM's request functions, which gets what
        ``make_input`` makes of the request. ``keep`` is called with each ended request.
        """
        running, errors = set[asyncio.Task[None]](), list[BaseException]()

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                errors.append(error)

        self._began_s = time.perf_counter()
        try:
            for number in self.planned.order:
                due_s = self.planned.due_s[number] * self._stretch
                await asyncio.sleep(max(0.0, self._began_s + due_s - time.perf_counter()))
                request = request_at(self._file, self.planned.offsets[number])
                if followers := self.planned.followers[number]:
                    self._awaited[request.id] = AwaitedEnd(asyncio.get_running_loop().create_future(), followers)
                each = self._send(request, self.planned.turns[number], due_s, make_input, send, keep, session)
                task = asyncio.create_task(each)
                running.add(task)
                task.add_done_callback(ended)
            while running:
                await asyncio.wait(running)
        finally:  # stopped
            for task in [*running]:
                task.cancel()
            if running:
                await asyncio.wait(running)
        if errors:
            raise errors[0]

    async def _send(
        self,
        request: TrafficRequest,
        turn: int,
        due_s: float,
        make_input: Callable[..., Any],
        send: RequestFunc,
        keep: Keep,
        session: Any,
    ) -> None:
        """Wait for the requests before this one, and send it."""
        end: History | NoFollowUp = NoFollowUp(f"{request.id} failed")
        name = self._name + request.id
        replayed = {"id": request.id, "session": request.session, "turn": turn}
        replayed |= {"parent": request.parent, "waits": request.waits}
        try:
            before = {other: await self._end_of(other) for other in request.after}
            unknown = next((each for each in before.values() if isinstance(each, NoFollowUp)), None)
            if unknown is not None:
                from pdlab.bench.client.vllm_names import RequestFuncOutput

                end = NoFollowUp(f"{request.id} was not sent")
                output = RequestFuncOutput(error=f"not sent: {unknown.why}", start_time=time.perf_counter())
                output.prompt_len = request.new_tokens
                keep(name, output, replayed=replayed | {"sent": False}, due_s=due_s, waited=True)
                return
            histories = {other: each for other, each in before.items() if isinstance(each, History)}
            func_input = make_input(prompt=[], prompt_len=request.new_tokens, output_len=request.out, request_id=name)
            end, facts = await self._answered(send, request, histories, func_input, session)
            replayed["cached_tokens"] = facts.pop("cached_tokens")
            keep(name, facts.pop("output"), replayed=replayed, due_s=due_s, waited=bool(before), **facts)
        finally:
            self._end(request.id, end)  # what follows it must not wait for ever

    async def _answered(
        self, send: RequestFunc, request: TrafficRequest, before: dict[str, History], func_input: Any, session: Any
    ) -> tuple[History | NoFollowUp, dict[str, Any]]:
        """What follows the request, and what is known of it: its ``output`` among it."""
        base = before[request.continues] if request.continues is not None else History([], [], 0.0)
        ids = [] if self.chat else base.ids + self._words.ids(request)
        messages = base.messages + self._words.messages(request) if self.chat else []
        facts: dict[str, Any] = {"lateness_s": None, "prompt": None}
        due_s = None
        if before:
            due_s = max(each.ended_s for each in before.values()) + request.gap_s * self._stretch
            due_s = max(due_s, self._began_s + (request.at_s or 0.0) * self._stretch)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        own = StreamedAnswer([])
        _answer.set(own)
        headers = {**(func_input.extra_headers or {}), SESSION_HEADER: request.session}
        changed = replace(func_input, prompt=ids, prompt_len=len(ids) or request.new_tokens, extra_headers=headers)
        if self.chat:
            body = {**(func_input.extra_body or {}), **(request.extra or {})}
            changed = replace(changed, chat_messages=messages, extra_body=body)
        output = await send(changed, session, None)
        if due_s is not None:
            facts["lateness_s"] = output.start_time - due_s
        if output.success and not own.begun:
            output.success, output.error = False, "the answer's stream held no token"
        requested_tokens = (output.prompt_len if self.chat else len(ids), request.out)
        facts |= {"output": output, "cached_tokens": own.cached, "requested": requested_tokens}
        if not output.success:
            return NoFollowUp(f"{request.id} failed"), facts
        prompt = own.prompt if self.chat else ids
        if self._block_tokens and prompt and len(own.ids) == output.output_tokens:
            computed = [*prompt, *own.ids[:-1]]
            keys = token_keys(computed, self._block_tokens)
            facts["prompt"] = ComputedTokens(id=request.id, tokens=len(prompt), computed=len(computed), keys=keys)
        if self.chat:
            messages = [*messages, {"role": "assistant", "content": output.generated_text}]
        elif request.id in self._awaited and len(own.ids) != output.output_tokens:
            counts = f"{counted(len(own.ids), 'token id')} of {output.output_tokens}"
            return NoFollowUp(f"the answer to {request.id} came with {counts} (return_token_ids)"), facts
        return History(ids + own.ids, messages, output.start_time + output.latency), facts

    async def _end_of(self, other: str) -> History | NoFollowUp:
        awaited = self._awaited[other]
        end = await asyncio.shield(awaited.end)
        awaited.followers -= 1
        if not awaited.followers:
            del self._awaited[other]
        return end

    def _end(self, name: str, prompt: History | NoFollowUp) -> None:
        awaited = self._awaited.get(name)
        if awaited is not None and not awaited.end.done():
            awaited.end.set_result(prompt)


def tee_answers() -> None:
    """Make vLLM's request functions fail a request whose stream has an error, which they ignore, and pass the streams
    of a replay to `SessionSender`. Chunks without a token, such as the role of chat, are dropped: they would count for
    TTFT and as gaps between tokens.
    """
    requests: Any = importlib.import_module(REQUESTS)
    handler = requests.StreamedResponseHandler
    if getattr(handler, "tees", False):
        return

    class TeeingHandler(handler):  # type: ignore[misc, valid-type]
        tees = True

        def add_chunk(self, chunk_bytes: bytes) -> list[str]:
            answer = _answer.get(None)
            return [message for message in super().add_chunk(chunk_bytes) if _keep_message(message, answer)]

    requests.StreamedResponseHandler = TeeingHandler


def _keep_message(message: str, answer: StreamedAnswer | None) -> bool:
    """Whether a message of a stream is for vLLM's function; ``answer`` keeps its content. Raises BenchError for an
    error event."""
    # Only replays pay for reading every message twice.
    if answer is None and '"error"' not in message:
        return True
    if (text := data_of(message)) is None or text == DONE:
        return True
    data = json.loads(text)
    if error := data.get("error"):
        message_text = error.get("message") if isinstance(error, dict) else error
        raise BenchError(f"the answer's stream ended with an error: {' '.join(str(message_text or error).split())}")
    if answer is None:
        return True
    if usage := data.get("usage"):
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", answer.cached)
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
