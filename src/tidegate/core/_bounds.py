"""Bounds of the integers in the core.

The absolute value of every number in the core is below 2**53, so that Python, Lua's doubles and SQL's bigint compute
the same results. `MAX_INTEGER` is that bound; a comment next to each product explains why it stays below
that bound.
"""

from __future__ import annotations

from fractions import Fraction

MAX_INTEGER = 2**53 - 1
MAX_DURATION = 2**52  # microseconds (142 years): bounds waits, windows and refills; now + it is below 2**53 until 2112
SECOND = 1_000_000
RATE_TOLERANCE = Fraction(1, 1_000_000)  # how much slower than configured a limit may run if it cannot be exact


def ceil_div(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)


def rate_below(quota: int, period: int, burst: int) -> tuple[int, int] | None:
    """Return quota/period as n/d with burst * d <= MAX_INTEGER: exact if possible, else the closest fraction below.

    Returns None if no such fraction lies within one part per million.
    """
    exact = Fraction(quota, period)
    widest = MAX_INTEGER // burst
    if exact.denominator <= widest:
        return exact.numerator, exact.denominator
    best = fraction_below(exact, widest)
    if best == 0 or (exact - best) / exact > RATE_TOLERANCE:
        return None
    return best.numerator, best.denominator


def fraction_below(x: Fraction, widest: int) -> Fraction:
    """Return the largest fraction <= x whose denominator is at most `widest`.

    A limit may run slightly slower than configured, never faster. If the nearest fraction p/q lies above x, the result
    is its left neighbour a/b among those denominators: it solves p*b - a*q = 1 with the largest such b.
    """
    nearest = x.limit_denominator(widest)
    if nearest <= x:
        return nearest
    p, q = nearest.numerator, nearest.denominator
    b = pow(p, -1, q) if q > 1 else 0
    b += (widest - b) // q * q
    return Fraction((p * b - 1) // q, b)
