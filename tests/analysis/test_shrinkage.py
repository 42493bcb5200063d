"""The moderated variance against its closed forms and on planted scatter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdlab.analysis.intervals import of_repeats
from pdlab.analysis.shrinkage import LevelVariance, RepeatStudy, estimate_prior, inverse_trigamma, trigamma


def test_trigamma_and_its_inverse() -> None:
    assert trigamma(1) == pytest.approx(math.pi**2 / 6, abs=1e-9)
    assert trigamma(0.5) == pytest.approx(math.pi**2 / 2, abs=1e-8)
    for x in (0.1, 1.0, 7.5, 300.0):
        assert inverse_trigamma(trigamma(x)) == pytest.approx(x, rel=1e-6)


def test_the_planted_prior_is_found() -> None:
    """Variances drawn as Smyth's model has them: s0^2 d0 / chi2(d0), each measured with 2 degrees of freedom."""
    rng = np.random.default_rng(1)
    true = 0.03**2 * 6 / rng.chisquare(6, 4000)
    measured = true * rng.chisquare(2, 4000) / 2
    prior = estimate_prior([LevelVariance(float(v), 2) for v in measured])
    assert prior is not None
    assert prior.dof == pytest.approx(6, rel=0.15)
    assert prior.variance == pytest.approx(0.03**2, rel=0.1)


def test_equal_scatter_is_pooled() -> None:
    rng = np.random.default_rng(2)
    priors = [
        estimate_prior([LevelVariance(float(v), 2) for v in 0.05**2 * rng.chisquare(2, 30) / 2]) for _ in range(40)
    ]
    pooled = [prior for prior in priors if prior and math.isinf(prior.dof)]
    assert len(pooled) > 15, "half of the time the logs lie closer together than chance has them on average"
    assert np.mean([prior.variance for prior in pooled]) == pytest.approx(0.05**2, rel=0.1)


def test_degrees_of_freedom_never_exceed_the_independent_repeats() -> None:
    rng = np.random.default_rng(3)
    curves = [[list(rng.normal(100, 5, 3)) for _ in range(8)] for _ in range(3)]
    study = RepeatStudy(curves)
    for curve in curves:
        for level in curve:
            moderated = study.moderate(of_repeats(level), "x", lambda value: value)
            assert moderated.dof is not None and 2 <= moderated.dof <= 6
            assert moderated.value == of_repeats(level).value


def test_too_little_to_learn_from_changes_nothing() -> None:
    own = of_repeats([1.0, 1.1, 1.3])
    assert RepeatStudy([[[1.0, 1.1, 1.3]]]).moderate(own, "x", lambda value: value) == own
    single = of_repeats([1.0])
    many = RepeatStudy([[[1.0, 1.2], [2.0, 2.1], [3.0, 3.2], [1.0, 1.1], [1.0, 1.4]]])
    assert many.moderate(single, "x", lambda value: value) == single
    assert estimate_prior([LevelVariance(variance, 2) for variance in (0.1, 0.2, 0.1, 0.3)]) is None


def test_nothing_scatters_less_than_it_was_seen_to() -> None:
    rng = np.random.default_rng(5)
    quiet = [[list(rng.normal(100, 1, 3)) for _ in range(6)] for _ in range(3)]
    noisy = of_repeats([80.0, 100.0, 120.0])
    moderated = RepeatStudy([*quiet, [[80.0, 100.0, 120.0]]]).moderate(noisy, "x", lambda value: value)
    assert moderated.standard_error == pytest.approx(noisy.standard_error)


def test_identical_repeats_are_not_certain() -> None:
    rng = np.random.default_rng(4)
    curves = [[list(rng.normal(100, 5, 3)) for _ in range(6)] for _ in range(3)] + [[[100.0, 100.0, 100.0]]]
    moderated = RepeatStudy(curves).moderate(of_repeats([100.0, 100.0, 100.0]), "x", lambda value: value)
    assert moderated.standard_error is not None and moderated.standard_error > 1
