"""Parts of a request's time: they follow one another, none is negative, and they sum to what the client measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import folders

from pdlab.core.errors import StoreError
from pdlab.marks.request_parts import MARKS
from pdlab.results.store import Store
from pdlab.results.timeline import PARTS, KvRead, RequestTimeline

ORDER = (
    "call",
    "answer",
    "queued",
    "admitted",
    "posted",
    "seen",
    "reported",
    "usable",
    "scheduled",
    "first",
    "first_byte",
)
PD = {mark: 10.0 * (number + 1) for number, mark in enumerate(ORDER)}
PREFILL = {"total": 8.0, "queue": 1.0, "prefill": 5.0}


def timeline(**changes: object) -> RequestTimeline:
    fields = {"id": "x", "path": "pd", "t": PD, "p": PREFILL, "attempt": 1, "ttft_s": 0.115, **changes}
    return RequestTimeline.model_validate(fields)


def milliseconds(parts: tuple[tuple[str, float], ...]) -> dict[str, float]:
    return {name: round(1e3 * seconds, 6) for name, seconds in parts}


def test_every_part_of_a_request_whose_kv_cache_moved() -> None:
    record = timeline()
    assert record.whole and record.disorder_s == 0 and record.front_s == pytest.approx(0.005)
    assert milliseconds(record.parts()) == {
        "front": 5, "server": 10, "call": 2, "prefill_server": 2, "queue": 1, "prefill": 5, "submit": 10,
        "admission": 10, "post": 10, "transfer": 10, "step_lag": 10, "guard": 10, "wait": 10, "first_step": 10,
        "out": 10,
    }  # fmt: skip


def test_one_engine_queues_and_prefills() -> None:
    t = {"queued": 1, "scheduled": 4, "first": 9, "first_byte": 10}
    record = timeline(path="collocated", t=t, p={}, ttft_s=0.011)
    assert record.whole
    assert milliseconds(record.parts()) == {"front": 1, "server": 1, "queue": 3, "prefill": 5, "out": 1}


def test_a_call_that_failed_and_a_prompt_that_decode_computes() -> None:
    t = {"call": 1, "failed": 6, "queued": 9, "scheduled": 12, "first": 20, "first_byte": 21}
    assert milliseconds(timeline(path="local", t=t, p={}, ttft_s=None).parts()) == {
        "server": 1, "failed_calls": 5, "submit": 3, "queue": 3, "prefill": 8, "out": 1,
    }  # fmt: skip
    answered = milliseconds(timeline(path="recomputed", t={**t, "answer": 8}, p={}, ttft_s=None).parts())
    assert (answered["failed_calls"], answered["call"], answered["submit"], answered["recompute"]) == (5, 2, 1, 8)


def test_a_first_token_that_was_early_leaves_the_rest_before_the_second() -> None:
    t = {**PD, "first_byte": 21.0, "second_byte": 111.0}
    record = timeline(t=t, early=True, ttft_s=0.022)
    assert milliseconds(record.parts()) == {
        "front": 1, "server": 10, "call": 2, "prefill_server": 2, "queue": 1, "prefill": 5, "out": 1,
    }  # fmt: skip
    after = milliseconds(record.parts_of_second())
    assert sum(after.values()) == pytest.approx(111 - 21) and after["submit"] == 9 and after["out"] == 11
    assert timeline().parts_of_second() == ()


@given(
    marks=st.dictionaries(st.sampled_from([*ORDER[:-1], "failed"]), st.floats(-5, 300), max_size=len(ORDER)),
    first_byte=st.floats(0, 300),
    p=st.dictionaries(st.sampled_from(["total", "queue", "prefill"]), st.floats(-5, 300)),
    ttft_s=st.one_of(st.none(), st.floats(0, 0.4)),
    path=st.sampled_from(["pd", "local", "collocated", "cached", "recomputed"]),
)
def test_parts_sum_to_the_clients_time_whatever_the_marks(
    marks: dict[str, float], first_byte: float, p: dict[str, float], ttft_s: float | None, path: str
) -> None:
    record = timeline(path=path, t={**marks, "first_byte": first_byte}, p=p, ttft_s=ttft_s)
    parts = record.parts()
    whole_s = first_byte / 1e3 if ttft_s is None else ttft_s
    assert sum(part.seconds for part in parts) == pytest.approx(whole_s, abs=1e-9)
    assert all(part.seconds >= 0 for part in parts)
    names = [part.name for part in parts]
    assert names == [name for name in PARTS if name in names], "each once, in order"


def test_marks_out_of_order_are_found() -> None:
    assert timeline(t={**PD, "seen": 49.0}).disorder_s == pytest.approx(0.001)
    assert timeline(p={"total": 12.0, "queue": 1.0, "prefill": 5.0}).disorder_s == pytest.approx(0.002)


@pytest.mark.parametrize("mark", [mark for mark in ORDER if mark != "first_byte"])
def test_a_timeline_that_lacks_a_mark_is_not_whole(mark: str) -> None:
    assert not timeline(t={name: at for name, at in PD.items() if name != mark}).whole
    assert mark in MARKS


@pytest.mark.parametrize("lacking", ["total", "queue", "prefill"])
@pytest.mark.parametrize("path", ["pd", "cached", "recomputed"])
def test_a_timeline_that_lacks_a_duration_of_prefill_is_not_whole(path: str, lacking: str) -> None:
    """Its time would be in another part: in the way to prefill's server, or in that server's own work."""
    t = PD | {"given_up": 55.0}
    assert timeline(path=path, t=t).whole
    assert not timeline(path=path, t=t, p={name: ms for name, ms in PREFILL.items() if name != lacking}).whole


def test_timelines_are_kept_beside_the_requests(tmp_path: Path) -> None:
    store = Store(folders.write(tmp_path / "x", folders.deployments(1)[0], loads=(1,), repeats=1))
    run = next(store.runs())
    assert store.read_timelines(run.key) == ()
    record = timeline(wire=(KvRead(0, 50.0, 60.0, 9000.0, 4096),), arrival_s=0.25)
    store.write(run, store.read_records(run.key), [record], force=True)
    assert store.read_timelines(run.key) == (record,)
    store.replace(run, store.read_records(run.key))
    assert store.read_timelines(run.key) == () and (store.folder / "replaced/concurrency1.timelines.jsonl.gz").exists()
    store.timelines_path(run.key).write_bytes(b"no")
    with pytest.raises(StoreError, match="timelines cannot be read"):
        store.read_timelines(run.key)
