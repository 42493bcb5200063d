"""Rank correlation: textbook values, ties, curves that do not reach a target."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.plan.accuracy import Curve, rank_correlations, spearman, throughput_at


def test_spearman_is_the_textbook_formula() -> None:
    """Without ties 1 - 6 sum d^2 / (n (n^2 - 1)), for every order of five."""
    for order in permutations(range(5)):
        squares = sum((place - rank) ** 2 for place, rank in enumerate(order))
        assert spearman([10, 20, 30, 40, 50], [3.0**rank for rank in order]) == pytest.approx(1 - squares / 20)


def test_ties_share_their_mean_rank() -> None:
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1], [1]) is None


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=2, max_size=12))
def test_only_the_order_counts(pairs: list[tuple[float, float]]) -> None:
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    correlation = spearman(one, other)
    ranked = [sum(b < value for b in other) for value in other]
    if correlation is None:
        assert len(set(one)) == 1 or len(set(other)) == 1
        return
    assert -1 - 1e-9 <= correlation <= 1 + 1e-9
    assert spearman(other, one) == pytest.approx(correlation)
    assert spearman(one, [5 * rank - 100 for rank in ranked]) == pytest.approx(correlation)
    assert spearman(one, [-b for b in other]) == pytest.approx(-correlation)


def test_throughput_is_read_off_between_levels() -> None:
    curve = [(0.006, 100.0), (0.008, 300.0), (0.012, 500.0)]
    assert throughput_at(curve, 0.007) == pytest.approx(200)
    assert throughput_at(curve, 0.009) == pytest.approx(350)
    assert throughput_at(curve, 0.012) == 500
    assert throughput_at(curve, 0.0059) is None and throughput_at(curve, 0.0121) is None
    folded = [(0.006, 100.0), (0.010, 300.0), (0.008, 500.0)]
    assert throughput_at(folded, 0.009) == pytest.approx(400), "the most that it serves at that TPOT"
    assert throughput_at([(0.008, 1.0), (0.008, 2.0)], 0.008) == 2


def line(rate_at_7: float, until_s: float = 0.02) -> Curve:
    return [(0.005, 0.5 * rate_at_7), (0.007, rate_at_7), (until_s, rate_at_7 * until_s / 0.007)]


def test_a_swapped_pair_costs_what_it_should_and_short_curves_are_left_out() -> None:
    measured = {"a": line(1), "b": line(2), "c": line(3), "d": line(4)}
    assert all(at.correlation == pytest.approx(1) for at in rank_correlations(measured, measured))
    swapped = {**measured, "a": line(2), "b": line(1)}
    correlations = rank_correlations(swapped, measured)
    assert [at.correlation for at in correlations] == [pytest.approx(1 - 6 * 2 / (4 * 15))] * 6
    short = {**measured, "d": line(4, until_s=0.0085)}
    by_target = {at.tpot_s: at.configurations for at in rank_correlations(short, measured)}
    assert by_target[0.008] == ("a", "b", "c", "d") and by_target[0.009] == ("a", "b", "c")
    few = {name: measured[name] for name in ("a", "b")}
    assert rank_correlations(few, few) == []
