"""Quantiles against the printed table."""

from __future__ import annotations

import math

import pytest

from pdlab.results.metrics import student_t


@pytest.mark.parametrize(
    ("probability", "dof", "quantile"),
    [
        # Student's t table: Abramowitz and Stegun, table 26.10.
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.995, 9, 3.250),
        (0.9, 3, 1.638),
        (0.975, 120, 1.980),
        (0.975, math.inf, 1.960),
        # One and two degrees of freedom in closed form: tan(pi (p - 1/2)) and (2 p - 1) / sqrt(2 p (1 - p)).
        (0.999, 1, math.tan(0.499 * math.pi)),
        (0.999, 2, 0.998 / math.sqrt(0.001998)),
        (0.025, 2, -4.303),
    ],
)
def test_student_t(probability: float, dof: float, quantile: float) -> None:
    assert student_t(probability, dof) == pytest.approx(quantile, abs=6e-4)
