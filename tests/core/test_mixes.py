"""Mixes that move with time: who comes when, and what is said of them."""

from __future__ import annotations

import random
from itertools import islice, pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core.command_lines import flag_words
from pdlab.core.errors import UsageError
from pdlab.core.lengths import parse_lengths
from pdlab.core.mixes import LoadSurge, Mix, Mixes, parse_mixes
from pdlab.core.workload import Closed, Level, Load, Open, Workload

TWO = "5000:250@1.5,1000:1000,every=60"


def level(load: Load, requests: int = 500, repeat: int = 0) -> Level:
    return Level(load=load, num_requests=requests, seed=repeat, repeat=repeat)


@pytest.mark.parametrize(
    ("text", "mean_rps", "most_rps"),
    [
        (TWO, 25, 30),
        (f"{TWO},crowd=rate*3@10+5", 25, 90),
        (f"{TWO},crowd=rate*0.5@10+5", 25, 30),
        (f"{TWO},crowd=prompts*4@10+5", 25, 30),
    ],
)
def test_the_rate_of_a_round_and_of_its_busiest_moment(text: str, mean_rps: float, most_rps: float) -> None:
    moving, load = Workload(lengths=parse_mixes(text)), Open(rate_rps=20)
    assert moving.mean_rps(load) == pytest.approx(mean_rps) and moving.most_rps(load) == pytest.approx(most_rps)
    plain = Workload(input_tokens=500, output_tokens=50)
    assert plain.mean_rps(load) == plain.most_rps(load) == 20


def test_each_mix_has_its_turn_at_its_rate() -> None:
    workload = Workload(lengths=parse_mixes(TWO))
    arrivals = workload.arrivals(level(Open(rate_rps=20), 6000))
    assert arrivals is not None and arrivals[-1].due_s > 120
    for begins_s, tokens, rps in ((0, (5000, 250), 30), (60, (1000, 1000), 20), (120, (5000, 250), 30)):
        turn = [each for each in arrivals if begins_s <= each.due_s < begins_s + 60]
        assert {each[1:] for each in turn} == {tokens}
        assert len(turn) == pytest.approx(60 * rps, rel=0.1)


def test_a_drift_goes_straight_from_one_mix_to_the_next() -> None:
    drifting = parse_mixes("5000:200,1000:1000@3,every=100,drift")
    assert drifting.at(0) == Mix(input_tokens=5000, output_tokens=200)
    assert drifting.at(25) == Mix(input_tokens=4000, output_tokens=400, rate=1.5)
    assert drifting.at(100) == Mix(input_tokens=1000, output_tokens=1000, rate=3)
    assert drifting.at(150) == drifting.at(50) == Mix(input_tokens=3000, output_tokens=600, rate=2)
    assert drifting.at(200) == drifting.at(0)


@pytest.mark.parametrize(("of", "inside"), [("prompts", (4000, 200, 1.0)), ("rate", (1000, 200, 4.0))])
def test_a_flash_crowd_comes_and_goes(of: str, inside: tuple[int, int, float]) -> None:
    crowd = parse_mixes(f"1000:200,crowd={of}*4@30+10")
    for moment_s, expected in ((29.9, (1000, 200, 1.0)), (30.0, inside), (39.9, inside), (40.0, (1000, 200, 1.0))):
        mix = crowd.at(moment_s)
        assert (mix.input_tokens, mix.output_tokens, mix.rate) == expected
    arrivals = list(islice(crowd.arrivals(50, 1.0, "seed"), 8000))
    rps = [sum(a <= each.due_s < b for each in arrivals) / (b - a) for a, b in ((0, 30), (30, 40), (40, 80))]
    assert rps == pytest.approx([50, 50 * inside[2], 50], rel=0.1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.3, 3), st.floats(1, 50))
@pytest.mark.property
def test_arrivals_go_forward_and_the_first_of_more_are_the_same(seed: int, burstiness: float, rps: float) -> None:
    workload = Workload(seed=seed, lengths=parse_mixes("100:10@9,50:20,every=3,crowd=rate*5@4+2"))
    many = workload.arrivals(level(Open(rate_rps=rps, burstiness=burstiness), 200))
    few = workload.arrivals(level(Open(rate_rps=rps, burstiness=burstiness), 50))
    assert many is not None and many[:50] == few
    assert all(a.due_s <= b.due_s for a, b in pairwise(many))
    assert workload.draw(level(Open(rate_rps=rps, burstiness=burstiness), 50)) == tuple(each[1:] for each in few)


