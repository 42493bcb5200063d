"""Goodput within an SLO: counted over requests, or from percentiles where no request was kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import curves as made
from support.curves import curve

from pdlab.analysis import goodput
from pdlab.analysis.curves import Curve, Point
from pdlab.analysis.goodput import capacity, goodput_at, met_estimate, met_share, share_at, slo_ranking
from pdlab.analysis.ranking import OpenEnd, bounds_rankings
from pdlab.analysis.requests import Requests
from pdlab.analysis.view import View
from pdlab.bench import slo_search
from pdlab.bench.slo_search import LevelSample, SloSearchOptions
from pdlab.core.bounds import parse_bounds
from pdlab.core.rendering import macro
from pdlab.core.workload import Slo
from pdlab.report import sections, verdicts
from pdlab.results.schema import SloSearch

SLO = Slo(ttft_s=0.5, tpot_s=0.02, quantile=0.9)


def requests(ttft_s: list[float], tpot_s: list[float], failed: int = 0) -> Requests:
    count = len(ttft_s)
    ttft, tpot = np.array(ttft_s), np.array(tpot_s)
    return Requests(
        ttft_s=ttft,
        tpot_s=tpot,
        e2el_s=ttft + 9 * np.nan_to_num(tpot),
        finish_s=np.arange(1.0, count + 1),
        window_s=float(count),
        failed=failed,
    )


def shared(met: float, count: int = 100) -> Requests:
    """That share within the SLO, spread evenly over the run."""
    late = np.floor(np.arange(1, count + 1) * (1 - met) + 1e-9) > np.floor(np.arange(count) * (1 - met) + 1e-9)
    return requests(np.where(late, 1.0, 0.1).tolist(), [0.01] * count)


def point(
    load: float, rps: float, repeats: list[Requests] | None = None, percentiles: dict[str, float] | None = None
) -> Point:
    """``rps`` per repeat; ``percentiles``: TTFT and TPOT p90 in ms."""
    samples = (
        made.sample(10 * rps, percentiles or {}, r, statistic="p90", requests=each)
        for r, each in enumerate(repeats or [None])  # type: ignore[list-item]
    )
    return made.point(load, *samples)


def test_who_misses_by_the_noise_alone_does_not_lose() -> None:
    """90 % must be within. One curve has 91 % at its level; the others have 89 % on average, or clearly less."""
    meets = curve("meets", point(2, 2, [shared(0.95), shared(0.94), shared(0.96)]))
    near = curve("near", point(2, 2, [shared(0.99), shared(0.79), shared(0.89)]))
    far = curve("far", point(2, 2, [shared(0.5), shared(0.52), shared(0.48)]))
    slower = curve("slower", point(2, 0.2, [shared(0.99), shared(0.79), shared(0.89)]))
    ranked = slo_ranking([meets, near, far, slower], SLO, View(), "closed")
    assert (ranked.unsure, ranked.missed, ranked.best) == (("near",), ("far", "slower"), None)
    answer = verdicts.SloAnswer(ranked, "tokens/s", "GPU")
    assert answer.code == "within_noise"
    assert slo_ranking([meets, far, slower], SLO, View(), "closed").best == "meets"
    nobody = slo_ranking([near, far], SLO, View(), "closed")
    assert (nobody.unsure, nobody.missed) == ((), ("near", "far")), "there is no winner to doubt"

    def tails(*ttft_ms: float) -> Point:
        samples = (made.sample(20, {"ttft": each, "tpot": 10}, r, statistic="p90") for r, each in enumerate(ttft_ms))
        return made.point(2, *samples)

    known = [
        curve("meets", tails(300, 310, 305)),
        curve("near", tails(400, 700, 520)),
        curve("far", tails(900, 910, 905)),
    ]
    ranked = slo_ranking(known, SLO, View(), "closed")
    assert (ranked.unsure, ranked.missed) == (("near",), ("far",)), "percentiles have noise too"


def same_judgement(curves: list[Curve], slo: Slo, bounds: str) -> tuple[str, ...]:
    """Who may meet the SLO, which is who may be within the bounds."""
    ranked = slo_ranking(curves, slo, View(), "closed")
    (within,) = bounds_rankings(curves, parse_bounds(bounds, "p90"), View())
    assert (ranked.unsure, ranked.missed) == (within.unsure, within.missed)
    return ranked.unsure


def test_a_single_repeat_misses_by_less_than_starts_differ() -> None:
    """Percentiles of one run: TTFT of 510 and of 900 ms where 500 are allowed."""

    def level(load: float, ttft_ms: float, rps: float = 2) -> Point:
        return point(load, rps, percentiles={"ttft": ttft_ms, "tpot": 10})

    meets = curve("meets", level(1, 300))
    others = [
        curve("near", level(1, 510)),
        curve("far", level(1, 900)),
        curve("slower", level(1, 510, 0.2)),
        curve("later", level(1, 505, 0.2), level(2, 510)),
    ]
    assert same_judgement([meets, *others], SLO, "ttft_ms=500,tpot_ms=20") == ("near", "later")


def test_equal_deployments_of_one_repeat_have_a_better_one_by_chance_in_at_most_one_of_twenty() -> None:
    """Each start has other latencies (8.5 %) and another throughput (4.3 %); the requests are the same."""
    rng = np.random.default_rng(3)
    spread = rng.lognormal(0, 0.35, 400)
    trials, named = 100, 0
    for _ in range(trials):
        pair = []
        for label in ("a", "b"):
            slow, fast = np.exp(rng.normal(0, (0.085, 0.043)))
            levels = [
                point(
                    load, load * fast, [requests((ms / 1000 * slow * rng.permutation(spread)).tolist(), [0.01] * 400)]
                )
                for load, ms in ((4, 100), (8, 200), (16, 330), (32, 600), (64, 1200))
            ]
            pair.append(curve(label, *levels))
        named += slo_ranking(pair, SLO, View(), "closed").best is not None
    assert named <= 0.1 * trials


def test_requests_of_a_single_repeat_miss_by_less_than_starts_differ() -> None:
    """All requests miss, each by 2 %: another start may serve all of them in time."""

    def level(ttft_s: float, rps: float = 2, failed: int = 0) -> Point:
        ttft = np.linspace(0.999, 1.0, 200) * ttft_s
        return made.point(
            1,
            made.sample(
                10 * rps,
                {"ttft": 1000 * ttft_s, "tpot": 10},
                statistic="p90",
                requests=requests(ttft.tolist(), [0.01] * 200, failed),
            ),
        )

    meets = curve("meets", level(0.3))
    others = [curve("near", level(0.511)), curve("far", level(0.9)), curve("slower", level(0.511, 0.2))]
    assert same_judgement([meets, *others], SLO, "ttft_ms=500,tpot_ms=20") == ("near",)
    failing = curve("failing", level(0.511, failed=30))
    assert slo_ranking([meets, failing], SLO, View(), "closed").missed == ("failing",), "failed requests stay failed"


def test_a_search_that_found_no_rate_judged_one_start_only() -> None:
    meets = with_search("meets", searched("m", {7.0: 0.99, 7.7: 0.6}))
    level = point(7, 7, percentiles={"ttft": 510, "tpot": 10}).model_copy(update={"kind": "rate"})
    near = curve("near", level, searches=(searched("n", {7.0: 0.2}),))
    picked = slo_ranking([meets, near], SLO, View(), "open")
    assert (picked.unsure, picked.missed, picked.best) == (("near",), (), None)
    slow = curve("near", level.model_copy(update={"output_tokens_per_s": 7.0}), searches=near.searches)
    assert slo_ranking([meets, slow], SLO, View(), "open").missed == ("near",), "a tenth of the best search's lower end"


def test_a_request_meets_every_bound_or_is_not_good() -> None:
    five = requests([0.1, 0.6, 0.1, 0.6, 0.5], [0.01, 0.01, 0.03, 0.03, 0.02])
    assert met_share(five, SLO) == pytest.approx(2 / 5), "the bounds themselves are within"
    assert met_share(five, Slo(ttft_s=0.5)) == pytest.approx(3 / 5)
    assert met_share(five, Slo(e2el_s=0.5)) == pytest.approx(2 / 5)


def test_failed_requests_are_not_good_and_one_token_has_no_tpot() -> None:
    assert met_share(requests([0.1] * 3, [0.01] * 3, failed=1), SLO) == pytest.approx(0.75)
    assert met_share(requests([0.1], [float("nan")]), SLO) == 1


def test_all_within_is_not_certain() -> None:
    estimate = met_estimate(shared(1.0), SLO)
    interval = estimate.interval(0.95)
    assert estimate.value == 1 and interval is not None
    assert 0.93 < interval.low < 0.99


def test_share_and_goodput_of_a_level() -> None:
    level = point(8, 2.0, [shared(0.9), shared(0.8)])
    share, good = share_at(level, SLO), goodput_at(level, SLO)
    assert share and good
    assert (share.value, share.basis) == (pytest.approx(0.85), "repeats")
    assert good.value == pytest.approx(1.7)
    assert share_at(point(8, 2.0), SLO) is None


def test_capacity_is_where_the_share_crosses_the_quantile() -> None:
    falling = curve(
        "a",
        point(1, 1, [shared(1.0)]),
        point(2, 2, [shared(0.95)]),
        point(4, 4, [shared(0.85)]),
        point(8, 5, [shared(0.2)]),
    )
    most = capacity(falling, SLO, View(), "closed")
    assert not isinstance(most, str)
    assert (most.how, most.end) == ("requests", None)
    assert most.throughput.value == pytest.approx(30)  # halfway between 2 and 4 requests/s, 10 tokens each
    assert most.requests_per_gpu_s.value == pytest.approx(3 / 8)
    never = curve("b", point(1, 1, [shared(0.5)]))
    assert capacity(never, SLO, View(), "closed") == "missed"
    always = capacity(curve("c", point(1, 1, [shared(1.0)])), SLO, View(), "closed")
    assert not isinstance(always, str) and always.end == OpenEnd(beyond="unmeasured")


def test_percentiles_stand_in_where_no_request_was_kept() -> None:
    known = curve(
        "a", point(1, 1, percentiles={"ttft": 100, "tpot": 10}), point(2, 2, percentiles={"ttft": 900, "tpot": 15})
    )
    most = capacity(known, SLO, View(), "closed")
    assert not isinstance(most, str)
    assert most.how == "percentiles"
    # The worst of both ratios goes from 0.5 (TPOT) to 1.8 (TTFT); it is 1 after 0.5 / 1.3 of the way.
    assert most.throughput.value == pytest.approx(10 * (1 + 0.5 / 1.3))
    assert capacity(known, Slo(ttft_s=1, quantile=0.95), View(), "closed") == "figures"


def test_the_pick_names_the_best_only_beyond_the_noise() -> None:
    def levels(factor: float) -> list[Point]:
        return [
            point(1, factor, [shared(1.0)] * 3),
            point(4, 4 * factor, [shared(0.9), shared(0.91), shared(0.89)]),
            point(16, 5 * factor, [shared(0.3)] * 3),
        ]

    clear = slo_ranking([curve("slow", *levels(1)), curve("fast", *levels(3))], SLO, View(), "closed")
    assert clear.best == "fast"
    margin = clear.ranking[1].best_over_it
    assert margin is not None and margin.ratio == pytest.approx(3, rel=0.02)
    same = [curve("one", *levels(1)), curve("two", *levels(1.02))]
    close = slo_ranking(same, SLO, View(), "closed")
    assert close.best is None
    text = verdicts.slo_sentence(close, same, View())
    assert "TPOT <= 20 ms for 90 % of requests, by capacity of closed loops, no winner can be named" in text


@pytest.mark.parametrize("valid", [True, False])
def test_a_loser_whose_highest_valid_load_meets_the_slo_may_not_lose(valid: bool) -> None:
    best = curve("best", point(1, 8, [shared(1.0)] * 3), point(4, 20, [shared(0.3)] * 3))
    last = point(4, 20, [shared(0.3)] * 3).model_copy(update={"valid": False})
    loser = curve("loser", point(1, 1, [shared(1.0)] * 3), *([] if valid else [last]))
    picked = slo_ranking([best, loser], SLO, View(), "closed")
    assert picked.best is None and picked.ranking[0].label == "best"
    why = "its higher loads were not measured" if valid else "its higher loads are not valid"
    text = verdicts.slo_sentence(picked, [best, loser], View())
    assert "no winner can be named: best gives about 97" in text
    assert text.endswith(f"; loser gives at least 10 ({why}).")
    table = sections.slo_section(picked, [best, loser], View()).text
    assert ">= 10.0" in table and f"9.71 x as measured, {why}" in table
    lost = curve("loser", point(1, 1, [shared(1.0)] * 3), point(4, 2, [shared(0.3)] * 3))
    assert slo_ranking([best, lost], SLO, View(), "closed").best == "best"


def test_the_same_requests_twice_cannot_be_distinguished() -> None:
    """The bound is met in one repeat and missed in the next: the lead's interval would be -95 to 3,568 %."""
    levels = [
        point(1, 1, [shared(1.0)] * 3),
        point(4, 4, [shared(1.0), shared(0.7), shared(0.98)]),
        point(16, 16, [shared(0.0), shared(0.95), shared(0.3)]),
    ]
    same = [curve("one", *levels), curve("two", *levels)]
    picked = slo_ranking(same, SLO, View(), "closed")
    assert picked.best is None
    text = verdicts.slo_sentence(picked, same, View())
    assert "one" in text and "two are not distinguishable" in text
    assert "the repeats differ too much there" in text and "to" not in text.split("factor of")[1]
    table = sections.slo_section(picked, same, View()).text
    assert "1.00 x (interval too wide), not distinguishable" in table


