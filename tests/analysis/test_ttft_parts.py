"""Where TTFT went: parts of made-up requests come out as they were put in."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import timelines
from support.timelines import ALONE_MS, PD_MS, alone, drawn, pd
from support.validity import failing

from pdlab.analysis.ttft_parts import LARGEST, SLOWEST, TtftParts, shown_parts, ttft_parts
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.findings import CODES
from pdlab.results.store import Store
from pdlab.results.timeline import PARTS, RequestTimeline


def levels(tmp_path: Path, made: list[RequestTimeline], **changes: object) -> list[TtftParts]:
    """One load of one curve with these timelines; ``changes``: to its run."""
    folder = tmp_path / "one"
    if not folder.exists():
        timelines.write(folder, Deployment(topology=parse_label("collocated-1xtp1")), loads=(4,), requests=1)
    (run,) = Store(folder).runs()
    return ttft_parts("one", [(run.model_copy(update=changes), made)])


def test_the_mean_is_of_every_part_as_it_was_put_in(tmp_path: Path) -> None:
    (level,) = levels(tmp_path, [pd(n, 0.1 * n, PD_MS, front_ms=5.0) for n in range(20)], steady_window_s=None)
    assert level.mean.parts_s == pytest.approx({"front": 0.005, **{name: ms / 1e3 for name, ms in PD_MS.items()}})
    assert level.mean.ttft_s == pytest.approx(sum(level.mean.parts_s.values()))
    assert (level.timed, level.lacking, level.largest, level.where) == (20, 0, "prefill", "concurrency 4")
    finding = level.finding
    assert finding.code == "ttft_mostly_prefill" and finding.numbers["part_ms"] == pytest.approx(50)
    assert finding.numbers["percent"] == pytest.approx(100 * 50 / (5 + sum(PD_MS.values())))


def test_around_a_percentile_parts_sum_to_a_ttft_next_to_it(tmp_path: Path) -> None:
    chance = random.Random(7)
    made = [pd(n, 0.1 * n, drawn(chance, PD_MS), 5 * chance.gammavariate(4, 0.25)) for n in range(1000)]
    (level,) = levels(tmp_path, made, steady_window_s=None)
    ordered = sorted(each.ttft_s for each in made if each.ttft_s is not None)
    assert [around.statistic for around in level.around] == ["p10", "p50", "p90", "p99"]
    for around, at in zip(level.around, (99, 499, 899, 989), strict=True):
        assert around.ttft_s == pytest.approx(ordered[at], rel=0.03)
        assert sum(around.parts_s.values()) == pytest.approx(around.ttft_s)
    assert [each.ttft_s for each in level.slowest] == ordered[: -SLOWEST - 1 : -1]
    assert all(sum(part.seconds for part in each.parts) == pytest.approx(each.ttft_s) for each in level.slowest)


def test_what_makes_slow_requests_slow_is_seen_at_the_high_percentiles(tmp_path: Path) -> None:
    """One request of ten waits for its transfer: the median's parts do not have it, the p99's do."""
    made = [pd(n, 0.1 * n, {**PD_MS, "transfer": 400.0 if n % 10 == 0 else 9.0}) for n in range(600)]
    (level,) = levels(tmp_path, made, steady_window_s=None)
    by_name = {around.statistic: around for around in level.around}
    assert [each.requests for each in level.around] == [31, 31, 31, 13], "as many on either side"
    assert by_name["p50"].parts_s["transfer"] == pytest.approx(0.009)
    assert by_name["p99"].parts_s["transfer"] == pytest.approx(0.4)


def test_percentiles_that_too_few_requests_have_are_not_given(tmp_path: Path) -> None:
    made = [alone(n, 0.1 * n, ALONE_MS) for n in range(60)]
    (level,) = levels(tmp_path, made, steady_window_s=None)
    assert [around.statistic for around in level.around] == ["p10", "p50", "p90"]
    (few,) = levels(tmp_path, made[:3], steady_window_s=None)
    assert [around.statistic for around in few.around] == ["p50"]


def test_only_whole_timelines_within_the_steady_window_of_valid_levels_count(tmp_path: Path) -> None:
    made = [alone(n, 0.1 * n, ALONE_MS) for n in range(100)]
    lame = made[50].model_copy(update={"t": {"queued": 2.0, "first_byte": 68.5}})
    (level,) = levels(tmp_path, [*made[:50], lame, *made[51:]], steady_window_s=(2.0, 7.05))
    assert (level.timed, level.lacking) == (50, 1)
    unjoined = made[0].model_copy(update={"ttft_s": None})
    assert levels(tmp_path, [unjoined], steady_window_s=None) == []
    (run,) = Store(tmp_path / "one").runs()
    assert ttft_parts("one", [(run.model_copy(update={"validity": failing("x")}), made)]) == []


def test_small_parts_have_no_column(tmp_path: Path) -> None:
    found = levels(tmp_path, [pd(n, 0.1 * n, PD_MS) for n in range(20)], steady_window_s=None)
    names = shown_parts(found)
    assert "prefill" in names and "guard" not in names and "wait" not in names
    assert names == [name for name in PARTS if name in names], "in the order of time"


def test_first_tokens_sent_early_show_what_the_second_waits_for(tmp_path: Path) -> None:
    one = pd(0, 0.0, PD_MS)
    early = one.model_copy(update={"early": True, "t": {**one.t, "first_byte": 92.0, "second_byte": 150.0}})
    (level,) = levels(tmp_path, [early], steady_window_s=None)
    assert level.until_second_s and sum(level.until_second_s.values()) == pytest.approx(0.058)


def test_every_part_has_a_finding_of_its_own(tmp_path: Path) -> None:
    assert list(LARGEST) == list(PARTS)
    for name in PARTS:
        assert LARGEST[name] == f"ttft_mostly_{name}" and CODES[LARGEST[name]].fix
    for name in PD_MS:
        made = [pd(n, 0.1 * n, {**PD_MS, name: 500.0}) for n in range(5)]
        (level,) = levels(tmp_path, made, steady_window_s=None)
        assert level.finding.code == f"ttft_mostly_{name}"
