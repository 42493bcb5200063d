"""Mends of tabulated times of routed experts."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from pdlab.sim.expert_tables import OtherWay, RoutedExperts, between, concave, mended
from pdlab.sim.step_time import busiest_rank

ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 48.0, 64.0, 128.0, 1024.0)


def experts(ranks: int = 1, equal_s: float = 0.0) -> RoutedExperts:
    """Of 256, of which a token has 8: a table with a kink at one token per expert."""

    def skewed_s(tokens: float) -> float:
        return tokens if tokens <= 32 else 2 * tokens

    return RoutedExperts(skewed_s, lambda tokens: equal_s * tokens, tokens_each=32.0, ranks=ranks, experts=256)


def test_a_kink_at_one_token_per_expert_is_mended_and_nothing_else() -> None:
    more_s = mended(experts(), ROWS)
    whole = [more_s[each] + experts().skewed_s(each) for each in ROWS if each <= 64]
    assert more_s[32.0] == pytest.approx(1 + 95 * 31 / 47 - 32), "on the line from 1 to 48 tokens"
    assert whole == pytest.approx(concave(ROWS[:8], whole))
    assert more_s[1.0] == more_s[64.0] == more_s[128.0] == more_s[1024.0] == 0


def test_whole_experts_on_each_rank_take_as_long_as_on_the_busiest_of_random_ones() -> None:
    more_s = mended(experts(ranks=4, equal_s=1.0), ROWS)
    assert more_s[1024.0] == pytest.approx(1024 * busiest_rank(4, 256) - 2048)
    assert mended(experts(ranks=4, equal_s=3.0), ROWS)[1024.0] == 0, "never longer than in the table"
    assert mended(experts(ranks=1, equal_s=1.0), ROWS)[1024.0] == 0


def test_another_way_takes_less_or_more() -> None:
    way = OtherWay(table_s=lambda tokens: 2 + 0.1 * tokens, other_s=lambda tokens: 4.0)
    assert way.more_s(10.0) == pytest.approx(4 - 3)
    assert way.more_s(50.0) == pytest.approx(4 - 7)


def test_another_way_is_not_for_more_tokens_than_it_was_measured_for() -> None:
    way = OtherWay(table_s=lambda tokens: tokens, other_s=lambda tokens: 1.0, most=128.0)
    assert (way.more_s(128.0), way.more_s(129.0)) == (-127.0, math.inf)


def test_experts_of_ranks_between_two_measured_numbers_take_the_time_of_their_share() -> None:
    found = between(lambda tokens: 4 * tokens, lambda tokens: 1 * tokens)
    assert found is not None and found(10.0) == pytest.approx(20.0)
    assert between(None, lambda tokens: tokens) is None and between(lambda tokens: tokens, None) is None


def test_concave_values_are_the_least_ones_above() -> None:
    rng = random.Random(7)
    for _ in range(50):
        xs = sorted(rng.sample(range(1, 100), 8))
        ys = [rng.random() for _ in xs]
        found = concave(xs, ys)
        assert all(high >= low - 1e-12 for high, low in zip(found, ys, strict=True))
        slopes = [(b - a) / (y - x) for x, y, a, b in zip(xs, xs[1:], found, found[1:], strict=False)]
        assert all(one >= other - 1e-9 for one, other in pairwise(slopes))
        for at, (x, y) in enumerate(zip(xs, found, strict=True)):
            if y > ys[at] + 1e-9:  # lifted: on a line between its neighbours, so not higher than it must be
                share = (x - xs[at - 1]) / (xs[at + 1] - xs[at - 1])
                assert y == pytest.approx(found[at - 1] + share * (found[at + 1] - found[at - 1]))