def test_they_follow_from_the_workload_the_rate_and_the_repeat_alone() -> None:
    workload = Workload(lengths=parse_mixes(TWO))
    load = Open(rate_rps=20)
    first = workload.arrivals(level(load))
    assert first == workload.arrivals(level(load).model_copy(update={"seed": 99}))
    assert first != workload.arrivals(level(load, repeat=1))
    assert first != workload.model_copy(update={"seed": 1}).arrivals(level(load))
    assert Workload().arrivals(level(load)) is None


def test_the_mean_of_a_round_is_that_of_its_arrivals() -> None:
    for text in ("5000:200@2,1000:1000,2000:100@3,every=5", "5000:200@2,1000:1000,every=5,drift"):
        mixes = parse_mixes(text)
        rng = random.Random(1)
        seen = [mixes.at(rng.random() * mixes.round_s) for _ in range(40_000)]
        total = sum(mix.rate for mix in seen)
        mean = (
            sum(mix.rate * mix.input_tokens for mix in seen) / total,
            sum(mix.rate * mix.output_tokens for mix in seen) / total,
        )
        assert mixes.mean((0, 0)) == pytest.approx(mean, rel=0.02)
        assert total / len(seen) == pytest.approx(mixes.mean_rate, rel=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "10:1@2,20:1,every=7",
        "10:1@0.2,20:1@3,every=5,drift",
        "10:1,crowd=rate*6@12+5",
        "10:1@2,20:1,every=4,crowd=rate*5@6+7",
        "10:1@2,20:1,every=4,crowd=prompts*5@6+7",
    ],
)
def test_as_many_arrive_as_are_counted_before(text: str) -> None:
    mixes, rps = parse_mixes(text), 400.0
    moments_s = (3.0, 9.0, 13.5, 21.0, 40.0)
    due_s = [each.due_s for each in takewhile(lambda each: each.due_s < 40, mixes.arrivals(rps, 1.0, "seed"))]
    counted = [sum(moment_s < limit_s for moment_s in due_s) for limit_s in moments_s]
    assert [rps * mixes.mean_requests(moment_s) for moment_s in moments_s] == pytest.approx(counted, rel=0.06)
    took_s = [mixes.mean_duration_s(count / rps) for count in counted]
    assert took_s == pytest.approx(moments_s, rel=0.06)


def test_bounds_hold_the_crowd() -> None:
    mixes = parse_mixes("5000:200,1000:9000,crowd=prompts*4@1+1")
    assert mixes.longest((0, 0)) == (20_000, 200)
    assert (mixes.shortest_input((0, 0)), mixes.longest_input((0, 0))) == (1000, 20_000)
    assert mixes.whole_s == mixes.round_s == 120
    assert parse_mixes("500:20,crowd=rate*4@300+30").whole_s == 360


@pytest.mark.parametrize(
    "text",
    [TWO, "5000:250,1000:1000,every=60,drift", "1000:1000,crowd=prompts*4@60+30", "10:1@0.5,20:2,every=0.5,drift"],
)
def test_the_text_comes_back(text: str) -> None:
    mixes = parse_lengths(f"mixes:{text}")
    assert isinstance(mixes, Mixes)
    assert parse_lengths(mixes.flag_value) == mixes
    assert Mixes.model_validate_json(mixes.model_dump_json()) == mixes
    workload = Workload(lengths=mixes)
    assert Workload.model_validate_json(workload.model_dump_json()) == workload
    assert workload.varied and flag_words("bench", **workload.bench_fields) == ("--lengths", mixes.flag_value)
    assert (workload.input_tokens, workload.output_tokens) == tuple(round(mean) for mean in mixes.mean((0, 0)))


def test_another_load_than_a_request_rate_is_refused() -> None:
    with pytest.raises(UsageError, match="give --request-rate"):
        Workload(lengths=parse_mixes(TWO)).arrivals(level(Closed(concurrency=4)))


def test_lengths_beside_mixes_are_refused() -> None:
    with pytest.raises(ValueError, match="list of mixes sets that itself"):
        Workload(input_tokens=7, lengths=parse_mixes(TWO))


def test_the_end_of_a_crowd() -> None:
    assert LoadSurge(of="rate", factor=2, at_s=10, for_s=5).ends_s == 15