def test_what_misses_and_what_is_unknown_is_reported() -> None:
    curves = [
        curve("good", point(1, 1, [shared(1.0)])),
        curve("bad", point(1, 1, [shared(0.1)])),
        curve("blind", point(1, 1)),
    ]
    picked = slo_ranking(curves, SLO, View(), "closed")
    assert (picked.missed, picked.unknown) == (("bad",), (("blind", "figures"),))
    text = verdicts.slo_sentence(picked, curves, View())
    assert "good gives about" in text
    assert (
        "not met by bad" in text
        and "not known for blind (a level has neither its requests nor that percentile)" in text
        and "good might give more" in text
    )
    table = sections.slo_section(picked, curves, View()).text
    assert ">= 10.0" in table and "requests counted" in table


NEEDED = 400


def searched(label: str, shares: dict[float, float], repeat: int = 0, slo: Slo = SLO, **more: Any) -> SloSearch:
    """A search over these rates, at each that share of 400 requests within the SLO."""
    search = SloSearchOptions(slo=slo, requests=NEEDED, **more)
    samples = [
        LevelSample(rate_rps=rate, repeat=repeat, judged=NEEDED, met=round(share * NEEDED))
        for rate, share in shares.items()
    ]
    return slo_search.result(slo_search.points(samples, search), search, label=label, repeat=repeat)


