"""The Pareto frontier against its definition, for any points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.analysis.ranking import pareto

pytestmark = pytest.mark.property


Point = tuple[float, float]

coordinate = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e6))
points = st.lists(st.tuples(coordinate, coordinate), max_size=30)


def beats(a: Point, b: Point, lower_x: bool) -> bool:
    no_worse_x = a[0] <= b[0] if lower_x else a[0] >= b[0]
    return no_worse_x and a[1] >= b[1] and a != b


@given(points, st.booleans())
def test_exactly_the_unbeaten_points(all_points: list[Point], lower_x: bool) -> None:
    unbeaten = {i for i, p in enumerate(all_points) if not any(beats(q, p, lower_x) for q in all_points)}
    best = pareto(all_points, lower_x)
    assert set(best) == unbeaten
    assert len(best) == len(unbeaten)


@given(points, st.booleans())
def test_ordered_and_monotone(all_points: list[Point], lower_x: bool) -> None:
    front = [all_points[i] for i in pareto(all_points, lower_x)]
    xs, ys = [x for x, _ in front], [y for _, y in front]
    assert xs == sorted(xs)
    assert ys == sorted(ys, reverse=not lower_x)


@given(points)
def test_direction_is_a_mirror(all_points: list[Point]) -> None:
    mirrored = [(-x, y) for x, y in all_points]
    assert set(pareto(all_points, True)) == set(pareto(mirrored, False))


@given(points, st.tuples(coordinate, coordinate))
def test_another_point_never_restores_a_beaten_one(all_points: list[Point], more: Point) -> None:
    before, after = set(pareto(all_points)), set(pareto([*all_points, more]))
    assert after - {len(all_points)} <= before


def test_one_point_and_none() -> None:
    assert pareto([]) == []
    assert pareto([(1.0, 0.0)]) == [0]
