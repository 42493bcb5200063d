"""Requests that ask where their time goes, and what must be true of the answers."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdlab.deploy.serving.timeline import COMMENT, HEADER
from pdlab.results.timeline import DISORDER_S, RequestTimeline

FRONT_LEAST_S = -1e-3


def ask(
    url: str,
    route: str = "/v1/completions",
    *,
    stream: bool,
    asks: bool = True,
    headers: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> Any:
    """The timeline of one request of a fresh prompt, with the TTFT that was measured here; None: none came."""
    words = " ".join(random.Random().choices(["ba", "ufo", "wan", "gi", "jekor"], k=120))
    given = {"messages": [{"role": "user", "content": words}]} if "chat" in route else {"prompt": words}
    body = {"model": "tiny-gptoss", "max_tokens": 4, "temperature": 0, "stream": stream, **given, **more}
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    sent = {"content-type": "application/json", "x-request-id": "mine"} | ({HEADER: "1"} if asks else {})
    began = time.perf_counter()
    connection.request("POST", route, json.dumps(body), {**sent, **headers})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    if not stream:
        timeline, ttft_s = answer.getheader(HEADER), time.perf_counter() - began
        assert "pdlab" not in answer.read().decode()
    else:
        first = answer.readline()
        ttft_s = time.perf_counter() - began
        assert first.startswith(b"data: ")
        text = answer.read().decode()
        timeline = text.partition(COMMENT)[2].partition("\n\n")[0] or None
        assert text.endswith("data: [DONE]\n\n") and answer.getheader(HEADER) is None
    connection.close()
    return None if timeline is None else RequestTimeline.model_validate(json.loads(timeline) | {"ttft_s": ttft_s})


def streamed(text: str) -> tuple[str, dict[str, Any]]:
    """The text of a streamed completion, and its usage."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), usage


def check(timelines: Iterable[RequestTimeline], path: str) -> None:
    """At least 99 % are whole, in order, and their parts sum to the client's TTFT within 0.2 ms."""
    every = list(timelines)
    assert every
    right = [
        timeline
        for timeline in every
        if timeline.whole
        and timeline.path == path
        and timeline.disorder_s <= DISORDER_S
        and (timeline.front_s or 0.0) >= FRONT_LEAST_S
        and sum(part.seconds for part in timeline.parts()) == pytest.approx(timeline.ttft_s, abs=2e-4)
    ]
    wrong = [timeline for timeline in every if timeline not in right]
    assert len(right) >= 0.99 * len(every), wrong[:3]
    assert len({timeline.d_id for timeline in every}) == len(every)