def with_search(label: str, *searches: SloSearch, gpus: int = 8) -> Curve:
    """Levels whose straight line would put the capacity at 3 requests/s, beside searches that know better."""
    levels = [point(2, 2, [shared(0.95)]), point(4, 4, [shared(0.85)])]
    return curve(label, *levels, gpus=gpus).model_copy(update={"searches": searches})


def test_a_search_answers_in_place_of_the_line() -> None:
    one = searched("a", {7.0: 0.99, 7.4: 0.92, 7.7: 0.6})
    assert (one.low_rps, one.best_rps, one.high_rps) == (7.0, 7.4, 7.7)
    most = capacity(with_search("a", one), SLO, View(), "open")
    assert not isinstance(most, str)
    assert (most.how, most.end, most.bracket_rps) == ("search", None, (7.0, 7.7))
    assert most.throughput.value == pytest.approx(74) and most.requests_per_gpu_s.value == pytest.approx(7.4 / 8)
    ends = most.between(0.95)
    assert ends.low and ends.high
    assert (ends.low.value, ends.high.value) == pytest.approx((70, 77)), "10 output tokens a request, a node of 8 GPUs"
    assert ends.low.basis == "assumed" and ends.low.relative_error == pytest.approx(0.085, abs=5e-4), "of TTFT on GPUs"
    close = capacity(with_search("a", searched("a", {7.0: 0.95, 7.7: 0.6})), SLO, View(), "open")
    assert not isinstance(close, str) and close.between(0.95).low == ends.low
    assert close.between(1 - 1e-9).low is None, "95 % of 400 are not that surely above 90 %"


