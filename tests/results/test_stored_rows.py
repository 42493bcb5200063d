"""Rows that are kept in a file are what they were, in the order of their moments."""

from __future__ import annotations

import gc
import gzip
import hashlib
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from support import records as made

from pdlab.core.errors import WriteError
from pdlab.core.workload import Closed
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.results.store import Store
from pdlab.results.stored_rows import StoredRows
from pdlab.results.timeline import RequestTimeline

ROWS = [
    made.record(0.5, itl_s=(0.1, 1 / 3), error="x", requested=(3, 4)),
    made.record(0.25, replayed=ReplayedRequest(id="ä", session="s", parent="p", waits=("q",), cached_tokens=0)),
    made.record(0.5, tokens=7),
]


def stored(rows: list[RequestRecord]) -> StoredRows[RequestRecord]:
    file = StoredRows(RequestRecord)
    for row in rows:
        file.add(row, row.arrival_s)
    return file


def test_rows_come_by_moment_and_those_of_one_moment_as_they_were_added() -> None:
    rows = stored(ROWS)
    expected = [ROWS[1], ROWS[0], ROWS[2]]
    assert [*rows] == [*rows] == expected and len(rows) == 3
    assert (rows[0], rows[-1], rows[1:]) == (ROWS[1], ROWS[2], (ROWS[0], ROWS[2]))
    with pytest.raises(IndexError):
        rows[3]
    earlier = made.record(0.125)
    rows.add(earlier, 0.125)
    assert [*rows] == [earlier, *expected], "it may go on after it was read"
    assert not StoredRows(RequestRecord) and [*StoredRows(RequestRecord)] == []


def test_several_readers_do_not_disturb_each_other() -> None:
    rows = stored(ROWS)
    assert [(one.arrival_s, other.arrival_s) for one, other in zip(rows, reversed(rows), strict=True)] == [
        (0.25, 0.5), (0.5, 0.5), (0.5, 0.25),
    ]  # fmt: skip


def test_files_of_results_are_the_same_from_memory_and_from_a_file(tmp_path: Path) -> None:
    """Old files hold one line of JSON per request, packed at once."""
    records = [made.record(float(n), itl_s=(0.1,) * 5, error=None if n % 3 else "x\u2028y") for n in range(500)]
    own = [RequestTimeline(id=str(n), path="local", t={"first_byte": n / 3}, arrival_s=float(n)) for n in range(500)]
    timelines = StoredRows(RequestTimeline)
    for number in random.Random(1).sample(range(500), 500):
        timelines.add(own[number], float(number))
    run = made.run(records, Closed(concurrency=2))
    folders = [Store(tmp_path / name) for name in ("memory", "file")]
    one = folders[0].write(run, records, own)
    other = folders[1].write(run, stored(random.Random(2).sample(records, 500)), timelines)
    raw = "\n".join(record.model_dump_json(exclude_defaults=True) for record in records).encode()
    lines = "\n".join(each.model_dump_json(by_alias=True, exclude_none=True) for each in own).encode()
    assert one == other and one.raw_sha256 == hashlib.sha256(raw).hexdigest()
    for store in folders:
        # The header names no time; its byte of the operating system differs between versions of Python.
        for path, text in ((store.records_path(run.key), raw), (store.timelines_path(run.key), lines)):
            assert gzip.decompress(path.read_bytes()) == text and path.read_bytes()[4:8] == bytes(4)
        assert store.read_records(run.key) == tuple(records) and store.read_timelines(run.key) == tuple(own)
        store.check_records(one)


def test_memory_does_not_grow_with_what_rows_hold() -> None:
    row = made.record(0.0, itl_s=tuple(number / 1e3 for number in range(20)))
    tracemalloc.start()
    try:
        rows = StoredRows(RequestRecord)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(40_000):
            rows.add(row, float(number))
        tracemalloc.reset_peak()
        assert sum(len(each.itl_s) for each in rows) == 800_000
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert grown / 40_000 < 24, "the gaps of one request take 160 bytes, where it stands and its moment 16"


def test_the_file_is_closed_with_the_last_reference() -> None:
    rows = stored(ROWS)
    number = rows._file.fileno()
    os.fstat(number)
    del rows
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_full_disk_is_one_error() -> None:
    rows = StoredRows(RequestRecord)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, rows._file.fileno())
    os.close(full)
    with pytest.raises(WriteError, match=r"temporary file in .*No space left on device"):
        for number in range(1000):
            rows.add(ROWS[0], float(number))
