"""Quantiles of Student's t, without a library: what prints a plan imports nothing heavy for them."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

# Beyond this, Student's t is the normal distribution to four digits.
NORMAL_DOF = 1e5


@lru_cache(maxsize=4096)
def student_t(probability: float, dof: float) -> float:
    """Quantile of Student's t for ``probability`` in (0, 1): the x with P(T <= x) = probability.

    Newton's method on the distribution function, kept inside a bracket; accurate to about 1e-10.
    """
    if dof >= NORMAL_DOF:
        return NormalDist().inv_cdf(probability)
    if probability < 0.5:
        return -student_t(1 - probability, dof)
    tail = 1 - probability
    low, high = 0.0, 1.0
    while _upper_tail(high, dof) > tail:
        low, high = high, high * 2
    # ln of the density's constant: gamma((n + 1) / 2) / (gamma(n / 2) sqrt(n pi)).
    constant = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    x = (low + high) / 2
    for _ in range(100):
        excess = _upper_tail(x, dof) - tail
        low, high = (x, high) if excess > 0 else (low, x)
        density = math.exp(constant - (dof + 1) / 2 * math.log1p(x * x / dof))
        step = excess / density if density else math.inf
        following = x + step if low < x + step < high else (low + high) / 2
        if abs(following - x) <= 1e-12 * max(1.0, x):
            return following
        x = following
    return x


def _upper_tail(x: float, dof: float) -> float:
    """P(T > x) for x >= 0: half the regularised incomplete beta function I(dof / (dof + x^2); dof/2, 1/2)."""
    return 0.5 * _incomplete_beta(dof / (dof + x * x), dof / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised I_x(a, b) by Lentz's continued fraction (Numerical Recipes, 3rd edition, section 6.4)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x >= (a + 1) / (a + b + 2):
        return 1 - front * _beta_fraction(1 - x, b, a) / b
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    h = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return h