def test_a_search_for_another_slo_answers_nothing() -> None:
    other = searched("a", {7.0: 0.99, 7.7: 0.6}, slo=Slo(ttft_s=0.5, tpot_s=0.02, quantile=0.95))
    most = capacity(with_search("a", other), SLO, View(), "closed")
    assert not isinstance(most, str)
    assert most.how == "requests" and most.throughput.value == pytest.approx(30)


def test_searches_of_several_repeats_reach_from_the_lowest_end_to_the_highest() -> None:
    most = capacity(
        with_search("a", searched("a", {7.0: 0.99, 7.7: 0.6}), searched("a", {6.0: 0.99, 6.6: 0.6}, repeat=1)),
        SLO,
        View(),
        "open",
    )
    assert not isinstance(most, str)
    assert most.bracket_rps == (6.0, 7.7) and most.throughput.value == pytest.approx(65)
    assert macro(verdicts.WORDS, "bracket", most) == "between 6 and 7.7 requests/s (95 % confidence, each of 2 repeats)"


def test_searches_name_a_best_only_where_their_brackets_do_not_meet() -> None:
    low, high = searched("low", {3.0: 0.99, 3.3: 0.6}), searched("high", {7.0: 0.99, 7.7: 0.6})
    clear = [with_search("low", low), with_search("high", high)]
    picked = slo_ranking(clear, SLO, View(), "open")
    margin = picked.ranking[1].best_over_it
    assert picked.best == "high" and margin is not None
    # 1.96 standard deviations of a difference of two starts (8.5 % each) are a factor of 1.27.
    assert (margin.low, margin.high) == pytest.approx((7 / 3.3 / 1.27, 7.7 / 3 * 1.27), rel=0.01)
    assert margin.level == 0.95
    text = verdicts.slo_sentence(picked, clear, View())
    assert "the best is high with about 70 output tokens/s" in text
    assert "by the ends of the search for the highest rate and an assumed scatter between starts" in text
    assert "low between 3 and 3.3 requests/s (95 % confidence)" in text
    table = sections.slo_section(picked, clear, View()).text
    assert "search: between 7 and 7.7 requests/s (95 % confidence)" in table

    touching = [with_search("low", searched("low", {6.0: 0.99, 7.2: 0.6})), with_search("high", high)]
    close = slo_ranking(touching, SLO, View(), "open")
    assert close.best is None
    assert "no winner can be named" in verdicts.slo_sentence(close, touching, View())
    assert "not distinguishable" in sections.slo_section(close, touching, View()).text


