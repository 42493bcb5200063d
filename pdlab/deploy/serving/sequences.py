"""Splits a request for several sequences into one request per sequence, and joins their answers.

With KV transfer one set of transfer parameters belongs to one prompt's blocks, and the prefill engine frees them after
one pull. A request with several prompts or with n > 1 therefore becomes one request per sequence, and their answers
become one answer, as a single engine would give it. Works on requests and answers of Ray Serve LLM by their public
fields; runs in its replicas, sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from pdlab.deploy.serving.events import DONE, DONE_EVENT, data_of, event, split_events
from pdlab.deploy.serving.usage import summed

# Fields of an answer that speak of one sequence: vLLM leaves them out where there are several.
_OF_ONE = ("metrics",)

# vLLM's own: a temperature below it is greedy.
GREEDY = 1e-5


def for_one_engine(request: Any) -> bool:
    """Whether one engine must answer the whole request.

    Because it needs more of the prompt than its KV cache: log-probabilities of prompt tokens, or the
    prompt alone (``max_tokens`` 0), or beams, which start over from the prompt at every step. Or because
    the engine refuses what its parts would not show: several greedy choices.
    """
    if request.prompt_logprobs is not None or request.use_beam_search:
        return True
    if (request.n or 1) > 1 and request.temperature is not None and request.temperature < GREEDY:
        return True
    echoes = bool(getattr(request, "echo", False)) and hasattr(request, "prompt")
    return request.max_tokens == 0 or (echoes and request.logprobs is not None)


def split(request: Any, request_id: str) -> list[Any]:
    """One request per sequence, in the order of the answer's choices; the request itself where it asks for one.

    Sequence ``j`` of a prompt has ``seed + j``, which is vLLM's own rule for n > 1.
    """
    prompt = getattr(request, "prompt", None)
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts: Sequence[Any] = prompt if several and prompt is not None else [prompt]
    n = request.n or 1
    if len(prompts) * n == 1:
        return [request]
    parts = []
    for number in range(len(prompts) * n):
        changed = {"n": 1, "request_id": f"{request_id}-{number}"}
        if several:
            changed["prompt"] = prompts[number // n]
        if request.seed is not None:
            changed["seed"] = request.seed + number % n
        parts.append(request.model_copy(update=changed))
    return parts


async def join(
    streams: Sequence[AsyncIterator[Any]], n: int, is_error: Callable[[Any], bool], request_id: str
) -> AsyncIterator[Any]:
    """One answer from the answers to the parts, ``n`` for every prompt.

    An item of a stream is an error, a whole answer, a text of server-sent events, or a list of such
    texts. Nothing is passed on before every part has begun: an error in any of them is then the
    answer to the request. Closing the iterator ends every part.
    """
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    end = object()

    async def pump(number: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for item in stream:
                await queue.put((number, item))
        except Exception as error:
            await queue.put((number, error))
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            await queue.put((number, end))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        held: list[tuple[int, Any]] = []
        begun: set[int] = set()
        while len(begun) < len(tasks):
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if is_error(_first(item)):
                yield _first(item)
                return
            begun.add(number)
            held.append((number, item))
        answer = JoinedAnswer(n, request_id)
        left = len(tasks)
        while left:
            number, item = held.pop(0) if held else await queue.get()
            if item is end:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            elif is_error(_first(item)):
                yield _first(item)
                return
            elif (out := answer.take(number, item)) is not None:
                yield out
        last = answer.finish()
        if last is not None:
            yield last
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _first(item: Any) -> Any:
    """The item, or the first of a list of them."""
    return item[0] if isinstance(item, list) and item else item


class JoinedAnswer:
    """Puts the parts' answers together: choices numbered over all prompts, usage summed, one id."""

    def __init__(self, n: int, request_id: str) -> None:
        self.n = n
        self.request_id = request_id
        self._whole: dict[int, Any] = {}
        self._usage: dict[int, dict[str, Any]] = {}
        self._last: dict[str, Any] | None = None

    def take(self, number: int, item: Any) -> Any:
        """The text to pass on for an item of part ``number``; None: it is kept for the end."""
        texts = item if isinstance(item, list) else [item]
        if not all(isinstance(text, str) for text in texts):
            self._whole[number] = texts[0]
            return None
        out = "".join(self._event(number, data) for data in events(texts))
        return out or None

    def finish(self) -> Any:
        """What comes after every part has ended."""
        if self._whole:
            return self._join_whole()
        last = ""
        if self._last is not None:
            usages = [self._usage[number] for number in sorted(self._usage)]
            last = event({**self._last, "usage": summed(usages, self.n)})
        return f"{last}{DONE_EVENT}"

    def _event(self, number: int, data: str) -> str:
        if data == DONE:
            return ""
        chunk = json.loads(data)
        if "choices" not in chunk:  # an error in the middle of a stream
            return event(chunk)
        chunk["id"] = self._id(number, chunk["id"])
        if not chunk["choices"] and chunk.get("usage"):
            self._usage[number] = chunk["usage"]
            self._last = {name: value for name, value in chunk.items() if name not in _OF_ONE}
            return ""
        for choice in chunk["choices"]:
            choice["index"] = number
        return event(chunk)

    def _join_whole(self) -> Any:
        numbers = sorted(self._whole)
        choices = []
        for number in numbers:
            choices += [choice.model_copy(update={"index": number}) for choice in self._whole[number].choices]
        first = self._whole[numbers[0]]
        usage = summed([self._whole[number].usage.model_dump() for number in numbers], self.n)
        changed = {"choices": choices, "id": self._id(numbers[0], first.id), "usage": type(first.usage)(**usage)}
        return first.model_copy(update=changed | {name: None for name in _OF_ONE if hasattr(first, name)})

    def _id(self, number: int, part_id: str) -> str:
        return part_id.replace(f"{self.request_id}-{number}", self.request_id)


def events(texts: Iterable[str]) -> list[str]:
    """The data of the server-sent events in some texts, each of which holds whole events."""
    return [data for text in texts for each in split_events(text) if (data := data_of(each)) is not None]
