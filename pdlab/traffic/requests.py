"""The compiled form of a workload: a head, then one request per line of JSON. Its type, its reader, its writer.

A request is due at ``at_s``, or at its parent's end plus ``gap_s`` if that is later. The requests that it waits for
come before it in the file. Times in seconds, sizes in tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pdlab.core.errors import UsageError, reason_of
from pdlab.core.schema import Finite, one_line, validate
from pdlab.traffic.bounded import REMEMBERED, LatestKeys

Block = tuple[str, int]
"""A key and tokens: equal keys of a workload stand for equal text."""


class TrafficHead(Finite):
    """The first line: properties of all requests, and how they were made.

    ``traffic``: the version of the form. ``seed`` draws the text of each block (`pdlab.traffic.blocks`). ``source``:
    the workload file, or the trace that it replays. ``kind``: the format that was read, or what generated the requests.
    ``ticks_s``: arrivals of the source were multiples of this (None: there are no ticks). ``spread``: they were spread
    over the ticks. ``tokens``: whether lengths come from the source or are estimated from characters. ``inferred``:
    parents were inferred from shared prefixes. ``left_out``: lines of the source that are no answered request, such as
    failed ones.
    """

    traffic: Literal[1] = 1
    seed: int = Field(default=0, ge=0)
    source: str = ""
    source_sha256: str | None = None
    kind: str = "made"
    follow: Literal["causal", "recorded"] = "causal"
    endpoint: Literal["completions", "chat"] = "completions"
    scale: float = Field(default=1.0, gt=0)
    speed: float = Field(default=1.0, gt=0)
    window_s: tuple[float, float] | None = None
    ticks_s: float | None = Field(default=None, gt=0)
    spread: bool = False
    tokens: Literal["exact", "estimated"] = "exact"
    inferred: bool = False
    left_out: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One request.

    ``at_s``: not due before this time since the start (None: only the requests that it waits for count). ``parent``:
    the request whose prompt and answer come before ``blocks`` in the prompt, unless ``fresh``: then it is only waited
    for. ``waits``: further requests to wait for. ``gap_s``: pause between the last end of these and the due time.
    ``blocks``: the whole prompt of a request without a parent and of a fresh one, else its new part. ``out``: output
    tokens. ``messages``: the real text of the blocks as chat messages, if the source has it; else the text is drawn.
    ``extra``: other parts of a chat request's body that belong to its prompt, such as tools.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(min_length=1, max_length=200)]
    session: Annotated[str, Field(min_length=1, max_length=200)]
    blocks: Annotated[tuple[tuple[str, Annotated[int, Field(ge=1)]], ...], Field(min_length=1)]
    out: Annotated[int, Field(ge=1)]
    at_s: Annotated[float, Field(ge=0)] | None = None
    parent: str | None = None
    gap_s: Annotated[float, Field(ge=0)] = 0.0
    waits: tuple[str, ...] = ()
    fresh: bool = False
    tenant: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    extra: dict[str, Any] | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens of its blocks."""
        return sum(tokens for _, tokens in self.blocks)

    @property
    def after(self) -> tuple[str, ...]:
        """Ids of all requests that must have ended before it is sent: its parent first."""
        return (*((self.parent,) if self.parent is not None else ()), *self.waits)

    @property
    def continues(self) -> str | None:
        """The request whose prompt and answer its prompt begins with."""
        return None if self.fresh else self.parent


@cache
def _adapter() -> TypeAdapter[TrafficRequest]:
    return TypeAdapter(TrafficRequest)


def line_of(request: TrafficRequest) -> str:
    """The request as a line, without fields that have their default."""
    row: dict[str, Any] = {"id": request.id, "session": request.session}
    for name in ("parent", "at_s", "waits", "tenant", "messages", "extra"):
        value = getattr(request, name)
        if value not in (None, ()):
            row[name] = value
    if request.parent or request.waits:
        row["gap_s"] = request.gap_s
    if request.fresh:
        row["fresh"] = True
    row["blocks"] = request.blocks
    row["out"] = request.out
    return json.dumps(row, separators=(",", ":"))


