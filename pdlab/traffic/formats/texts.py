"""Formats with the text of prompts and without times: ShareGPT's, OpenAI's batch, vLLM's custom data set.

Tokens are counted with a tokenizer if the workload file names one, else estimated from characters. Tokens of a chat
template are not counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlab.core.errors import UsageError
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats.record import RecordedPrompt, RecordedRequest, check_text, json_lines, name_of, whole
from pdlab.traffic.requests import Block, opened

CHARS_PER_TOKEN = 4  # of English text, about; the lengths are marked as estimated
CHUNK_CHARS = 2**20
LONGEST_WORD = 16  # of JSON outside of strings and numbers, and of escapes within strings, at least
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
# Of a chat request's body: what a template puts into the prompt beside the messages.
IN_PROMPT = ("tools", "reasoning_effort", "chat_template_kwargs")
Counts = Callable[[str], int]


def counter(folder: str | None) -> Counts:
    """A function that counts the tokens of a text, at least 1. Raises UsageError for a folder without
    tokenizer.json.
    """
    if folder is None:
        return lambda text: max(1, -(-len(text) // CHARS_PER_TOKEN))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            f"tokenizer {folder}: the package tokenizers is not installed; install it, or leave tokenizer out"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception as error:  # it raises Exception itself
        raise UsageError(f"tokenizer {folder}: no tokenizer.json that can be read ({error})") from error
    return lambda text: max(1, len(tokenizer.encode(text, add_special_tokens=False).ids))


def custom(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """vLLM's custom data set: ``{"prompt": "...", "output_tokens": 12}`` per line. Raises UsageError."""
    counts = counter(spec.tokenizer)
    for line, where, row in json_lines(path):
        messages = (_message("user", row.get("prompt"), "prompt", where),)
        out = _output_tokens(row, ("output_tokens",), spec, where)
        yield RecordedRequest(line, f"r{line}", f"r{line}", _prompt(messages, counts), out, messages=messages)


def batch(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """OpenAI's batch form, a request per line: its ``messages``, or its ``prompt``. Raises UsageError."""
    counts, seen = counter(spec.tokenizer), set[str]()
    for line, where, row in json_lines(path):
        name, body = name_of(row, "custom_id", "request", where, seen), row.get("body")
        if not isinstance(body, dict):
            raise UsageError(f"{where}: body must be the JSON object to send")
        if "messages" in body:
            messages = _messages(body["messages"], where)
        else:
            messages = (_message("user", body.get("prompt"), "body.prompt or body.messages", where),)
        out = _output_tokens(body, ("max_completion_tokens", "max_tokens"), spec, where)
        extra = {key: body[key] for key in IN_PROMPT if body.get(key) is not None} or None
        if extra:
            check_text(json.dumps(extra, ensure_ascii=False), where)
        yield RecordedRequest(line, name, name, _prompt(messages, counts), out, messages=messages, extra=extra)


def sharegpt(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """ShareGPT: a JSON list of conversations. Every message of the user that was answered is a turn; the model's own
    answer takes the place of the recorded one, whose length it has. Raises UsageError."""
    counts = counter(spec.tokenizer)
    for number, row in enumerate(_array(path), start=1):
        where = f"{path}, conversation {number}"
        entries = row.get("conversations") if isinstance(row, dict) else None
        if not isinstance(entries, list):
            raise UsageError(f"{where}: conversations must be a list of messages")
        session, parent, turn = f"s{number}", None, 0
        messages: list[dict[str, Any]] = []
        for each in entries:
            speaker = each.get("from") if isinstance(each, dict) else None
            role = "system" if speaker == "system" else ROLES.get(str(speaker))
            if role is None:
                raise UsageError(f"{where}: from {speaker!r} is none of system, {', '.join(ROLES)}")
            message = _message(role, each.get("value"), "value", where)
            if role != "assistant":
                messages.append(message)
                continue
            if not messages:
                continue  # it begins with an answer
            name = f"{session}t{turn}"
            yield RecordedRequest(
                number,
                name,
                session,
                _prompt(messages, counts),
                counts(message["content"]),
                parent=parent,
                continues=parent is not None,
                added=True,
                messages=tuple(messages),
            )
            parent, turn, messages = name, turn + 1, []


def _array(path: Path) -> Iterator[Any]:
    """The values of a JSON list, one at a time: such files are larger than what should be in memory."""
    decoder = json.JSONDecoder()
    with opened(path) as stream:
        rest, number = stream.read(CHUNK_CHARS).lstrip(), 0
        if not rest.startswith("["):
            raise UsageError(f"{path}: is no JSON list; give ShareGPT's list of conversations")
        rest = rest[1:]
        while True:
            rest = rest.lstrip(", \t\r\n")
            if rest.startswith("]"):
                if (rest[1:] + stream.read(CHUNK_CHARS)).strip():
                    raise UsageError(f"{path}: continues after the list, after conversation {number}; give one list")
                return
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError) as error:
                ends = _may_go_on(error, rest)
                if ends and (chunk := stream.read(max(CHUNK_CHARS, len(rest)))):
                    rest += chunk
                    continue
                why = "; the list does not end" if ends else ""
                raise UsageError(f"{path}, conversation {number + 1}: is no JSON{why}") from error
            number += 1
            yield value
            rest = rest[end:]


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether text that is no JSON may be the beginning of some: it breaks off at its end or within a string."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - LONGEST_WORD


def _message(role: str, text: object, key: str, where: str) -> dict[str, Any]:
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where}: {key} must be text that is not empty")
    check_text(text, where)
    return {"role": role, "content": text}


def _messages(found: object, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise UsageError(f"{where}: body.messages must be a list, at least one message")
    for each in found:
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise UsageError(f"{where}: every message must be a JSON object with a role")
    check_text(json.dumps(found, ensure_ascii=False), where)
    return tuple(found)


def _output_tokens(row: Mapping[str, Any], keys: Sequence[str], spec: TrafficFile, where: str) -> int:
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is not None:
        return whole(row, key, where)
    if spec.output_tokens is None:
        raise UsageError(f"{where}: has no {keys[0]}; give output_tokens in the workload file")
    return spec.output_tokens


def _prompt(messages: Sequence[Mapping[str, Any]], counts: Counts) -> RecordedPrompt:
    """A block per message; equal messages have equal keys."""
    blocks: list[Block] = []
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
        digest = hashlib.blake2b(f"{message['role']}\0{text}".encode(), digest_size=12)
        blocks.append((f"text/{digest.hexdigest()}", counts(text)))
    return RecordedPrompt(tuple(blocks))
