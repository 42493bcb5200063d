"""Server-sent events of completions: the texts of streams, written and split.

Runs in replicas of Ray Serve, sent there by value: imports only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

DATA, END, DONE = "data: ", "\n\n", "[DONE]"
DONE_EVENT = f"{DATA}{DONE}{END}"
_DATA_CHARS = len(DATA)


def event(chunk: dict[str, Any]) -> str:
    """The event of a chunk of an answer."""
    return f"{DATA}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}{END}"


def split_events(text: str) -> Iterator[str]:
    """The events, without their ends, in a text of whole events."""
    return filter(None, text.split(END))


def data_of(text: str) -> str | None:
    """The data of an event without its end; None for another event, such as a comment."""
    return text[_DATA_CHARS:] if text.startswith(DATA) else None