class Lines:
    """The lines of a compiled workload: the head and every request. They can be read once."""

    def __init__(self, head: TrafficHead, requests: Iterable[TrafficRequest]) -> None:
        self._head, self._requests = head, requests
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[str]:
        first = json.dumps(self._head.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
        for text in chain((first,), map(line_of, self._requests)):
            self._digest.update(f"{text}\n".encode())
            yield f"{text}\n"

    @property
    def sha256(self) -> str:
        """SHA-256 of the lines that were read, in hexadecimal."""
        return self._digest.hexdigest()


def write_requests(stream: TextIO, head: TrafficHead, requests: Iterable[TrafficRequest]) -> str:
    """Write the head and every request. Returns the SHA-256 of what was written, in hexadecimal."""
    lines = Lines(head, requests)
    stream.writelines(lines)
    return lines.sha256


def read_head(path: Path) -> TrafficHead:
    """The head of a compiled workload. Raises UsageError."""
    with opened(path, "what pdlab workload -o wrote") as stream:
        return _head(path, stream.readline())


def is_compiled(path: Path) -> bool:
    """Whether a file begins with the head of a compiled workload."""
    try:
        with path.open(encoding="utf-8") as stream:
            return re.match(r'\s*\{\s*"traffic"\s*:', stream.readline(4096)) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read_requests(path: Path) -> Iterator[TrafficRequest]:
    """Every request of a compiled workload, one at a time. Raises UsageError with the file and the line for a line that
    is no request, or that `check_order` refuses.
    """
    seen: LatestKeys[str, None] = LatestKeys()
    with opened(path, "what pdlab workload -o wrote") as stream:
        _head(path, stream.readline())
        for number, text in enumerate(stream, start=2):
            if not text.strip():
                continue
            where = f"{path}, line {number}"
            try:
                request = _adapter().validate_json(text)
            except ValidationError as error:
                raise UsageError(f"{where}: {one_line(error)}") from error
            check_order(request, seen, where)
            seen[request.id] = None
            yield request


def line_offsets(path: Path) -> Iterator[int]:
    """Where the line of each of `read_requests` begins, in bytes."""
    at = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream):
            if number and line.strip():
                yield at
            at += len(line)


def request_at(path: Path, offset: int) -> TrafficRequest:
    """The request whose line begins there, of a file that `read_requests` accepted."""
    with path.open("rb") as stream:
        stream.seek(offset)
        return _adapter().validate_json(stream.readline())


def check_order(request: TrafficRequest, before: Container[str], where: str) -> None:
    """Raises UsageError if the request has the id of one ``before`` it (the `REMEMBERED` latest), waits for a request
    that is not there, or has no due time.
    """
    if request.id in before:
        raise UsageError(f"{where}: the id {request.id!r} is there twice; give every request its own")
    for other in request.after:
        if other not in before:
            raise UsageError(
                f"{where}: waits for {other!r}, which is none of the {REMEMBERED:,} requests before it; put it there"
            )
    if request.at_s is None and not request.after:
        raise UsageError(f"{where}: needs at_s, or a parent to wait for")
    if request.fresh and not request.parent:
        raise UsageError(
            f"{where}: fresh needs a parent, whose answer the request waits for without repeating it; give parent, or "
            "leave fresh out"
        )


@contextmanager
def opened(path: Path, expected: str = "a trace") -> Iterator[TextIO]:
    """A text file to read, with or without a byte order mark; ``expected``: what to give instead. Raises UsageError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({reason_of(error)}); give {expected}") from error


def _head(path: Path, text: str) -> TrafficHead:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line 1: is no JSON; give what pdlab workload -o wrote") from error
    return validate(TrafficHead, data, where=f"{path}, line 1")
