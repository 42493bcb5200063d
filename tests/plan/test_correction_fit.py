"""A correction from a prior and few levels: against closed forms of the normal distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdlab.plan.correction_fit import (
    CorrectionDistribution,
    ErrorSds,
    LevelSetting,
    Response,
    bounded,
    correction_of,
    errors_covariance,
    gains,
    posterior,
)

PRIOR = CorrectionDistribution(np.zeros(4), np.diag([1.0, 0.01, 0.04, 4.0]))
START = np.zeros(4)
SDS = {"TPOT": ErrorSds(level=3.0)}


def level(number: int, residual: float, slopes: tuple[float, float, float, float], setting: str = "") -> Response:
    name = setting or str(number)
    return Response("TPOT", LevelSetting(f"tp {name}", f"lengths {name}", f"load {name}"), number, residual, slopes)


def test_one_level_gives_the_textbook_mean_and_variance() -> None:
    """y = h + e with h of variance 1 and e of 0.03^2."""
    after = posterior(PRIOR, START, [level(0, 0.02, (1.0, 0.0, 0.0, 0.0))], SDS)
    weight = 1 / (1 + 0.03**2)
    assert after.mean[0] == pytest.approx(0.02 * weight)
    assert after.covariance[0, 0] == pytest.approx(1 - weight)
    assert after.covariance[1, 1] == 0.01


def test_no_level_leaves_the_prior() -> None:
    assert posterior(PRIOR, START, [], SDS) is PRIOR


def test_a_wild_level_counts_less_than_in_least_squares() -> None:
    """Four levels say 0, one says 0.5: a normal posterior gives 0.1."""
    levels = [level(n, 0.0, (1.0, 0.0, 0.0, 0.0)) for n in range(4)] + [level(4, 0.5, (1.0, 0.0, 0.0, 0.0))]
    assert 0 < posterior(PRIOR, START, levels, SDS).mean[0] < 0.05


def test_levels_of_one_configuration_count_less_than_levels_spread_over_several() -> None:
    sds = {"TPOT": ErrorSds(level=3.0, parallelism=3.0, lengths=3.0)}
    slopes = (1.0, 0.0, 0.0, 0.0)
    together = [level(n, 0.0, slopes, "same") for n in range(3)]
    spread = [level(n, 0.0, slopes) for n in range(3)]
    variances = [posterior(PRIOR, START, each, sds).covariance[0, 0] for each in (together, spread)]
    assert variances[1] < variances[0] / 2


def test_the_covariance_of_levels_that_share_their_load() -> None:
    sds = {"TPOT": ErrorSds(level=3.0, load=4.0)}
    same = [
        Response("TPOT", LevelSetting(f"tp {n}", f"lengths {n}", "8"), n, 0.0, (1.0, 0.0, 0.0, 0.0)) for n in range(2)
    ]
    assert errors_covariance(same, sds) == pytest.approx(np.array([[25, 16], [16, 25]]) * 1e-4, rel=1e-6)


def test_metrics_are_independent() -> None:
    sds = {"TPOT": ErrorSds(level=3.0, load=4.0), "mean TTFT": ErrorSds(level=6.0, load=8.0)}
    setting = LevelSetting("a", "b", "c")
    pair = [Response(metric, setting, 0, 0.0, (1.0, 0.0, 0.0, 0.0)) for metric in sds]
    assert errors_covariance(pair, sds) == pytest.approx(np.diag([25e-4, 100e-4]), rel=1e-6)


def test_the_first_level_helps_most_and_a_second_one_like_it_little() -> None:
    levels = [level(n, 0.0, (1.0, 0.0, 0.0, 0.0)) for n in range(2)]
    first, second = gains(PRIOR, START, levels, SDS, np.array([[1.0, 0.0, 0.0, 0.0]]))
    assert first == pytest.approx(1 - 0.03**2 / (1 + 0.03**2))
    assert second == pytest.approx(0.5, abs=0.01)


def test_a_correction_has_no_negative_times() -> None:
    belief = CorrectionDistribution(np.array([-0.3, 0.1, math.log(1.5), -2.0]), PRIOR.covariance)
    made = correction_of(belief, 3, "test", 7.0)
    assert (made.host_ms, made.sync_us, made.fitted_levels) == (0.0, 0.0, 3)
    assert made.prefill_factor == pytest.approx(1.5)
    assert made.sequence_us == 7.0


def test_a_host_that_cannot_take_less_than_no_time_leaves_the_rest_to_the_factor() -> None:
    """Two levels of 4 % too long, the second one's host share twice as large: least squares take it from the host."""
    after = posterior(PRIOR, START, [level(0, 0.0, (0.05, 1.0, 0.0, 0.0)), level(1, -0.08, (0.1, 1.0, 0.0, 0.0))], SDS)
    assert after.mean[0] < -0.1
    given = posterior(
        CorrectionDistribution(PRIOR.mean, np.diag([1e-12, 0.01, 0.04, 4.0])),
        START,
        [level(0, 0.0, (0.05, 1.0, 0.0, 0.0)), level(1, -0.08, (0.1, 1.0, 0.0, 0.0))],
        SDS,
    )
    assert bounded(after) == pytest.approx(given.mean, abs=1e-4)
    assert correction_of(after, 2, "", 7.0).factor == pytest.approx(math.exp(given.mean[1]), abs=1e-3)


def test_a_belief_above_nothing_is_not_bounded() -> None:
    belief = CorrectionDistribution(np.array([0.3, -0.1, -0.2, 2.0]), np.diag([1.0, 0.01, 0.04, 4.0]))
    assert bounded(belief).tolist() == belief.mean.tolist()


def test_neither_host_nor_waiting_is_below_nothing_however_they_are_correlated() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        root = rng.normal(size=(4, 4))
        mean = bounded(CorrectionDistribution(rng.normal(size=4), root @ root.T))
        assert mean[0] >= -1e-12 and mean[3] >= -1e-12
