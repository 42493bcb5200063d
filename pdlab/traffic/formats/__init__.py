"""The formats of traces; the first line of a file identifies its format."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pdlab.core.errors import UsageError
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats import csv_traces, hashed, texts, weka
from pdlab.traffic.formats.record import RecordedRequest
from pdlab.traffic.requests import opened

FIRST_CHARS = 2**16


class TraceFormat(NamedTuple):
    """``times``: one clock for all requests, times since the start of each session, or not recorded. ``inferred``:
    parents follow from block hashes. ``text``: it has the text of prompts.
    """

    name: str
    times: Literal["clock", "session", "none"]
    read: Callable[[Path, TrafficFile], Iterator[RecordedRequest]]
    inferred: bool = False
    text: bool = False


MOONCAKE = TraceFormat("mooncake", "clock", hashed.mooncake, inferred=True)
BAILIAN = TraceFormat("bailian", "clock", hashed.bailian)
CSV = TraceFormat("csv", "clock", csv_traces.csv_trace)
WEKA = TraceFormat("weka", "session", weka.weka)
SHAREGPT = TraceFormat("sharegpt", "none", texts.sharegpt, text=True)
CUSTOM = TraceFormat("vllm custom", "none", texts.custom, text=True)
BATCH = TraceFormat("openai batch", "none", texts.batch, text=True)
# Keys that a first object of JSON Lines has, the rarest first -> its format.
BY_KEYS: tuple[tuple[set[str], TraceFormat], ...] = (
    ({"chat_id", "parent_chat_id", "timestamp"}, BAILIAN),
    ({"timestamp", "input_length", "output_length"}, MOONCAKE),
    ({"requests", "id"}, WEKA),
    ({"custom_id", "body"}, BATCH),
    ({"prompt"}, CUSTOM),
)
KNOWN = (
    "Mooncake, Bailian, Weka, vLLM custom or OpenAI batch JSON Lines, a ShareGPT list, or CSV with arrival_s, "
    "input_tokens and output_tokens"
)


def format_of(path: Path) -> TraceFormat:
    """The format of a trace, by its first line. Raises UsageError."""
    if path.is_dir():
        if not any(path.glob("*.json")):
            raise UsageError(f"{path}: no *.json in this folder; give one with an agent's conversation per file")
        return WEKA
    with opened(path) as stream:
        first = stream.readline(FIRST_CHARS)
        while first.isspace():
            first = stream.readline(FIRST_CHARS)
    if not first:
        raise UsageError(f"{path}: is empty; known traces are {KNOWN}")
    if first.lstrip().startswith("["):
        return SHAREGPT
    if first.lstrip().startswith("{"):
        return _of_object(path, first)
    with contextlib.suppress(csv.Error):  # Python 3.10: of a line with a zero byte
        if csv_traces.is_csv_trace(next(csv.reader([first]), [])):
            return CSV
    shown = first.strip()[:60]
    raise UsageError(f"{path}, line 1: {shown!r} begins no known trace; known are {KNOWN}")


def _of_object(path: Path, first: str) -> TraceFormat:
    try:
        row: Any = json.loads(first)
    except (ValueError, RecursionError):
        # A whole object over several lines, or a line longer than what was read of it.
        return WEKA
    for keys, each in BY_KEYS:
        if keys <= set(row):
            return each
    raise UsageError(f"{path}, line 1: its keys ({', '.join(row)}) are of no known trace; known are {KNOWN}")
