"""From the marks of a request's timeline to the parts of its time, which follow one another without a gap.

Servers count the parts of every request (`pdlab.deploy.serving.ttft_metrics`), and readers of results show them
(`pdlab.results.timeline`, which explains each). A timeline is here a mapping as a server sends it: ``path``, ``early``,
``t`` (its marks) and ``p`` (prefill's own durations), both in ms. Runs in Ray Serve's replicas too, sent there by
value: imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Marks in their order, and the part that ends at each. `answer` ends four parts.
MARKS: Mapping[str, str] = {
    "call": "server",
    "failed": "failed_calls",
    "answer": "call",
    "queued": "submit",
    "admitted": "admission",
    "posted": "post",
    "seen": "transfer",
    "reported": "step_lag",
    "usable": "guard",
    "given_up": "lost_read",
    "scheduled": "wait",
    "first": "first_step",
    "first_byte": "out",
    "second_byte": "out",
}
_CALLS = ("call", "failed", "answer")


def chain(timeline: Mapping[str, Any]) -> list[str]:
    """The marks until the first byte, in the order in which they must be. A first token that was sent early came from
    prefill: the marks of decode's engine are behind it."""
    marks = (*_CALLS, "first_byte") if timeline.get("early") else tuple(MARKS)[:-1]
    return [mark for mark in marks if mark in timeline["t"]]


def intervals(
    timeline: Mapping[str, Any], ends_ms: float, at_ms: float = 0.0
) -> Iterator[tuple[str, str, float, float]]:
    """Each mark of the `chain` with its part, which begins where the one before ends: mark, part, begin and end in ms.
    All are within ``at_ms`` and ``ends_ms``, which is the end of the last one.
    """
    for mark in chain(timeline):
        to_ms = ends_ms if mark == "first_byte" else min(max(at_ms, timeline["t"][mark]), ends_ms)
        yield mark, _part(timeline, mark), at_ms, to_ms
        at_ms = to_ms


def seconds_of(timeline: Mapping[str, Any], ends_ms: float | None = None, at_ms: float = 0.0) -> dict[str, float]:
    """Part -> seconds, of the `intervals`. ``ends_ms`` None: until the first byte. Each is at least 0, and their sum is
    the whole time. Raises KeyError if the first byte is needed and not marked.
    """
    parts: dict[str, float] = {}
    for mark, name, begin_ms, end_ms in intervals(
        timeline, timeline["t"]["first_byte"] if ends_ms is None else ends_ms, at_ms
    ):
        split = _of_call(timeline.get("p") or {}, end_ms - begin_ms) if mark == "answer" else {name: end_ms - begin_ms}
        for part, ms in split.items():
            parts[part] = parts.get(part, 0.0) + ms / 1e3
    return parts


def after_early(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """The timeline of the second token, if the first one was sent early. Its parts begin at the first byte."""
    behind = {mark: at_ms for mark, at_ms in timeline["t"].items() if mark not in _CALLS}
    return {**timeline, "t": behind, "early": False}


def _part(timeline: Mapping[str, Any], mark: str) -> str:
    """The part that ends at a mark."""
    path = timeline["path"]
    if path in ("local", "collocated"):
        if mark == "queued":
            return "submit" if "call" in timeline["t"] else "server"
        return {"scheduled": "queue", "first": "prefill"}.get(mark, MARKS[mark])
    return "recompute" if path == "recomputed" and mark == "first" else MARKS[mark]


def _of_call(p: Mapping[str, float], ms: float) -> dict[str, float]:
    """The parts of a call of prefill that took ``ms``, from prefill's own durations."""
    if not p:
        return {"call": ms}
    total = min(max(0.0, p.get("total", 0.0)), ms)
    queue = min(max(0.0, p.get("queue", 0.0)), total)
    prefill = min(max(0.0, p.get("prefill", 0.0)), total - queue)
    return {"call": ms - total, "prefill_server": total - queue - prefill, "queue": queue, "prefill": prefill}
