"""Agent sessions in the form of Weka's KV-cache tester: one JSON object per conversation, with nested subagents.

A file is one conversation, one per line, or a folder of such files. Seconds count from the conversation's begin,
hashes of blocks count within it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlab.core.errors import UsageError
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats.record import RecordedRequest, hash_ids, hashed, json_object, name_of, number, whole
from pdlab.traffic.requests import opened

WEKA_BLOCK = 64
CALLS, SUBAGENT = ("n", "s"), "subagent"


def weka(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """The requests of every conversation, one conversation after the other. Raises UsageError."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    seen: set[str] = set()
    for file in files:
        with opened(file) as stream:
            first = stream.readline()
            if one_per_line(first):
                for line, text in enumerate((first, *stream), start=1):
                    if text.strip():
                        where = f"{file}, line {line}"
                        yield from _Conversation(json_object(text, where), where, line, spec, seen).requests()
            else:
                row = _whole_file(file, first + stream.read())
                yield from _Conversation(row, str(file), 1, spec, seen).requests()


def one_per_line(first: str) -> bool:
    """Whether a first line is a whole JSON object."""
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _whole_file(file: Path, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "somewhere"
        raise UsageError(f"{file}, {place}: is no JSON; give one conversation as an object") from error
    if not isinstance(row, dict):
        raise UsageError(f"{file}: is no JSON object; give one conversation per file")
    return row


class _Conversation:
    """One conversation. Its requests are made in the order of the file, each after what it waits for."""

    def __init__(self, row: Mapping[str, Any], where: str, line: int, spec: TrafficFile, seen: set[str]) -> None:
        self.where, self.line = where, line
        self.name = name_of(row, "id", "conversation", where, seen)
        if row.get("hash_id_scope", "local") != "local":
            raise UsageError(
                f"{where}: hash_id_scope {row['hash_id_scope']!r}: hashes count within a conversation; it must be local"
            )
        size = row.get("block_size", spec.block_tokens or WEKA_BLOCK)
        self.size = whole({"block_size": size}, "block_size", where)
        self.entries = _entries(row, where)

    def requests(self) -> Iterator[RecordedRequest]:
        yield from self._calls(self.entries, self.where, self.name, None)

    def _calls(
        self, entries: Sequence[Mapping[str, Any]], where: str, prefix: str, spawned_by: str | None
    ) -> Iterator[RecordedRequest]:
        """``spawned_by``: the request after which a subagent began."""
        before: str | None = None
        before_ids: list[int] = []
        subagents: list[str] = []  # their last requests, which the next call waits for
        for count, entry in enumerate(entries):
            place = f"{where}, request {count + 1}"
            kind = entry.get("type")
            if kind == SUBAGENT:
                last = None
                nested = _entries(entry, place)
                for request in self._calls(nested, place, f"{prefix}/{count}", before or spawned_by):
                    yield request
                    last = request.id
                subagents += [last] if last else []
                continue
            if kind not in CALLS:
                raise UsageError(f"{place}: type {kind!r} is none of {', '.join((*CALLS, SUBAGENT))}")
            tokens, out = whole(entry, "in", place), whole(entry, "out", place)
            ids, name = hash_ids(entry, place), f"{prefix}/{count}"
            full = len(before_ids) - 1
            continues = before is not None and ids is not None and full >= 1 and ids[:full] == before_ids[:full]
            # Subagents that ran beside a parent's own call are waited for, too.
            parent = before or spawned_by or (subagents.pop() if subagents else None)
            yield RecordedRequest(
                self.line,
                name,
                self.name,
                hashed(ids, tokens, self.size, name, place, within=f"{self.name}/"),
                out,
                number(entry, "t", place),
                parent=parent,
                waits=tuple(subagents),
                continues=continues,
                gap_s=None if parent is None else self._gap_s(entry, place),
            )
            before, before_ids, subagents = name, ids or [], []

    def _gap_s(self, entry: Mapping[str, Any], place: str) -> float:
        return number(entry, "think_time", place) if entry.get("think_time") is not None else 0.0


def _entries(row: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    entries = row.get("requests")
    if not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
        raise UsageError(f"{where}: requests must be a list of JSON objects, at least one")
    return entries
