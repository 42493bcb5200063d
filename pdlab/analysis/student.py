"""Quantiles of Student's t. scipy is imported at the first quantile: a plan without one must not wait for it."""

from __future__ import annotations


def student_t(probability: float, dof: float) -> float:
    """Quantile of Student's t for ``probability`` in (0, 1): the x with P(T <= x) = probability.

    ``dof`` above 0; infinity gives the normal distribution.
    """
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))
