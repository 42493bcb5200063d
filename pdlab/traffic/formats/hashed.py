"""Traces with block hashes and one clock: Mooncake's and Bailian's JSON Lines.

Mooncake (FAST'25 traces, github.com/kvcache-ai/Mooncake): ``timestamp`` in ms, blocks of 512 tokens, no sessions.
Bailian (Qwen's, github.com/alibaba-edu/qwen-bailian-usagetraces-anon): seconds, blocks of 16 tokens, a chat's parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from pdlab.core.errors import UsageError
from pdlab.traffic.bounded import REMEMBERED, LatestKeys
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats.record import RecordedRequest, hash_ids, hashed, json_lines, number, whole

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
MIN_BLOCKS = 2  # that a follow-up has in common with its parent


def mooncake(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """Every line. Of causal replays follow-ups are inferred: see `PromptFollowUps`. Raises UsageError."""
    size, follows = spec.block_tokens or MOONCAKE_BLOCK, PromptFollowUps()
    infers = spec.follow == "causal"
    for line, where, row in json_lines(path):
        tokens, out = whole(row, "input_length", where), whole(row, "output_length", where)
        at_s, ids, name = number(row, "timestamp", where) / 1000, hash_ids(row, where), f"r{line}"
        prompt = hashed(ids, tokens, size, name, where)
        parent, session = follows.parent(name, ids, tokens, out, at_s, size) if infers and ids else (None, name)
        yield RecordedRequest(line, name, session, prompt, out, at_s, parent=parent, continues=parent is not None)


class PromptFollowUps:
    """Finds the request that a prompt continues, only by block hashes: the latest earlier one whose full blocks (at
    least two) are the beginning of this prompt, and whose prompt and answer are shorter.

    The last full block of such a parent must be new at its arrival, and no other request may continue from it.
    Otherwise all prompts with one system prompt would count as one conversation.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()
        # Last full block -> (request, session, full blocks, prompt and answer, moment).
        self._ends: LatestKeys[int, tuple[str, str, int, int, float]] = LatestKeys()

    def parent(
        self, name: str, ids: list[int], tokens: int, out: int, at_s: float, size: int
    ) -> tuple[str | None, str]:
        """The parent (None: there is none) and the session of a request, which is remembered."""
        full = tokens // size
        found, session = None, name
        for count in range(full, MIN_BLOCKS - 1, -1):
            end = self._ends.get(ids[count - 1]) if count <= len(ids) else None
            if end is not None and end[2] == count and end[3] < tokens and end[4] < at_s:
                found, session = end[0], end[1]
                del self._ends[ids[count - 1]]
                break
        if MIN_BLOCKS <= full <= len(ids) and ids[full - 1] not in self._seen:
            self._ends[ids[full - 1]] = (name, session, full, tokens + out, at_s)
        self._seen.update(dict.fromkeys(ids[MIN_BLOCKS - 1 : full]))
        while len(self._seen) > 10 * REMEMBERED:
            self._seen.popitem(last=False)
        return found, session


def bailian(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """Every line. Raises UsageError."""
    size = spec.block_tokens or BAILIAN_BLOCK
    sessions: LatestKeys[int, str] = LatestKeys()
    for line, where, row in json_lines(path):
        tokens, out = whole(row, "input_length", where), whole(row, "output_length", where)
        at_s, chat = number(row, "timestamp", where), whole(row, "chat_id", where, 0)
        before = whole(row, "parent_chat_id", where, -1)
        if chat in sessions:
            raise UsageError(f"{where}: chat_id {chat} is there twice; give every request its own")
        name = f"c{chat}"
        prompt = hashed(hash_ids(row, where), tokens, size, name, where)
        parent = f"c{before}" if before >= 0 else None
        session = sessions.get(before, name)
        sessions[chat] = session
        yield RecordedRequest(line, name, session, prompt, out, at_s, parent=parent, continues=parent is not None)