def test_one_search_each_does_not_know_another_start() -> None:
    """Brackets that do not meet, 1 % apart; starts of one deployment differ more."""
    pair = [
        with_search("low", searched("low", {7.0: 0.99, 7.3: 0.6})),
        with_search("high", searched("high", {7.4: 0.99, 7.7: 0.6})),
    ]
    picked = slo_ranking(pair, SLO, View(), "open")
    text = verdicts.slo_sentence(picked, pair, View())
    assert picked.best is None and "no winner can be named" in text
    assert "-20 to 39 %, by the ends of the search for the highest rate and an assumed scatter between starts" in text


def repeated(label: str, *brackets: tuple[float, float]) -> Curve:
    """A search with that bracket in each repeat."""
    return with_search(label, *(searched(label, {a: 0.99, b: 0.6}, repeat=r) for r, (a, b) in enumerate(brackets)))


def test_searches_in_several_repeats_are_compared_by_their_own_scatter() -> None:
    quiet = [
        repeated("low", (7.0, 7.3), (7.0, 7.3), (7.05, 7.35)),
        repeated("high", (8.0, 8.3), (8.05, 8.35), (8.0, 8.3)),
    ]
    picked = slo_ranking(quiet, SLO, View(), "open")
    margin = picked.ranking[1].best_over_it
    assert picked.best == "high" and margin is not None and margin.basis == "search"
    # The mean of the lower ends over that of the upper ones. Their standard errors are 0.05 / 3: 0.21 % and 0.24 %.
    # Student's t of 4 degrees of freedom is 2.78.
    assert margin.low == pytest.approx(8.0167 / 7.3167 * np.exp(-2.78 * np.hypot(0.0021, 0.0024)), rel=1e-3)
    assert "an assumed scatter" not in verdicts.slo_sentence(picked, quiet, View())
    loud = [quiet[0], repeated("high", (7.4, 7.7), (8.0, 8.3), (8.6, 8.9))]
    assert slo_ranking(loud, SLO, View(), "open").best is None, "no bracket meets another, but starts differ"
    half = [repeated("low", (7.0, 7.3)), quiet[1]]
    close = slo_ranking(half, SLO, View(), "open")
    assert close.best is None and "an assumed scatter between starts" in verdicts.slo_sentence(close, half, View())


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_equal_deployments_have_a_better_search_by_chance_in_at_most_one_of_twenty(repeats: int) -> None:
    """Each start has another capacity (8.5 %), and a search finds the two of its rates (10 % apart) beside it."""
    rng = np.random.default_rng(31)
    trials, named = 300, 0
    for _ in range(trials):
        pair = []
        for label in ("a", "b"):
            rates = 5 * 1.1 ** np.arange(12) * rng.uniform(1, 1.1)
            above = [int(np.searchsorted(rates, 8 * np.exp(rng.normal(0, 0.085)))) for _ in range(repeats)]
            pair.append(repeated(label, *((float(rates[i - 1]), float(rates[i])) for i in above)))
        named += slo_ranking(pair, SLO, View(), "open").best is not None
    assert named <= 0.05 * trials


