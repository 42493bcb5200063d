"""What is printed of a comparison says what its verdict says, however close the call."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdlab.analysis.intervals import Comparison, Estimate, compare
from pdlab.core.rendering import macro
from pdlab.core.text import ROUNDING, percent
from pdlab.report.verdicts import WORDS, doubt_of, is_too_wide, lead, lead_factor

pytestmark = pytest.mark.property


FIGURE = re.compile(r"-?\d+(?:\.\d+)?")


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    first = draw(st.floats(1, 1000))
    # Borderline calls above all: a lead of a few standard errors, from far below a per mille to a half.
    error = draw(st.floats(1e-7, 0.3))
    second = first * (1 + error * draw(st.floats(-4, 4)) / 2)
    basis = draw(st.sampled_from(["repeats", "assumed"]))
    comparison = compare(
        Estimate(first, error * first / 1.41, 1e9, basis), Estimate(max(second, 1e-9), 0.0, 1e9, basis), 0.95
    )
    assert comparison is not None
    return comparison


@given(comparisons())
def test_the_printed_interval_has_the_sign_of_the_verdict(comparison: Comparison) -> None:
    if is_too_wide(comparison):
        return
    low, high = (float(text) for text in FIGURE.findall(lead(comparison).replace(" to ", " ")))
    ratios = [float(text) for text in FIGURE.findall(lead_factor(comparison))]
    assert low <= high and ratios[1] <= ratios[2]
    for of, a, b in ((0.0, low, high), (1.0, ratios[1], ratios[2])):
        if comparison.verdict == "better":
            assert a > of
        elif comparison.verdict == "worse":
            assert b < of
        elif comparison.low < 1 - ROUNDING and comparison.high > 1 + ROUNDING:
            assert a < of < b


@given(comparisons())
def test_a_winner_is_further_ahead_than_what_is_not_meaningful(comparison: Comparison) -> None:
    if comparison.basis != "assumed" or comparison.verdict != "better":
        return
    least = float(FIGURE.findall(macro(WORDS, "doubt", doubt_of(comparison, "b")))[0])
    exact = comparison.high / comparison.ratio - 1
    assert least < float(percent(comparison.ratio - 1, reference=exact)) or comparison.low - 1 < 1e-6


@given(st.floats(-0.99, 100))
@example(0.0049)
@example(-0.004)
def test_what_is_not_nothing_never_reads_as_nothing(share: float) -> None:
    assert (float(percent(share)) == 0) == (abs(share) <= ROUNDING)
    assert float(percent(share)) * share >= 0


@pytest.mark.parametrize(
    ("low", "ratio", "high", "verdict", "words"),
    [
        (1.003, 1.06, 1.12, "better", "95 % interval of the lead over b: 0.3 to 12 %"),
        (0.996, 1.06, 1.12, "not distinguishable", "95 % interval of the lead over b: -0.4 to 12 %"),
        (0.88, 0.94, 0.9996, "worse", "95 % interval of the lead over b: -12 to -0.04 %"),
        (0.05, 1.35, 36.68, "not distinguishable", "the repeats differ too much there: the 95 % interval"),
        (1e-300, 1.0, 1e300, "not distinguishable", "spans a factor of more than 1,000"),
        (0.0, 1.0, 1e9, "not distinguishable", "spans a factor of more than 1,000"),
        (1.6, 8.0, 40.0, "better", "95 % interval of the lead over b: above 60 %"),
        (1.0, 1.0, 1.0, "not distinguishable", "the repeats do not scatter at all"),
        (0.0, 1.0, float("inf"), "not distinguishable", "the bound is at the edge of the measured range"),
    ],
)
def test_borderline_and_degenerate_calls(low: float, ratio: float, high: float, verdict: str, words: str) -> None:
    comparison = Comparison.model_validate(
        {"ratio": ratio, "low": low, "high": high, "level": 0.95, "verdict": verdict, "basis": "repeats"}
    )
    assert words in macro(WORDS, "doubt", doubt_of(comparison, "b"))
    assert "-95" not in lead_factor(comparison) and "36.68" not in lead_factor(comparison)


def test_rounding_of_floats_names_no_winner() -> None:
    """Repeats that are the same to the last digit, summed in another order."""
    comparison = compare(Estimate(1.0 + 1e-12, 0.0, 2.0, "repeats"), Estimate(1.0, 0.0, 2.0, "repeats"), 0.95)
    assert comparison is not None and comparison.verdict == "not distinguishable"
