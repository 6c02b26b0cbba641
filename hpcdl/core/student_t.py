"""Student's t distribution, by the incomplete beta function: two numbers are not worth loading a library of science.

Sources: NIST Digital Library of Mathematical Functions, 8.17.22, whose continued fraction is summed by Lentz's way.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

_MOST_TERMS = 100_000
_TINY = 1e-300


def tail(value: float, freedom: float) -> float:
    """The probability of more than `value`, which is not negative, with `freedom` degrees of freedom."""
    if value == math.inf:
        return 0.0
    square = value * value
    return 0.5 * _incomplete_beta(freedom / (freedom + square), square / (freedom + square), freedom / 2, 0.5)


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: float) -> float:
    """What a t of `freedom` degrees stays below with `probability`; ValueError unless that lies between 0 and 1."""
    if not 0 < probability < 1 or not freedom > 0:
        raise ValueError(f"no quantile of {probability} with {freedom} degrees of freedom")
    if probability <= 0.5:
        return -t_quantile(1 - probability, freedom) if probability < 0.5 else 0.0
    beyond = 1 - probability
    low, high = 0.0, max(1.0, NormalDist().inv_cdf(probability))
    while tail(high, freedom) > beyond:
        low, high = high, 2 * high
    value = high
    for _ in range(200):  # Newton's steps; halves where one would leave the bracket
        excess = tail(value, freedom) - beyond
        low, high = (value, high) if excess > 0 else (low, value)
        step = excess / _density(value, freedom)
        new = value + step if low < value + step < high else (low + high) / 2
        if abs(new - value) <= 1e-14 * value:
            return new
        value = new
    return value


def _density(value: float, freedom: float) -> float:
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return math.exp(constant - (freedom + 1) / 2 * math.log1p(value * value / freedom))


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """I_x(a, b); `rest` is 1 - x, which is not lost where x is near 1."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(rest, x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    return math.exp(front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)) of I_x(a, b), from the front."""
    value, c, d = 1.0, 1.0, 0.0
    for term in range(1, _MOST_TERMS):
        m = term >> 1
        if term & 1:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + factor * d or _TINY)
        c = 1 + factor / c or _TINY
        change = c * d
        value *= change
        if abs(change - 1) < 1e-15:
            break
    return value