def test_brackets_widen_where_many_are_compared() -> None:
    """95 % of 400 is above 90 % at 95 % confidence, not at what is left for each of 20 comparisons."""
    close = searched("best", {5.0: 0.99, 7.0: 0.95, 7.7: 0.6})
    others = [with_search(f"other{i}", searched("x", {4.0: 0.99, 4.4: 0.6})) for i in range(20)]
    two, many = (slo_ranking([with_search("best", close), *others[:n]], SLO, View(), "open") for n in (1, 20))
    assert close.low_rps == 7.0
    assert two.best == "best" and many.best is None


def test_a_search_against_a_sweep_of_rates() -> None:
    points = [point(n, n, [shared(met)] * 3) for n, met in ((1, 1.0), (2, 0.95), (4, 0.85))]  # 3/s, without scatter
    sweep = curve("sweep", *(each.model_copy(update={"kind": "rate"}) for each in points))
    search = with_search("searched", searched("s", {7.0: 0.99, 7.7: 0.6}))
    picked = slo_ranking([search, sweep], SLO, View(), "open")
    margin = picked.ranking[1].best_over_it
    assert picked.best == "searched" and margin is not None and margin.basis == "search_assumed"


def test_in_no_kind_of_loop_a_winner_is_named_while_ttft_is_unbounded() -> None:
    """Both kinds of loop, each with a clear lead: it takes a bound on TTFT, or on E2EL, to name it."""

    def both(slo: Slo) -> tuple[list[str], list[str]]:
        curves = []
        for label, times in (("slow", 1), ("fast", 3)):
            closed = [point(n, times * n, [shared(met)] * 3) for n, met in ((1, 1.0), (2, 0.95), (4, 0.85))]
            rates = [each.model_copy(update={"kind": "rate"}) for each in closed]
            curves.append(curve(label, *closed, *rates))
        slo_rankings = goodput.slo_rankings(curves, slo, View())
        return [each.loop for each in slo_rankings], [
            verdicts.slo_sentence(each, curves, View()) for each in slo_rankings
        ]

    unbounded = "no winner is named while TTFT is unbounded: bound it too, for example --slo tpot_ms=20,ttft_ms=2000"
    loops, sentences = both(Slo(tpot_s=0.02, quantile=0.9))
    assert loops == ["open", "closed"] and all(unbounded in each and "the best is" not in each for each in sentences)
    assert "by goodput of open loops" in sentences[0] and "by capacity of closed loops" in sentences[1]
    for bounded in (SLO, Slo(tpot_s=0.02, e2el_s=0.6, quantile=0.9)):
        assert all("the best is fast" in each for each in both(bounded)[1])


