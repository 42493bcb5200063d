"""Requests as columns: the same window and the same figures as `pdlab.results.metrics` has from records."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import records as made

from pdlab.analysis import requests
from pdlab.analysis.curves import curves
from pdlab.core.errors import StoreError
from pdlab.core.workload import Closed, Load, Open, Workload
from pdlab.report import load
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import Distribution, Manifest, RequestRecord, Run, Summary
from pdlab.results.store import Store


@st.composite
def levels(draw: st.DrawFn) -> tuple[list[RequestRecord], Load]:
    """Arrivals in order, some requests failed or of one token, under either kind of load."""
    count = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    failing = draw(st.sampled_from([0.0, 0.2, 1.0]))
    arrivals = np.sort(rng.uniform(0, 30, count)).round(6).tolist()
    records = []
    for arrival in arrivals:
        tokens = int(rng.integers(1, 6))
        first = arrival + float(rng.uniform(1e-6, 2))
        gaps = tuple(float(g) for g in rng.uniform(0, 0.3, tokens - 1).round(6))
        if rng.uniform() < failing:
            cut = rng.uniform() < 0.5
            records.append(
                RequestRecord(
                    arrival_s=arrival,
                    first_token_s=first if cut else None,
                    input_tokens=5,
                    output_tokens=0,
                    error='late, "itl_s":[1], said the server',
                )
            )
        else:
            records.append(
                RequestRecord(
                    arrival_s=arrival,
                    first_token_s=first,
                    finish_s=first + sum(gaps),
                    input_tokens=5,
                    output_tokens=tokens,
                    itl_s=gaps,
                )
            )
    load: Load = draw(st.sampled_from([Closed(concurrency=1), Closed(concurrency=4), Open(rate_rps=2.0)]))
    return records, load


@settings(deadline=None)
@given(levels())
def test_the_same_figures_as_from_records(level: tuple[list[RequestRecord], Load]) -> None:
    records, load = level
    whole, steady = metrics.whole(LevelData.of(records)), metrics.steady(LevelData.of(records), load)
    for summary, is_steady in ((whole, False), (steady, True)):
        if summary is None:
            continue
        text = "\n".join(record.model_dump_json(exclude_defaults=True) for record in records)
        columns = requests.window(requests.parse(text.encode()), load, is_steady)
        assert len(columns.finish_s) == summary.completed
        assert columns.window_s == pytest.approx(summary.duration_s)
        assert columns.rate.value == pytest.approx(summary.requests_per_s)
        wanted: dict[requests.Latency, Distribution | None] = {
            "ttft": summary.ttft,
            "tpot": summary.tpot,
            "e2el": summary.e2el,
        }
        for latency, distribution in wanted.items():
            figures = {name: estimate.value for name, estimate in columns.estimates(latency).items()}
            if distribution is None:
                assert figures == {}
            else:
                assert figures == pytest.approx({"mean": distribution.mean_s, **distribution.percentiles_s})


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e4)] * 3, st.integers(1, 9), st.integers(1, 9)), min_size=1), st.booleans())
def test_records_that_are_all_alike_are_read_as_others_are(
    rows: list[tuple[float, float, float, int, int]], varied: bool
) -> None:
    records = [
        RequestRecord(
            arrival_s=arrival,
            first_token_s=first,
            finish_s=finish,
            input_tokens=tokens_in,
            output_tokens=tokens_out,
            itl_s=(0.5,) * (tokens_out - 1),
            lateness_s=arrival / 1e6 if varied else None,
            requested=(tokens_in, tokens_out) if varied else None,
        )
        for arrival, first, finish, tokens_in, tokens_out in rows
    ]
    text = "\n".join(record.model_dump_json(exclude_defaults=True) for record in records).encode()
    expected = LevelData.of(records)
    for layout in (text, text.replace(b":", b": ")):  # the second is read one by one
        data = requests.parse(layout)
        for name in ("arrival_s", "first_token_s", "finish_s", "output_tokens"):
            assert (getattr(data, name) == getattr(expected, name)).all()


@given(
    st.lists(
        st.tuples(st.integers(0, 399), st.sampled_from(range(3)), st.sampled_from(b'0159.-,:"{}[]\nas_')), max_size=2
    )
)
def test_damaged_records_are_judged_as_one_by_one(damage: list[tuple[int, int, int]]) -> None:
    text = bytearray(b"\n".join(record.model_dump_json(exclude_defaults=True).encode() for record in simple(4)))
    for place, kind, byte in damage:
        at = place % len(text)
        text[at : at + (kind > 0)] = bytes([byte]) if kind < 2 else b""

    def parsed() -> str | None:
        try:
            return str(requests._table(bytes(text)).tolist())  # NaN is not equal to itself
        except (KeyError, TypeError, ValueError):
            return None

    table = parsed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_numbers", lambda bare: None)
        assert table == parsed()


def kept(tmp_path: Path, records: list[RequestRecord]) -> tuple[Store, Run]:
    store = Store(tmp_path)
    workload = Workload(input_tokens=5, output_tokens=3)
    run = made.run(records, Closed(concurrency=1), count=len(records), workload=workload, window=True)
    return store, store.write(run, records)


def simple(count: int) -> list[RequestRecord]:
    return [made.record(float(i), 0.25, 0.25, 3, input_tokens=5, itl_s=(0.25, 0.25)) for i in range(count)]


def test_read_from_the_store(tmp_path: Path) -> None:
    store, run = kept(tmp_path, simple(40))
    columns = requests.load_requests(store.folder, run)
    assert columns is not None
    assert set(columns.ttft_s) == {0.25}
    assert set(columns.tpot_s) == {0.25}
    assert columns.failed == 0
    store.records_path(run.key).unlink()
    assert requests.load_requests(store.folder, run) is None


def first_lines(data: bytes, count: int) -> bytes:
    return gzip.compress(b"\n".join(gzip.decompress(data).splitlines()[:count]))


def test_several_gzip_members_are_read_to_the_end(tmp_path: Path) -> None:
    store, run = kept(tmp_path, simple(40))
    path = store.records_path(run.key)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(lines[:10])) + gzip.compress(b"".join(lines[10:])))
    columns = requests.load_requests(store.folder, run.model_copy(update={"steady": None}))
    assert columns is not None and len(columns) == 40


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [each.model_copy(update={"requested": (5, 3 + n % 2)}) for n, each in enumerate(simple(40))]
    store, run = kept(tmp_path, records)
    at_once = requests.load_requests(store.folder, run)
    monkeypatch.setattr(requests, "AT_ONCE_BYTES", 0)
    for size in (1, 100, 5000):
        monkeypatch.setattr(requests, "PIECE_BYTES", size)
        columns = requests.load_requests(store.folder, run)
        assert columns is not None and at_once is not None and columns.sha256 == at_once.sha256 == run.raw_sha256
        assert columns.e2el_s.tolist() == at_once.e2el_s.tolist() and columns.window_s == at_once.window_s
        path = store.records_path(run.key)
        assert sum(map(requests.wrong_counts, requests.texts(path))) == 20
        assert max(map(len, requests.texts(path))) < size + 300


UNREADABLE = r"concurrency1\.records\.json\.gz: records cannot be read"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], UNREADABLE),
        (lambda data: b"not gzip", UNREADABLE),
        (lambda data: gzip.compress(b"{"), UNREADABLE),
        (lambda data: gzip.compress(b'{"finish_s":1}'), UNREADABLE),
        (lambda data: gzip.compress(b'{"arrival_s":"soon","output_tokens":1}'), UNREADABLE),
        (lambda data: first_lines(data, 0), "holds 0 requests, its level completed 40"),
        (lambda data: first_lines(data, 39), "holds 39 requests, its level completed 40"),
    ],
    ids=["cut", "no-gzip", "no-json", "no-arrival", "no-number", "none", "one-missing"],
)
def test_damaged_records_are_named(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    store, run = kept(tmp_path, simple(40))
    path = store.records_path(run.key)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=message):
        requests.load_requests(store.folder, run)


def test_answers_of_other_lengths_than_requested_are_counted() -> None:
    records = [
        RequestRecord(
            arrival_s=0.0, first_token_s=1.0, finish_s=2.0, input_tokens=5, output_tokens=3, requested=(5, 3)
        ),
        RequestRecord(
            arrival_s=0.0, first_token_s=1.0, finish_s=2.0, input_tokens=5, output_tokens=2, requested=(5, 3)
        ),
        RequestRecord(
            arrival_s=0.0, first_token_s=1.0, finish_s=2.0, input_tokens=4, output_tokens=3, requested=(5, 3)
        ),
        RequestRecord(arrival_s=0.0, input_tokens=5, output_tokens=0, requested=(5, 3), error="no answer"),
    ]
    text = "\n".join(record.model_dump_json(exclude_defaults=True) for record in records).encode()
    assert requests.wrong_counts(text) == 2
    assert requests.wrong_counts(text.replace(b'"requested":[5,3]', b'"lateness_s":0.0')) == 0
    assert len(requests.parse(text)) == 4


def closed_loop(count: int, concurrency: int, seed: int) -> list[RequestRecord]:
    """Requests of random times; each is sent when an answer frees its place."""
    rng = np.random.default_rng(seed)
    free_s = [0.0] * concurrency
    sent = []
    for _ in range(count):
        arrival_s = heapq.heappop(free_s)
        sent.append(made.record(arrival_s, float(rng.uniform(0.1, 2)), float(rng.uniform(0.1, 1)), 5))
        heapq.heappush(free_s, sent[-1].finish_s or 0.0)
    return sent


def counted_by_hand(sent: list[RequestRecord], concurrency: int) -> tuple[int, int]:
    """Finishes in the window of a closed loop, and requests that begin and end in it."""
    opens_s = max(each.first_token_s or 0.0 for each in sent[:concurrency])
    closes_s = max(each.arrival_s for each in sent)
    ends = [each for each in sent if opens_s < (each.finish_s or 0.0) <= closes_s]
    return len(ends), sum(each.arrival_s >= opens_s for each in ends)


def stored_without(run: Run) -> Run:
    """The level as a file has it that lacks the number."""
    steady = json.loads(run.model_dump_json())["steady"]
    del steady["judged"]
    return run.model_copy(update={"steady": Summary.model_validate(steady)})


@settings(max_examples=50, deadline=None)
@given(st.integers(40, 120), st.integers(1, 10), st.integers(0, 2**32 - 1))
def test_the_requests_behind_latencies_are_those_that_begin_and_end_in_the_window(
    count: int, concurrency: int, seed: int
) -> None:
    sent, load = closed_loop(count, concurrency, seed), Closed(concurrency=concurrency)
    run = made.run(sent, load, window=True)
    assert run.steady is not None
    finished, judged = counted_by_hand(sent, concurrency)
    assert (run.steady.completed, run.steady.judged) == (finished, judged)
    assert (requests.judged(run, run.steady), requests.judged(run, run.whole)) == (judged, count)
    old = stored_without(run)
    assert old.steady is not None
    assert requests.judged(old, old.steady, requests.window(LevelData.of(sent), load, steady=True)) == judged
    assert finished - concurrency <= requests.judged(old, old.steady) <= judged, "no more than there may be"
    assert requests.judged(old.model_copy(update={"origin": "imported"}), old.steady) == finished


@pytest.mark.parametrize(("count", "given"), [(64, False), (90, True)])
def test_finishes_of_requests_from_before_the_window_carry_no_tail(tmp_path: Path, count: int, given: bool) -> None:
    sent = closed_loop(count, 8, seed=0)
    finished, judged = counted_by_hand(sent, 8)
    assert finished >= 50 and (judged >= 50) is given
    store = Store(tmp_path / "x_1xtp1")
    store.write_manifest(Manifest(origin="measured", label="x", gpus=1))
    run = store.write(made.run(sent, Closed(concurrency=8), window=True), sent)
    for level in (run, stored_without(run)):
        store.write(level, sent, force=True)
        read = load.load(store.folder)
        (curve,) = curves(read.experiments, [each.requests for each in read.loaded])
        assert ("p90" in curve.points[0].latency_ms["ttft"]) is given
        (row,) = read.levels()
        assert (row["ttft_p90_ms"] is not None) is given
