"""Requests that ask where their time goes, and what must be true of the answers."""

from __future__ import annotations

import http.client
import json
import random
import signal
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.processes import send

from pdlab.deploy.serving.timeline import COMMENT, HEADER
from pdlab.results.timeline import DISORDER_S, RequestTimeline

FRONT_LEAST_S = -1e-3
IN_ITS_CALL_S = 0.5


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


def seconds(timeline: RequestTimeline) -> dict[str, float]:
    """Part -> seconds."""
    return {part.name: part.seconds for part in timeline.parts()}


def exact(timeline: RequestTimeline, ttft_s: float | None) -> bool:
    """Whether it is whole and in order, and its parts sum to that TTFT of the client within 0.2 ms."""
    return (
        timeline.whole
        and timeline.disorder_s <= DISORDER_S
        and (timeline.front_s or 0.0) >= FRONT_LEAST_S
        and sum(seconds(timeline).values()) == pytest.approx(ttft_s, abs=2e-4)
    )


def killed_in_its_call(url: str, pid: int, **more: Any) -> RequestTimeline:
    """The timeline of a request whose prefill the engine of that replica is to do: the engine stops, and is killed when
    its replica has the call."""
    engine = [child.pid for child in psutil.Process(pid).children()]
    assert engine
    with ThreadPoolExecutor(1) as pool:
        try:
            for each in engine:
                send(each, signal.SIGSTOP)
            asked = pool.submit(ask, url, stream=True, **more)
            time.sleep(IN_ITS_CALL_S)
        finally:
            for each in engine:
                send(each, signal.SIGKILL)
        timeline: RequestTimeline = asked.result()
    return timeline


def check_retried(timeline: RequestTimeline, lost: str) -> None:
    """It was prefilled by another replica after the call of ``lost`` had failed, and is `exact`."""
    assert timeline.attempt == 2 and timeline.path == "pd" and exact(timeline, timeline.ttft_s), timeline
    assert timeline.role_p not in (None, lost)
    parts = seconds(timeline)
    # All the time for which the engine stood still.
    assert parts.get("failed_calls", 0.0) > 0.9 * IN_ITS_CALL_S
    assert min(parts[name] for name in ("call", "queue", "prefill", "transfer")) > 0


def check(timelines: Iterable[RequestTimeline], path: str) -> None:
    """At least 99 % are on that path and `exact`."""
    every = list(timelines)
    assert every
    right = [timeline for timeline in every if timeline.path == path and exact(timeline, timeline.ttft_s)]
    wrong = [timeline for timeline in every if timeline not in right]
    assert len(right) >= 0.99 * len(every), wrong[:3]
    assert len({timeline.d_id for timeline in every}) == len(every)