def test_goodput_is_never_ranked_against_what_a_closed_loop_gets_through() -> None:
    """A closed loop of 20 requests/s beside a search that found 7: two rankings, each of one kind."""
    closed = curve("closed", point(1, 20, [shared(1.0)]))
    both = [with_search("searched", searched("s", {7.0: 0.99, 7.7: 0.6})), closed]
    first, second = goodput.slo_rankings(both, SLO, View())
    assert (first.loop, [each.label for each in first.capacities], first.elsewhere) == (
        "open", ["searched"], ("closed",)
    )  # fmt: skip
    assert second.loop == "closed" and [each.how for each in second.capacities] == ["requests", "requests"]
    text = verdicts.slo_sentence(first, both, View())
    assert (
        "by goodput of open loops, searched gives" in text and "not measured at constant request rates: closed" in text
    )
    assert "by capacity of closed loops" in verdicts.slo_sentence(second, both, View())
    tables = [sections.slo_section(picked, both, View()).text for picked in (first, second)]
    assert "7 and 7.7 requests/s" in tables[0] and "By level" not in tables[0] and "By level" in tables[1]
    (only,) = goodput.slo_rankings([closed], SLO, View())
    assert only.loop == "closed" and not only.elsewhere


def of_kind(label: str, kind: str, *levels: Point) -> Curve:
    return curve(label, *(level.model_copy(update={"kind": kind}) for level in levels))


def test_a_ramp_is_shown_and_never_ranked() -> None:
    """Its figures are means over several rates: here 5 requests/s of a ramp to 10, beside a rate of 8."""
    swept = of_kind("swept", "rate", point(8, 8, [shared(1.0)]), point(16, 12, [shared(0.2)]))
    ramped = of_kind("ramped", "ramp", point(10, 5, [shared(0.95)]))
    (found,) = goodput.slo_rankings([swept, ramped], SLO, View())
    assert ([each.label for each in found.capacities], found.elsewhere) == (["swept"], ("ramped",))
    text = verdicts.slo_sentence(found, [swept, ramped], View())
    assert "swept gives about" in text and "not measured at constant request rates: ramped" in text
    table = sections.slo_section(found, [swept, ramped], View()).text
    (row,) = (line.split() for line in table.splitlines() if line.startswith("ramped"))
    assert row[1:5] == ["to", "10/s", "95.0", "%"] and "requests/s within it; ramps are not ranked)" in table
    both = of_kind("both", "rate", point(2, 2, [shared(1.0)]), point(4, 3, [shared(0.1)]))
    both = both.model_copy(update={"points": (*both.points, *ramped.points)})
    answer = capacity(both, SLO, View(), "open")
    assert isinstance(answer, goodput.Capacity) and answer.throughput.value < 30, "its ramp does not count"


def test_ramps_alone_have_no_ranking_and_are_shown() -> None:
    closed, ramped = curve("closed", point(4, 4, [shared(1.0)])), of_kind("ramped", "ramp", point(10, 5, [shared(0.9)]))
    first, second = goodput.slo_rankings([closed, ramped], SLO, View())
    assert (first.loop, first.capacities, first.elsewhere) == ("open", (), ("closed", "ramped"))
    assert "ramped" in sections.slo_section(first, [closed, ramped], View()).text
    assert (second.loop, [each.label for each in second.capacities], second.elsewhere) == (
        "closed", ["closed"], ("ramped",)
    )  # fmt: skip


