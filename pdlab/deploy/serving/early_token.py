"""Prefill's first token, and the rule for requests in which it is also decode's first token.

Prefill samples the first token from the prompt; decode samples it once more when it has the KV cache, and goes on from
there. With greedy sampling both take the same token, except if two tokens are nearly as likely and round differently.
`first_token` decides for which requests this holds; docs/timeline.md has the table. For these requests decode's engine
can get the token (`FIRST_TOKEN` of `pdlab.marks.engine_marks`). And `early_token` can go to the client as soon as
prefill has answered, before the KV cache has moved. Decode's text must then begin with the token, and this beginning is
left out. If it does not, decode gets a new request, to continue from the prompt and prefill's token. Works on requests
and answers of Ray Serve LLM by their public fields; runs in its replicas, sent there by value: imports the standard
library and its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.deploy.serving.events import DONE, END, data_of, event, split_events
from pdlab.deploy.serving.sequences import GREEDY
from pdlab.deploy.serving.usage import with_usage

# Fields that may have any value: they leave a greedy first token as it is, or change prefill's and decode's alike.
_FREE = frozenset({
    "model", "prompt", "stream", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "user",
    "repetition_penalty", "priority", "request_id", "session_id", "add_special_tokens", "skip_special_tokens",
    "stream_options", "return_token_ids", "cache_salt",
    # Of chat.
    "messages", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort", "include_reasoning",
})  # fmt: skip
# What a decoder writes for bytes that are no whole character yet.
_PART_OF_A_CHARACTER = "\ufffd"


class SentTextMismatch(Exception):
    """Decode's answer does not begin with the text that the client has been sent."""


@dataclass(frozen=True)
class EarlyToken:
    """The first token of an answer: its text, the chunk for the client, and the ids of prompt and token."""

    text: str
    chunk: str
    prompt_ids: tuple[int, ...]
    token_id: int


def first_token(
    request: Any, answer: Any, longest: int, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> int | None:
    """The token of prefill's ``answer`` if decode takes the same first token for the ``request`` and continues after
    it. None: decode may take another token, end with it, or return more about it than prefill did.

    ``longest``: tokens of the decode engine's context. ``prompt_ids``, ``token_ids``: ids of the prompt and the answer,
    if prefill returned them. The result is None if a field of the request has another value than its default, unless
    the field is known to leave the first token unchanged.
    """
    chat, given = "messages" in type(request).model_fields, vars(request)
    most = given.get("max_completion_tokens") or given["max_tokens"]  # an attribute of chat's would warn of its age
    if most is None and chat:  # as long as the context
        most = longest - len(prompt_ids)
    if (most or 0) < 2 or len(prompt_ids) + most > longest:
        return None
    if request.temperature is None or not 0 <= request.temperature < GREEDY:
        return None
    fields = type(request).model_fields
    for name in request.model_fields_set:
        if name not in _FREE and (name not in fields or _means_something(getattr(request, name), fields[name])):
            return None
    if not (chat or isinstance(request.prompt, str) or all(isinstance(each, int) for each in request.prompt or [""])):
        return None
    choices: list[Any] = getattr(answer, "choices", None) or []
    if len(choices) != 1:
        return None
    if choices[0].finish_reason != "length" or not prompt_ids or len(token_ids) != 1:
        return None
    return token_ids[0]


def early_token(
    request: Any, answer: Any, longest: int, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> EarlyToken | None:
    """The `first_token` of a completion that is streamed as text, so that it may be sent at once; None: no token
    may.
    """
    token = first_token(request, answer, longest, prompt_ids, token_ids)
    usage = getattr(request.stream_options, "continuous_usage_stats", False)
    if token is None or not request.stream or request.return_token_ids is not None or usage:
        return None
    text = answer.choices[0].text
    if not text or _PART_OF_A_CHARACTER in text:
        return None
    begin = {
        "index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None,
        "prompt_token_ids": None, "token_ids": None,
    }  # fmt: skip
    chunk = {
        "id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model,
        "choices": [begin],
    }  # fmt: skip
    return EarlyToken(text, event(chunk), tuple(prompt_ids), token)


def _means_something(value: Any, field: Any) -> bool:
    return value not in (None, field.get_default(call_default_factory=True), [], {}, "")


class DropsSentText:
    """Decode's stream without the text that the client already has. Items are texts of server-sent events, and lists of
    them; other items pass unchanged.
    """

    def __init__(self, text: str) -> None:
        self._left = text

    @property
    def done(self) -> bool:
        """Whether the rest of the stream is the client's."""
        return not self._left

    def rest(self, item: Any) -> Any:
        """The part of the item to send; None: nothing. Raises SentTextMismatch."""
        if self.done:
            return item
        if isinstance(item, list):
            kept = [text for each in item if (text := self.rest(each)) is not None]
            return kept or None
        if not isinstance(item, str):
            self._left = ""  # an error
            return item
        return "".join(map(self._event, split_events(item))) or None

    def _event(self, text: str) -> str:
        """The event to send in place of ``text``, with its end; empty: none."""
        if self.done or (data := data_of(text)) is None:
            return f"{text}{END}"
        chunk = {} if data == DONE else json.loads(data)
        if "error" in chunk:
            self._left = ""
            return f"{text}{END}"
        choices = chunk.get("choices")
        if not choices:
            raise SentTextMismatch
        choice, left = choices[0], self._left
        own = choice.get("text") or ""
        if own.startswith(left):
            self._left = ""
            choice["text"] = own[len(left) :]
            return event(chunk) if choice["text"] or choice.get("finish_reason") is not None else ""
        if left.startswith(own) and choice.get("finish_reason") is None:
            self._left = left[len(own) :]
            return ""
        raise SentTextMismatch


def going_on(request: Any, early: EarlyToken) -> Any:
    """The request for the text after the early token, computed only by decode."""
    changed = {"prompt": [*early.prompt_ids, early.token_id], "max_tokens": request.max_tokens - 1}
    return request.model_copy(update=changed | {"kv_transfer_params": None})


def counted(item: Any) -> Any:
    """An item of the answer to `going_on`, whose usage counts the early token among the answer's."""

    def edit(usage: dict[str, Any]) -> None:
        usage["prompt_tokens"] -= 1
        usage["completion_tokens"] += 1

    return with_usage(item, '"usage"', edit)
