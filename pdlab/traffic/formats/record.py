"""One request of a trace, as in its file, and the reading of lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.core.errors import UsageError
from pdlab.traffic.requests import Block, opened

MOST = sys.float_info.max
NAME_CHARS = 160  # of what a source names; ids of its requests are somewhat longer


class RecordedPrompt:
    """The blocks of a prompt, in tokens as recorded."""

    __slots__ = ("blocks", "tokens")

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        self.tokens = sum(tokens for _, tokens in blocks)

    def scaled(self, scale: float) -> tuple[Block, ...]:
        """Blocks whose tokens are divided by ``scale``, each at least 1."""
        return scaled(self.blocks, scale)


class HashedPrompt(RecordedPrompt):
    """A prompt by its block hashes. Its blocks are made on demand, because a trace has millions of them."""

    __slots__ = ("block_tokens", "ids", "within")

    def __init__(self, ids: list[int], tokens: int, block_tokens: int, within: str) -> None:
        self.ids, self.tokens, self.block_tokens, self.within = ids, tokens, block_tokens, within

    def scaled(self, scale: float) -> tuple[Block, ...]:
        last = self.tokens - self.block_tokens * (len(self.ids) - 1)
        each, last = scaled_tokens(self.block_tokens, scale), scaled_tokens(last, scale)
        blocks = [(f"{self.within}h{number}", each) for number in self.ids]
        blocks[-1] = (blocks[-1][0], last)
        return tuple(blocks)


def scaled(blocks: tuple[Block, ...], scale: float) -> tuple[Block, ...]:
    """Blocks whose tokens are divided by ``scale``, each at least 1."""
    return blocks if scale == 1 else tuple((key, scaled_tokens(tokens, scale)) for key, tokens in blocks)


def scaled_tokens(tokens: int, scale: float) -> int:
    """A number of tokens divided by ``scale``, at least 1."""
    return max(1, round(tokens / scale))


@dataclass(slots=True)
class RecordedRequest:
    """A request of a trace.

    ``line``: line number in the file. ``at_s``: arrival in seconds from any origin, or from the start of the session if
    sessions have no common clock; None: not recorded. ``blocks``: the whole prompt. ``out`` 0: it was not answered.
    ``parent``, ``waits``: the requests that it waited for; ``continues``: its prompt begins with the parent's prompt
    and answer, and ``prompt`` has both unless ``added``: then it has only the new part. ``gap_s``: pause after the end
    of the requests that it waited for; None: ``at_s`` is its arrival.
    """

    line: int
    id: str
    session: str
    prompt: RecordedPrompt
    out: int
    at_s: float | None = None
    parent: str | None = None
    waits: tuple[str, ...] = ()
    continues: bool = False
    added: bool = False
    gap_s: float | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    extra: dict[str, Any] | None = None


def json_lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, where it is in words, object) of every line that is not empty. Raises UsageError."""
    with opened(path) as stream:
        for number, text in enumerate(stream, start=1):
            if text.strip():
                yield number, f"{path}, line {number}", json_object(text, f"{path}, line {number}")


def json_object(text: str, where: str) -> dict[str, Any]:
    """Raises UsageError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is no JSON; give one object per line") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: is no JSON object; give one per line")
    return row


def whole(row: Mapping[str, Any], key: str, where: str, least: int = 1) -> int:
    """A whole number of a row. Raises UsageError."""
    value = row.get(key)
    known = None if isinstance(value, bool) or not isinstance(value, int | float) else value
    if known is not None and least <= known <= MOST and known == int(known):
        return int(known)
    found = f"{value!r} is none" if key in row else "it is missing"
    raise UsageError(f"{where}: {key} must be a whole number of at least {least}: {found}")


def number(row: Mapping[str, Any], key: str, where: str) -> float:
    """A number of a row, at least 0. Raises UsageError."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        found = f"{value!r} is none" if key in row else "it is missing"
        raise UsageError(f"{where}: {key} must be a number of at least 0: {found}")
    return float(value)


def name_of(row: Mapping[str, Any], key: str, what: str, where: str, seen: set[str]) -> str:
    """The name of a request or a session, which goes into keys, ids and headers; it is added to those ``seen``. Raises
    UsageError."""
    name = check_name(row.get(key), key, what, where)
    if name in seen:
        raise UsageError(f"{where}: {key} {name!r} is there twice; give every {what} its own")
    seen.add(name)
    return name


def check_name(name: object, key: str, what: str, where: str) -> str:
    """The name, if it can be one. Raises UsageError."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS or not name.isprintable():
        raise UsageError(
            f"{where}: {key} must be a text of 1 to {NAME_CHARS} printable characters that names the {what}"
        )
    return name


def check_text(text: str, where: str) -> None:
    """Raises UsageError for text that cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: holds half of a surrogate pair ({error.object[error.start]!r}); correct the text"
        ) from error


def hash_ids(row: Mapping[str, Any], where: str) -> list[int] | None:
    """The block hashes of a row; None where it has none. Raises UsageError."""
    ids = row.get("hash_ids")
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or {*map(type, ids)} != {int}:
        raise UsageError(f"{where}: hash_ids must be a list of whole numbers")
    return ids


def hashed(
    ids: list[int] | None, tokens: int, block_tokens: int, own: str, where: str, within: str = ""
) -> RecordedPrompt:
    """The prompt by its block hashes, the last block in part; one block of key ``own`` without hashes. ``within``: in
    what the hashes count. Raises UsageError if the number of hashes does not match the number of tokens.
    """
    if ids is None:
        return RecordedPrompt(((own, tokens),))
    if len(ids) != -(-tokens // block_tokens):
        raise UsageError(
            f"{where}: {len(ids)} hash_ids for {tokens} tokens are no blocks of {block_tokens}; "
            "give block_tokens in the workload file if blocks have another size"
        )
    return HashedPrompt(ids, tokens, block_tokens, within)