def test_replays_are_ranked_among_themselves() -> None:
    """A replay at its own speed is no request rate of 1/s."""
    swept = of_kind("swept", "rate", point(8, 8, [shared(1.0)]), point(16, 12, [shared(0.2)]))
    replayed = of_kind("replayed", "replay", point(1, 20, [shared(1.0)]))
    rankings = goodput.slo_rankings([swept, replayed], SLO, View())
    assert [(each.loop, [one.label for one in each.capacities], each.elsewhere) for each in rankings] == [
        ("open", ["swept"], ("replayed",)),
        ("replay", ["replayed"], ("swept",)),
    ]
    text = verdicts.slo_sentence(rankings[1], [swept, replayed], View())
    assert "by capacity of replays, replayed gives" in text and "not measured in replays: swept" in text


def test_searches_that_found_nothing_or_no_end() -> None:
    never = with_search("never", searched("n", {0.5: 0.1, 1.0: 0.1}))
    assert capacity(never, SLO, View(), "open") == "missed"
    unknown = with_search("unknown", searched("u", {}))
    assert capacity(unknown, SLO, View(), "open") == "search"
    nothing = slo_ranking([unknown], SLO, View(), "open")
    assert "not known for unknown (its search decided no rate)" in verdicts.slo_sentence(nothing, [unknown], View())
    open_ended = with_search("open", searched("o", {7.0: 0.99}))
    most = capacity(open_ended, SLO, View(), "open")
    assert not isinstance(most, str) and most.end == OpenEnd(beyond="search") and most.bracket_rps == (7.0, None)
    assert macro(verdicts.WORDS, "bracket", most) == "at least 7 requests/s (95 % confidence)"
    closed = with_search("closed", searched("c", {3.0: 0.99, 3.3: 0.6}))
    ranked = slo_ranking([open_ended, closed], SLO, View(), "open")
    assert ranked.best == "open", "its lower end is above the other's upper end"
    text = verdicts.slo_sentence(ranked, [open_ended, closed], View())
    assert "above 68 %" in text and "inf" not in text and "open might give more" in text
    unproven = with_search("unproven", searched("d", {5.0: 0.91, 5.5: 0.6}))
    most = capacity(unproven, SLO, View(), "open")
    assert (
        not isinstance(most, str) and macro(verdicts.WORDS, "bracket", most) == "below 5.5 requests/s (95 % confidence)"
    )
    assert slo_ranking([unproven, closed], SLO, View(), "open").best is None


def test_bounds_on_gaps_are_answered_by_a_search_alone() -> None:
    slo = Slo(stall_s=0.5, quantile=0.9)
    level = point(2, 2, [shared(0.95)])
    alone = [curve("a", level)]
    assert capacity(alone[0], slo, View(), "closed") == "gaps"
    text = verdicts.slo_sentence(slo_ranking(alone, slo, View(), "closed"), alone, View())
    assert "not known for a (only a search for that SLO judges bounds on gaps)" in text
    assert share_at(level, slo) is None and goodput_at(level, slo) is None
    most = capacity(with_search("a", searched("a", {7.0: 0.99, 7.7: 0.6}, slo=slo)), slo, View(), "open")
    assert not isinstance(most, str) and most.bracket_rps == (7.0, 7.7)


def test_without_a_valid_level_nothing_is_known() -> None:
    invalid = [curve("a", point(2, 2, [shared(0.95)]).model_copy(update={"valid": False}))]
    text = verdicts.slo_sentence(slo_ranking(invalid, SLO, View(), "closed"), invalid, View())
    assert "not known for a (no valid level)" in text


def test_published_tables_are_never_picked() -> None:
    other = curve("else", point(1, 9, [shared(1.0)])).model_copy(update={"published": "a report"})
    picked = slo_ranking([curve("ours", point(1, 1, [shared(1.0)])), other], SLO, View(), "closed")
    assert [each.label for each in picked.capacities] == ["ours"]
