"""A workload for another load generator: AIPerf's Mooncake JSON Lines, with texts of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pdlab.core.errors import UsageError
from pdlab.core.text import counted
from pdlab.traffic.blocks import drawn_words
from pdlab.traffic.formats.texts import load_tokenizer
from pdlab.traffic.requests import TrafficHead, TrafficRequest

# Common words, which tokenizers of English have as one token with the space before.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research girl "
    "guy moment air teacher force education"
)
LEAST_WORDS = 400  # of a vocabulary that prompts are drawn from


def vocabulary(folder: str | None) -> Sequence[str]:
    """Words for the text of blocks, each with a space before it: the words of a tokenizer that are exactly one token;
    `WORDS` without a tokenizer. Raises UsageError for a folder without tokenizer.json, or with too few words.
    """
    if folder is None:
        return [f" {word}" for word in WORDS.split()]
    tokenizer = load_tokenizer(folder, "--tokenizer")
    texts = tokenizer.decode_batch([[number] for number in range(tokenizer.get_vocab_size())])
    words = [(number, text) for number, text in enumerate(texts) if text[:1] == " " and text[1:].isalpha()]
    encoded = tokenizer.encode_batch([text for _, text in words], add_special_tokens=False)
    kept = [text for (number, text), back in zip(words, encoded, strict=True) if back.ids == [number]]
    if len(kept) < LEAST_WORDS:
        raise UsageError(
            f"--tokenizer {folder}: has {counted(len(kept), 'whole word')}, at least {LEAST_WORDS} are needed"
        )
    return kept


def aiperf(head: TrafficHead, requests: Iterable[TrafficRequest], words: Sequence[str]) -> Iterator[str]:
    """Every request as a line of AIPerf's ``--custom-dataset-type mooncake_trace``.

    A line has ``session_id``, and in ms ``timestamp`` if the request has a time, else ``delay`` after the answer
    before. A later turn with a timestamp is sent at that time, or after the answer before if that is later (AIPerf's
    fixed schedule). ``text_input`` is the drawn, new text of the turn: AIPerf adds earlier turns and their real
    answers. ``messages`` is the real text of single requests, sent verbatim. Raises UsageError for a session that
    AIPerf cannot send: its requests do not each follow the one before, follow real messages, or have both a time and a
    pause.
    """
    last: dict[str, TrafficRequest] = {}
    for request in requests:
        before = last.get(request.session)
        if request.parent != (before.id if before else None) or request.waits or request.fresh:
            raise UsageError(
                f"request {request.id}: AIPerf sends the requests of a session one after the other, but this one does "
                f"not follow only {before.id if before else 'nothing'}; export requests without branches"
            )
        if before is not None and (before.messages or request.messages):
            raise UsageError(
                f"request {request.id}: AIPerf sends messages verbatim, without the answers before them; export "
                "conversations of drawn text, or single requests"
            )
        if request.at_s is not None and request.gap_s:
            raise UsageError(
                f"request {request.id}: AIPerf waits until a moment or for a pause after the answer, not for both; "
                "leave at_s or gap_s out"
            )
        last[request.session] = request
        line: dict[str, Any] = {"session_id": request.session, "output_length": request.out}
        if request.at_s is not None:
            line["timestamp"] = round(1000 * request.at_s, 3)
        else:
            line["delay"] = round(1000 * request.gap_s, 3)
        if request.messages is not None:
            line |= {"messages": request.messages} | ({"extra": request.extra} if request.extra else {})
        else:
            line["text_input"] = text_of(head.seed, request, words)
        yield json.dumps(line, separators=(",", ":"))


def text_of(seed: int, request: TrafficRequest, words: Sequence[str]) -> str:
    """The blocks of a request as text."""
    drawn = (drawn_words(seed, key, tokens, len(words)).tolist() for key, tokens in request.blocks)
    return "".join(words[number] for block in drawn for number in block)
