"""Intervals of predictions: which part widens them, and how much they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdlab.plan import accuracy, csv_predictions, csv_rows
from pdlab.plan.accuracy import PredictedPoint, coverage
from pdlab.plan.prediction_intervals import LevelError, error_parts, half_width, of, scatter
from pdlab.sim.hardware import ErrorParts, FitError, load_hardware


def test_parts_add_in_squares() -> None:
    one = half_width(ErrorParts(common_percent=3.0, level_percent=0.0))
    assert one == pytest.approx(1.6449 * 0.03)
    assert half_width(ErrorParts(common_percent=3.0, level_percent=4.0)) == pytest.approx(5 / 3 * one)
    assert half_width(ErrorParts(common_percent=3.0, level_percent=0.0), known=0.04) == pytest.approx(5 / 3 * one)
    days = half_width(ErrorParts(common_percent=3.0, level_percent=0.0), 4.0 * math.sqrt(2) / 1.4826)
    assert days == pytest.approx(5 / 3 * one)


def test_without_parts_the_median_error_is_that_of_a_normal_distribution() -> None:
    error = FitError(tpot_percent=2, ttft_percent=10, requests_per_s_percent=3, points=1, how="")
    for metric, percent in (("TPOT", 2), ("mean TTFT", 10), ("requests/s", 3)):
        assert of(error, metric, 0.0, 10.0) == pytest.approx(1.4826 * 1.6449 * percent / 100)
    known = error.model_copy(update={"parts": {"TPOT": ErrorParts(common_percent=5, level_percent=0)}})
    assert of(known, "TPOT", 0.0, 10.0) == pytest.approx(1.6449 * 0.05)


def test_a_fixed_time_is_a_larger_share_of_a_shorter_figure() -> None:
    parts = {"mean TTFT": ErrorParts(common_percent=3, level_percent=0, fixed_ms=4)}
    error = FitError(tpot_percent=2, ttft_percent=10, requests_per_s_percent=3, points=1, how="", parts=parts)
    assert of(error, "mean TTFT", 0.0, 100.0) == pytest.approx(1.6449 * 0.05)
    assert of(error, "mean TTFT", 0.0, 1e6) == pytest.approx(1.6449 * 0.03)


def drawn(
    rng: np.random.Generator, configurations: int, common: float, level: float, known: float
) -> list[list[LevelError]]:
    """Errors of five levels each, the last one with a scatter that is known."""
    return [
        [LevelError(shared + rng.normal(0, level) + rng.normal(0, each), each) for each in (0.0, 0.0, 0.0, 0.0, known)]
        for shared in rng.normal(0, common, configurations)
    ]


def test_parts_of_errors_are_found_again() -> None:
    """Levels of which little was to be expected do not drown the others."""
    parts = error_parts(drawn(np.random.default_rng(1), 150, 0.05, 0.02, 0.3))
    assert parts is not None
    assert parts.common_percent == pytest.approx(5, rel=0.2) and parts.level_percent == pytest.approx(2, rel=0.2)


def test_what_intervals_cannot_tell_apart_is_left_open() -> None:
    one, other = LevelError(0.1, 0.0), LevelError(0.2, 0.0)
    assert error_parts([]) is None and error_parts([[one, other]]) is None
    assert error_parts([[one], [other], []]) is None
    none = error_parts([[LevelError(0.0, 0.0)] * 2] * 2)
    assert none is not None and half_width(none) == 0


def test_chance_and_the_pool_are_known_beforehand() -> None:
    assert scatter([2.0]) == scatter([2.0, 2.0, 2.0]) == 0
    values = [math.exp(0.1), math.exp(-0.1)]
    assert scatter(values) == pytest.approx(0.1 * math.sqrt(2) * math.sqrt(1.5))
    assert scatter([3.0, 3.0], merged=3.0) == 0
    assert scatter([3.0, 3.0], merged=1.5) == pytest.approx(0.4 * math.log(2))


def test_normal_errors_of_many_experiments_are_held_by_nine_in_ten() -> None:
    """Every experiment's interval is made of the others' errors; what scatters by chance has it in the interval."""
    rng = np.random.default_rng(5)
    points = []
    for number in range(14):
        for load in range(8):
            known = 0.1 if load % 4 == 3 else 0.0
            error = rng.normal(0, 0.05) + rng.normal(0, known)
            for metric in accuracy.METRICS:
                points.append(
                    PredictedPoint(
                        experiment=str(number), load=str(load), metric=metric, predicted=math.exp(error), measured=1.0,
                        scatter=known,
                    )
                )  # fmt: skip
    for held in coverage(points).values():
        assert 0.84 < held.held < 0.96
    wider = coverage(points, {"TPOT": 10.0})
    assert wider["TPOT"].half_width > 1.3 * coverage(points)["TPOT"].half_width
    text = accuracy.coverage_text(wider)
    assert "hold " in text and " of requests/s" in text
    blind = coverage([point.model_copy(update={"scatter": 0.0}) for point in points])
    assert blind["TPOT"].half_width > 1.2 * coverage(points)["TPOT"].half_width, "what is known narrows the others"


def test_a_pool_that_wraps_widens_its_own_rows_alone() -> None:
    """Concurrency 64 of the published 1xtp2-1xtp2 wraps its pools, 8 does not, and over SRD nothing is copied."""
    error = FitError(tpot_percent=2, ttft_percent=10, requests_per_s_percent=2, points=1, how="")
    text = "config,concurrency,link\n1xtp2-1xtp2,8,nvlink\n1xtp2-1xtp2,64,nvlink\n1xtp2-1xtp2,64,srd\n"
    parsed = csv_rows.read(text, "in.csv")[2]
    rows = csv_predictions.predict(parsed, load_hardware("h100-vllm-0.11").model_copy(update={"error": error}))
    young, wrapped, srd = (
        float(row["predicted_mean_tpot_ms_high"]) / float(row["predicted_mean_tpot_ms"]) for row in rows
    )
    assert young < 1.1 and srd < 1.1 and wrapped > 1.2
