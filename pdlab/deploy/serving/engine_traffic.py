"""Counts the requests and tokens of one fluid engine, for the controller of the roles.

Runs in Ray Serve's replicas, sent there by value: imports the standard library and `pdlab.roles`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from pdlab.roles.messages import EngineReport
from pdlab.roles.observed import size_class
from pdlab.roles.prefixes import CHARS_PER_TOKEN, chunks_of

_COMPLETION_TOKENS = re.compile(r'"completion_tokens":\s*(\d+)')


class EngineAnswer:
    """One sequence that this engine decodes: its arrival, the chunks of its prompt if they are needed, how many of its
    tokens are known to be in this engine's cache, how many another engine must compute, the time of its prefill,
    whether that was elsewhere (so that KV moves), and what was sent so far.
    """

    def __init__(self, arrived_s: float, prompt_tokens: int) -> None:
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.chunks: list[int] = []
        self.cached_tokens = 0
        self.requested_tokens = 0
        self.prefilled_s: float | None = None
        self.moves = False
        self.first_s: float | None = None
        self.tokens = 0


class TrafficCounts:
    """Counts since the last `take`, and the current requests. Times are those of ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.waiting_prompt_tokens = 0
        self.coming = 0  # sequences whose prompts are prefilled elsewhere
        self.running = 0
        self._prefills = 0
        self._busy_since = 0.0
        self._counts = EngineReport()

    def prefill_began(self, tokens: int) -> None:
        """A prompt has arrived whose KV cache another engine will read."""
        if not self._prefills:
            self._busy_since = self._clock()
        self._prefills += 1
        self.waiting_prompt_tokens += tokens

    def prefill_ended(self, tokens: int, *, answered: bool, computed: int | None = None) -> None:
        """The prompt was answered, or cancelled. ``computed``: how many of its tokens were not cached (None: all)."""
        self._prefills -= 1
        self.waiting_prompt_tokens -= tokens
        if answered:
            self._counts.prefilled_tokens += tokens
            self._counts.computed_tokens += tokens if computed is None else computed
        if not self._prefills:
            self._counts.prefill_busy_s += self._clock() - self._busy_since

    def arrived(self, prompt_tokens: int) -> EngineAnswer:
        """A client's sequence has arrived, which this engine will decode."""
        self.coming += 1
        return EngineAnswer(self._clock(), prompt_tokens)

    def prompted(self, answer: EngineAnswer, tokens: int) -> None:
        """Another engine must compute this number of tokens of its prompt. If the sequence was counted before, only the
        additional tokens count.
        """
        if tokens > answer.requested_tokens:
            self._count(
                self._counts.prompts,
                answer,
                tokens - answer.requested_tokens,
                requests=0 if answer.requested_tokens else 1,
            )
            answer.requested_tokens = tokens

    def stays(self, answer: EngineAnswer) -> None:
        """The prompt is computed on this engine."""
        size = size_class(answer.prompt_tokens)
        self._counts.local[size] = self._counts.local.get(size, 0) + 1

    def _count(self, counts: dict[int, tuple[int, int]], answer: EngineAnswer, tokens: int, requests: int = 1) -> None:
        """So many more requests, and their tokens, among those of the size of its prompt."""
        size = size_class(answer.prompt_tokens)
        before = counts.get(size, (0, 0))
        counts[size] = (before[0] + requests, before[1] + tokens)

    def prefilled(self, answer: EngineAnswer, *, moves: bool) -> None:
        """From now on the sequence is this engine's work: another engine has prefilled its prompt and the KV ``moves``,
        or this engine computes it.
        """
        if answer.prefilled_s is None:
            answer.prefilled_s, answer.moves = self._clock(), moves
            self.coming -= 1
            self.running += 1

    def sent(self, answer: EngineAnswer, item: Any) -> None:
        """A piece of the answer goes to the client."""
        if answer.first_s is None:
            self.prefilled(answer, moves=False)
            answer.first_s = self._clock()
            if _of_stream(item):  # else it has the last token too, or is an error
                self._counts.ttft_s.append(answer.first_s - answer.arrived_s)
                if answer.moves and answer.prefilled_s is not None:
                    self._counts.handoff_s.append(answer.first_s - answer.prefilled_s)
        total = tokens_after(item, answer.tokens)
        self._counts.generated_tokens += total - answer.tokens
        answer.tokens = total

    def ended(self, answer: EngineAnswer, *, whole: bool) -> None:
        """The answer is complete (``whole``), or the client has left."""
        if answer.prefilled_s is None:
            self.coming -= 1
        else:
            self.running -= 1
        if not whole or answer.first_s is None:
            return
        self._count(self._counts.answers, answer, answer.tokens)
        if answer.tokens > 1 and self._clock() > answer.first_s:
            self._counts.tpot_s.append((self._clock() - answer.first_s) / (answer.tokens - 1))

    @property
    def idle(self) -> bool:
        """Whether there are no requests now, and none arrived or ended since the last `take`."""
        return not (self._prefills or self.coming or self.running or self._counts != EngineReport())

    def take(self) -> EngineReport:
        """The counts since the last call, and the current requests."""
        now_s = self._clock()
        if self._prefills:
            self._counts.prefill_busy_s += now_s - self._busy_since
            self._busy_since = now_s
        counts, self._counts = self._counts, EngineReport()
        counts.waiting_prompt_tokens = self.waiting_prompt_tokens
        counts.coming, counts.running = self.coming, self.running
        return counts


def _of_stream(item: Any) -> bool:
    """Whether a piece of an answer is events of a stream."""
    first = item[0] if isinstance(item, list) and item else item
    return isinstance(first, (str, bytes))


def prompt_of(request: Any) -> str | list[int]:
    """Token ids of a request's prompt, or its text; of messages, that of all their fields."""
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]
    if isinstance(prompt, (str, list)):
        return prompt
    return "".join(f"{text}\0" for message in getattr(request, "messages", None) or () for text in _texts(message))


def _texts(message: Any) -> list[str]:
    fields = list(message.values()) if isinstance(message, dict) else [str(message)]
    return [
        field if isinstance(field, str) else json.dumps(field, ensure_ascii=False, default=str)
        for field in fields
        if field is not None
    ]


def prompt_tokens(request: Any) -> int:
    """Tokens of a request's prompt or messages; of a text, about."""
    prompt = prompt_of(request)
    return max(1, len(prompt) // CHARS_PER_TOKEN if isinstance(prompt, str) else len(prompt))


# Beside the messages, what a chat template may put in front of them.
_APART = ("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")


def prompt_chunks(request: Any) -> list[int]:
    """Of a request's prompt or messages (`pdlab.roles.prefixes.chunks_of`)."""
    apart = [hasattr(request, "messages"), *(getattr(request, name, None) for name in _APART)]
    return chunks_of(prompt_of(request), json.dumps(apart, default=str))


def tokens_after(item: Any, before: int) -> int:
    """Tokens of an answer after ``item`` was sent; ``before``: tokens before it. They come from the usage, else one per
    event of a stream (an event may have more).
    """
    if isinstance(item, list):
        for part in item:
            before = tokens_after(part, before)
        return before
    if isinstance(item, (str, bytes)):
        text = item.decode(errors="replace") if isinstance(item, bytes) else item
        if '"usage"' in text and (found := _COMPLETION_TOKENS.findall(text)):
            return max(int(found[-1]), before)
        return before + text.count('"finish_reason"')
    usage = getattr(item, "usage", None)
    return max(int(getattr(usage, "completion_tokens", 0) or 0), before)
