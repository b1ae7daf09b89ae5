"""Rates at the tolerance, and the fraction below one: every small case, against a search of all fractions."""

from fractions import Fraction

import pytest

from tidegate.core._bounds import MAX_INTEGER, RATE_TOLERANCE, fraction_below, rate_below


def largest_below(x, widest):
    """Search every denominator."""
    return max(Fraction(x * d // 1, d) for d in range(1, widest + 1))


def test_fraction_below_is_the_largest_for_every_small_fraction():
    for widest in range(1, 9):
        for denominator in range(1, 40):
            for numerator in range(2 * denominator):
                x = Fraction(numerator, denominator)
                assert fraction_below(x, widest) == largest_below(x, widest), (x, widest)


@pytest.mark.parametrize("widest", [1, 2, 3, 7])
def test_rates_are_refused_exactly_beyond_the_tolerance(widest):
    """Asked rates just below, at and just above one part per million more than a fraction that fits."""
    burst = MAX_INTEGER // widest
    assert MAX_INTEGER // burst == widest
    for period in (3, 7, 11, 2_000_000):
        for quota in [*range(1, 20), *(m * 10**6 + n for m in (1, 2, 3, 7) for n in range(-8, 9))]:
            asked = Fraction(quota, period)
            best = largest_below(asked, widest)
            fits = best > 0 and (asked - best) * 10**6 <= asked
            assert rate_below(quota, period, burst) == ((best.numerator, best.denominator) if fits else None), asked


def test_a_rate_may_be_slower_by_one_millionth_and_no_more():
    assert Fraction(1, 10**6) == RATE_TOLERANCE
    assert rate_below(1_000_000, 3, MAX_INTEGER) == (333_333, 1)  # exactly one millionth slower
    assert rate_below(999_997, 3, MAX_INTEGER) is None  # 333_332 would be slower than that
    assert rate_below(2_000_001, 2_000_000, MAX_INTEGER) == (1, 1)
