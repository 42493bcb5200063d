"""A server of OpenAI completions and chat that keeps what it was sent: the truth that replays are held against.

An answer's token ids follow from the prompt alone, so that two replays of one workload get the same answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST_S, TOKEN_S = 0.03, 0.003


@dataclass
class ReceivedRequest:
    """A request as it came: its body, its headers, when it was read and when the last token of its answer was sent."""

    body: dict[str, Any]
    headers: dict[str, str]
    came_s: float
    ended_s: float = 0.0


@dataclass
class CompletionsServer:
    """``fails``: prompts that it answers with HTTP 500; ``breaks``: those whose stream has an error as third token.
    ``sends_ids`` False: it ignores return_token_ids. ``deltas``: what chat answers in place of words, token by
    token. ``ends_apart``: the reason for the end comes after the last token, in a chunk without one."""

    received: list[ReceivedRequest] = field(default_factory=list)
    fails: Any = None
    breaks: Any = None
    deltas: list[dict[str, Any]] = field(default_factory=list)
    ends_apart: bool = False
    sends_ids: bool = True
    sends_cached: bool = False
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        body = json.loads(await request.read())
        entry = ReceivedRequest(
            body, {name.lower(): value for name, value in request.headers.items()}, time.monotonic()
        )
        self.received.append(entry)
        prompt = body["messages"] if chat else body["prompt"]
        if self.fails is not None and self.fails(prompt):
            return web.Response(status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_completion_tokens" if chat else "max_tokens"]
        digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
        words = sum(len(each["content"].split()) for each in prompt) if chat else len(_tokens(prompt))
        if chat:
            prompt_ids = {"prompt_token_ids": _ids(prompt)} if body.get("return_token_ids") and self.sends_ids else {}
            role = {"role": "assistant", "content": ""}
            await self.send(response, {"choices": [{"index": 0, "delta": role}], **prompt_ids})
        await asyncio.sleep(FIRST_S)
        for number in range(count):
            if number == 2 and self.breaks is not None and self.breaks(prompt):
                await self.send(response, {"error": {"message": "the engine\nhas died", "type": "e", "code": 500}})
                await response.write(b"data: [DONE]\n\n")
                return response
            token = digest[number % len(digest)]
            delta = self.deltas[number] if number < len(self.deltas) else {"content": f" w{token}"}
            part = {"delta": delta} if chat else {"text": f" w{token}"}
            ids = {"token_ids": [token]} if body.get("return_token_ids") and self.sends_ids else {}
            entry.ended_s = time.monotonic()
            await self.send(response, {"choices": [{"index": 0, **part, **ids}]})
            await asyncio.sleep(TOKEN_S)
        if self.ends_apart:
            await self.send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage: dict[str, Any] = {"prompt_tokens": words, "completion_tokens": count}
        if self.sends_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": words // 2}
        await self.send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]})

    async def send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _tokens(prompt: Any) -> Any:
    """Of a text its words, for the tests' vocabulary has tokens of whole words."""
    return prompt.split() if isinstance(prompt, str) else prompt


def _ids(messages: list[dict[str, Any]]) -> list[int]:
    """A token for every word."""
    words = " ".join(each["content"] for each in messages).split()
    return [int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big") for word in words]


@contextmanager
def completions_server() -> Iterator[CompletionsServer]:
    """A server in a thread of its own, for the block."""
    server, loop, ready = CompletionsServer(), asyncio.new_event_loop(), threading.Event()
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/v1/completions", server.answer), web.post("/v1/chat/completions", server.answer)])
    app.add_routes([web.get("/v1/models", server.models)])
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
