"""The parts of TTFT in Ray's metrics: the same parts as in a timeline, counted exactly, and told once a second."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ray_metrics import Metrics
from support.timelines import ALONE_MS, PD_MS, alone, drawn, pd

from pdlab.deploy.serving.ttft_metrics import COUNTERS, PART_SECONDS, WATCHED, CountsParts
from pdlab.marks.request_parts import MARKS, seconds_of
from pdlab.results.timeline import PARTS, RequestTimeline


def as_sent(timeline: RequestTimeline) -> dict[str, Any]:
    """As a server sends it."""
    whole: dict[str, Any] = timeline.model_dump(mode="json", by_alias=True, exclude={"arrival_s", "ttft_s"})
    return whole


@pytest.fixture
def ray_metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    metrics = Metrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    return metrics


@given(
    path=st.sampled_from(["pd", "local", "collocated", "cached", "recomputed"]),
    marks=st.dictionaries(st.sampled_from(sorted(MARKS)), st.floats(0, 500)),
    first_byte=st.floats(0, 600),
    p=st.dictionaries(st.sampled_from(["total", "queue", "prefill"]), st.floats(0, 300)),
    early=st.booleans(),
)
def test_the_parts_are_those_of_a_timeline(
    path: Any, marks: dict[str, float], first_byte: float, p: dict[str, float], early: bool
) -> None:
    timeline = RequestTimeline(id="r", path=path, t={**marks, "first_byte": first_byte}, p=p, early=early)
    mine = seconds_of(as_sent(timeline))
    assert mine == pytest.approx(dict(timeline.parts()))
    assert set(mine) <= set(PARTS) and set(WATCHED) - {"total"} <= set(PARTS)
    assert sum(mine.values()) == pytest.approx(first_byte / 1e3) and min(mine.values()) >= 0


def test_a_thousand_requests_are_counted_exactly_and_told_once(ray_metrics: Metrics) -> None:
    waiting: list[Callable[[], None]] = []
    counts, chance = CountsParts("r1", waiting.append), random.Random(3)
    sums: Counter[str] = Counter()
    for number in range(1000):
        ms = drawn(chance, PD_MS if number % 2 else ALONE_MS)
        counts.add(as_sent((pd if number % 2 else alone)(number, 0.0, ms)))
        sums.update({name: each / 1e3 for name, each in ms.items()})
    assert len(waiting) == 1 and not ray_metrics.counted
    waiting.pop()()
    for name, seconds in sums.items():
        assert ray_metrics.of("pdlab_ttft_seconds", part=name) == pytest.approx(seconds), name
    assert ray_metrics.of("pdlab_ttft_requests") == 1000
    assert ray_metrics.of("pdlab_ttft_requests", path="pd", ReplicaId="r1") == 500
    assert ray_metrics.of("pdlab_kv_read_bytes") == 500 * 1_000_000 and ray_metrics.of("pdlab_kv_reads") == 500
    total = [value for part, value in ray_metrics.observed if part == "total"]
    assert len(total) == 1000 and sum(total) == pytest.approx(sum(sums.values()))
    calls = ray_metrics.calls
    counts.add(as_sent(alone(0, 0.0, ALONE_MS)))
    waiting.pop()()
    assert ray_metrics.calls > calls, "and again a second later"


def test_parts_of_no_time_are_not_counted(ray_metrics: Metrics) -> None:
    waiting: list[Callable[[], None]] = []
    counts = CountsParts("r1", waiting.append)
    counts.add(as_sent(pd(0, 0.0, {**PD_MS, "guard": 0.0, "wait": 0.0})))
    waiting.pop()()
    assert ray_metrics.of("pdlab_ttft_seconds", part="guard") == 0
    assert ray_metrics.of("pdlab_ttft_seconds", part="prefill") == pytest.approx(0.05)


def test_a_tail_of_a_full_decode_or_of_lost_reads_has_percentiles(ray_metrics: Metrics) -> None:
    counts = CountsParts("r1", lambda publish: None)
    counts.add(as_sent(pd(0, 0.0, {**PD_MS, "admission": 700.0, "wait": 0.0})))
    counts.add(as_sent(pd(1, 0.0, {**PD_MS, "admission": 0.0, "wait": 900.0})))
    marks = ("call", "answer", "queued", "admitted", "given_up", "scheduled", "first", "first_byte")
    t = dict(zip(marks, (1.0, 2.0, 3.0, 4.0, 10_004.0, 10_006.0, 10_056.0, 10_057.0), strict=True))
    counts.add(as_sent(RequestTimeline(id="r", path="recomputed", t=t)))
    observed: dict[str, list[float]] = {}
    for part, seconds in ray_metrics.observed:
        observed.setdefault(part, []).append(round(1e3 * seconds, 6))
    assert observed["admission"] == [700, 1] and observed["wait"] == [900, 2]
    assert observed["lost_read"] == [10_000] and observed["recompute"] == [50]
    assert len(observed["total"]) == 3 and observed["transfer"] == 2 * [PD_MS["transfer"]]


def test_of_an_early_token_the_parts_of_decode_have_percentiles_too(ray_metrics: Metrics) -> None:
    """Its TTFT ends before they begin, and they take as long as without the flag."""
    counts = CountsParts("r1", lambda publish: None)
    later = ("queued", "admitted", "posted", "seen", "reported", "usable", "scheduled", "first", "second_byte")
    t = {"call": 1.0, "answer": 50.0, "first_byte": 51.0}
    t |= dict(zip(later, (52.0, 55.0, 56.0, 96.0, 103.0, 104.0, 109.0, 129.0, 140.0), strict=True))
    timeline = RequestTimeline(id="r", path="pd", t=t, p={"total": 40.0, "queue": 10.0, "prefill": 25.0}, early=True)
    counts.add(as_sent(timeline))
    observed = {part: round(1e3 * seconds, 6) for part, seconds in ray_metrics.observed}
    assert observed == {
        **{"total": 51, "queue": 10, "prefill": 25},
        **{"admission": 3, "transfer": 40, "step_lag": 7, "wait": 5, "first_step": 20},
    }
    counts.publish()
    assert ray_metrics.of("pdlab_ttft_seconds", part="transfer") == 0, "no part of this TTFT"


def test_a_timeline_without_a_first_byte_fails_nothing(ray_metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    counts = CountsParts("r1", lambda tell: None)
    counts.add({"t": {"queued": 1.0}, "path": "pd"})
    assert "not counted" in caplog.text and not ray_metrics.observed


def test_where_nobody_could_be_told_the_next_request_has_ray_told(ray_metrics: Metrics) -> None:
    waiting: list[Callable[[], None]] = []

    def later(tell: Callable[[], None]) -> None:
        waiting.append(tell)
        if len(waiting) == 1:
            raise RuntimeError("no running event loop")

    counts = CountsParts("r1", later)
    for number in range(2):
        counts.add(as_sent(alone(number, 0.0, ALONE_MS)))
    assert len(waiting) == 2
    waiting.pop()()
    assert ray_metrics.of("pdlab_ttft_requests") == 2


def test_every_metric_has_a_description() -> None:
    assert all(COUNTERS.values()) and PART_SECONDS not in COUNTERS
