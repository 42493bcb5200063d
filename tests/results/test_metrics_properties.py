"""What must hold of the figures whatever the records are."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.bench import levels
from pdlab.core.workload import Closed, Open, RunKey, Workload
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import Distribution, RequestRecord

pytestmark = pytest.mark.property


seconds = st.floats(min_value=0, max_value=1000).map(lambda value: round(value, 6))
gaps = st.lists(st.floats(min_value=0.001, max_value=2), max_size=6)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    arrival_s, ttft_s, itl_s = draw(seconds), draw(st.floats(min_value=0.001, max_value=5)), draw(gaps)
    if draw(st.integers(0, 9)) == 0:
        return RequestRecord(arrival_s=arrival_s, input_tokens=10, output_tokens=0, error="planted")
    return RequestRecord(
        arrival_s=arrival_s,
        first_token_s=arrival_s + ttft_s,
        finish_s=arrival_s + ttft_s + sum(itl_s),
        input_tokens=10,
        output_tokens=(1 + len(itl_s)) * draw(st.integers(1, 4)),
        itl_s=tuple(itl_s),
    )


loads = st.one_of(
    st.builds(Closed, concurrency=st.integers(1, 6)),
    st.builds(Open, rate_rps=st.floats(min_value=0.1, max_value=50)),
)
level = st.lists(records(), max_size=60)


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50), st.floats(min_value=0, max_value=100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert np.isclose(metrics.percentile(sorted(values), q), np.percentile(values, q), rtol=1e-9, atol=1e-9)


def within(values: Distribution | None, low: float, high: float) -> None:
    if values is not None:
        ordered = [values.percentiles_s[f"p{q}"] for q in (50, 90, 95, 99)]
        assert ordered == sorted(ordered)
        for value in (*ordered, values.mean_s):
            assert low - 1e-9 <= value <= high + 1e-9


@given(level, loads)
def test_figures_are_consistent(records: list[RequestRecord], load: Closed | Open) -> None:
    whole, steady = metrics.whole(LevelData.of(records)), metrics.steady(LevelData.of(records), load)
    answered = [record for record in records if record.ok]
    assert whole.completed == len(answered)
    assert np.isclose(whole.requests_per_s * whole.duration_s, len(answered))
    assert np.isclose(whole.output_tokens_per_s * whole.duration_s, sum(r.output_tokens for r in answered))
    longest = max((r.e2el_s or 0 for r in answered), default=0)
    for summary in (whole, steady):
        if summary is None:
            continue
        assert summary.completed <= len(answered)
        for values in (summary.ttft, summary.tpot, summary.itl, summary.e2el):
            within(values, 0, longest)
    if steady is not None:
        assert 0 < steady.duration_s <= whole.duration_s + max(r.arrival_s for r in records)
        assert steady.output_tokens_per_s * steady.duration_s <= sum(r.output_tokens for r in answered) + 1e-6
        if isinstance(load, Closed):
            assert steady.completed >= 2 * load.concurrency


@given(level, loads, st.randoms(use_true_random=False))
def test_order_of_records_does_not_matter(records: list[RequestRecord], load: Closed | Open, chance: Random) -> None:
    unique = list({record.arrival_s: record for record in records}.values())
    shuffled = chance.sample(unique, len(unique))
    assert metrics.steady_window(LevelData.of(unique), load) == metrics.steady_window(LevelData.of(shuffled), load)
    one, other = metrics.steady(LevelData.of(unique), load), metrics.steady(LevelData.of(shuffled), load)
    assert (one is None) == (other is None)
    if one and other:
        assert one.completed == other.completed and np.isclose(one.output_tokens_per_s, other.output_tokens_per_s)


@given(level, st.floats(min_value=0.1, max_value=50))
def test_load_lasts_until_the_last_judged_request_of_an_open_loop_has_ended(
    records: list[RequestRecord], rate: float
) -> None:
    data, load = LevelData.of(records), Open(rate_rps=rate)
    window = metrics.steady_window(data, load)
    if window is not None:
        assert (data.finish_s[window.judges(data, load) & data.ok] <= data.arrival_s[-1]).all()


keys = st.builds(
    RunKey, kind=st.sampled_from(["concurrency", "rate"]), value=st.integers(1, 64), repeat=st.integers(0, 5)
)


@given(keys, keys, st.integers(0, 3), st.integers(0, 3))
def test_levels_share_a_seed_only_with_themselves(one: RunKey, other: RunKey, first: int, second: int) -> None:
    workload = Workload()
    same = levels.level_seed(workload, one, attempt=first) == levels.level_seed(workload, other, attempt=second)
    assert same == ((one, first) == (other, second))


@given(level)
def test_columns_have_what_records_have(records: list[RequestRecord]) -> None:
    ordered = sorted(records, key=lambda record: record.arrival_s)
    data = LevelData.of(records)
    assert data.ok.tolist() == [record.ok for record in ordered]
    for name in ("ttft_s", "tpot_s", "e2el_s"):
        of_records = [getattr(record, name) for record in ordered]
        assert [None if np.isnan(value) else value for value in getattr(data, name)] == of_records
    received = [
        (moment_s, record.output_tokens / (1 + len(record.itl_s)))
        for record in ordered
        if record.ok
        for moment_s in accumulate(record.itl_s, initial=record.first_token_s)
    ]
    assert list(zip(*data.chunks, strict=True)) == received
    part = data.part(data.arrival_s > 500)
    late = LevelData.of([record for record in ordered if record.arrival_s > 500])
    for name in ("finish_s", "gap_counts", "gaps_s", "output_tokens"):
        assert np.array_equal(getattr(part, name), getattr(late, name), equal_nan=True)
    assert [part.error_texts[at] for at in part.errors] == [late.error_texts[at] for at in late.errors]
