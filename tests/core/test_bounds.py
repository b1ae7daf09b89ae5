"""The 2**53 bound: whatever the core computes stays below it, limits at the bound are exact, absurd ones refused."""

import dataclasses
import operator
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.strategies import START
from tidegate import ConfigError, Limit
from tidegate.core._bounds import MAX_DURATION, MAX_INTEGER, ceil_div, fraction_below, rate_below
from tidegate.core._decision import adjust, hold

ALGORITHMS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency", "calendar_window")


class Bounded(int):
    """An integer that raises when it, or a number computed from it, reaches 2**53."""

    def __new__(cls, value):
        assert -(2**53) < value < 2**53, f"{value} does not fit"
        return super().__new__(cls, value)


def bounded(name):
    plain = getattr(int, name)

    def method(self, *others):
        result = plain(self, *others)
        if result is NotImplemented:
            return result
        if isinstance(result, tuple):
            return tuple(Bounded(number) for number in result)
        return Bounded(result)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "divmod"):
    setattr(Bounded, f"__{_name}__", bounded(f"__{_name}__"))
    setattr(Bounded, f"__r{_name}__", bounded(f"__r{_name}__"))
Bounded.__neg__ = bounded("__neg__")  # type: ignore[method-assign]  # as the others


def strict(limit):
    """Make a limit compute with bounded numbers only."""
    for field in ("quota", "burst", "length", "rate", "scale", "capacity", "floor", "tick"):
        object.__setattr__(limit, field, Bounded(getattr(limit, field)))
    return limit


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_bounded_integers_detect_every_overflow(name):
    with pytest.raises(AssertionError):
        getattr(operator, name)(Bounded(MAX_INTEGER), -MAX_INTEGER if name == "sub" else MAX_INTEGER)
    with pytest.raises(AssertionError):
        getattr(operator, name)(MAX_INTEGER, Bounded(-MAX_INTEGER) if name == "sub" else Bounded(MAX_INTEGER))


# Running sums of a log go on over entries that have left, in 63 bits; what is compared are differences. Quotas at which
# they stay below 2**53 show that nothing else reaches it.
numbers = st.one_of(
    st.integers(1, 100),
    st.integers(1, MAX_INTEGER),
    st.sampled_from([MAX_INTEGER, MAX_INTEGER - 1, 2**52, 2**40, 10**6]),
)
lengths = st.one_of(
    st.integers(1, 1000), st.integers(1, MAX_DURATION), st.sampled_from([10**6, 3600 * 10**6, MAX_DURATION])
)


@st.composite
def extreme(draw, algorithm):
    quota = draw(numbers)
    if algorithm == "calendar_window":
        return Limit(quota, draw(st.sampled_from(["minute", "day", "year"])), algorithm, name="x")
    if algorithm in ("sliding_log", "concurrency"):
        quota = min(quota, 2**46)
    length = draw(lengths)
    burst = draw(numbers) if algorithm == "token_bucket" else 0
    while True:
        try:
            return Limit(quota, f"{length}us", algorithm, burst=burst, name="x")
        except ConfigError:
            quota, burst, length = max(1, quota // 1024), burst and max(1, burst // 1024), max(1, length // 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_number_stays_below_the_bound(algorithm):
    @given(first=extreme(algorithm), second=extreme(algorithm), data=st.data())
    def check(first, second, data):
        limits = [strict(first), strict(second)]
        highest = Bounded(2**46 if algorithm in ("sliding_log", "concurrency") else MAX_INTEGER)
        state, now, at = None, Bounded(START), Bounded(START)
        for _ in range(data.draw(st.integers(1, 8))):
            limit = limits[data.draw(st.integers(0, 1))]
            rest = max(0, 2**52 - 2 - int(now))  # instants reach to 2112
            steps = st.integers(0, min(rest, 2 * int(limit.length))), st.integers(0, rest // 8)
            now = Bounded(int(now) + data.draw(st.one_of(st.sampled_from([0, min(1, rest), -1]), *steps)))
            cost = Bounded(data.draw(st.one_of(st.integers(1, int(limit.burst)), numbers)))
            cost = min(cost, highest)
            limit.rules.view(state, limit, cost, now)
            if data.draw(st.booleans()):
                delta = Bounded(cost * data.draw(st.sampled_from([1, -1])))
                _, (state,), _ = adjust((limit,), (state,), (delta,), now, at if data.draw(st.booleans()) else None)
            else:
                _, (state,), _ = hold((limit,), (state,), (cost,), now)
                at = now
            limit.rules.view(state, limit, cost, now)
            if state is not None:
                assert limit.rules.expires(state) < 2**53

    check()


def test_running_sums_of_a_log_fit_in_63_bits():
    """At most 16 expired entries, or as many as are live, are kept; trimming restarts the sums."""
    limit = Limit(MAX_INTEGER, "1s", "sliding_log")
    state = limit.charge(None, limit, 1, START)
    now, highest = START, 0
    for number in range(2000):
        now += 10**6 if number % 50 < 17 else 1000
        cost = MAX_INTEGER if number % 50 < 17 else 1000
        state = limit.charge(state, limit, min(cost, limit.rules.view(state, limit, 0, now)[0] or 1), now) or state
        assert state is not None
        highest = max(highest, state[1].sums[-1])
    assert highest < 2**62


@given(quota=numbers, length=lengths, burst=numbers)
@example(quota=1, length=2**52, burst=1)
@example(quota=MAX_INTEGER, length=1, burst=MAX_INTEGER)
@example(quota=2**53 - 111, length=2**52 - 1, burst=3)
def test_rates_are_never_faster_than_configured_and_at_most_a_millionth_slower(quota, length, burst):
    asked = Fraction(quota, length)
    found = rate_below(quota, length, burst)
    if asked.denominator * burst <= MAX_INTEGER:
        assert found == (asked.numerator, asked.denominator), "exact where it fits"
    if found is None:
        return
    rate, scale = found
    assert scale * burst <= MAX_INTEGER
    assert Fraction(rate, scale) <= asked
    assert (asked - Fraction(rate, scale)) / asked <= Fraction(1, 10**6)


@given(x=st.fractions(0, 50, max_denominator=500), widest=st.integers(1, 60))
def test_fraction_below_is_the_largest(x, widest):
    best = max(Fraction(x * d // 1, d) for d in range(1, widest + 1))
    assert fraction_below(x, widest) == best


@given(a=st.integers(-(10**6), 10**6), b=st.integers(1, 1000))
def test_ceil_div(a, b):
    assert ceil_div(a, b) == -((-Fraction(a, b)) // 1)


def test_common_limits_are_exact():
    for quota in (1, 3, 7, 60, 90, 100, 1000, 7500, 90_000, 10**6, 10**7):
        for period in ("1s", "10s", "1m", "1h", "1d", "1w"):
            limit = Limit(quota, period)
            assert Fraction(limit.rate, limit.scale) == Fraction(quota, limit.length)


def test_limits_at_the_bound_and_just_beyond():
    at = Limit(1, f"{MAX_DURATION}us")
    assert (at.rate, at.scale, at.capacity) == (1, MAX_DURATION, MAX_DURATION)
    assert Limit(MAX_INTEGER, "1us").capacity == MAX_INTEGER
    fits = Limit(3, "1s", burst=MAX_INTEGER // 10**6)  # burst * denominator is just below 2**53
    assert (fits.rate, fits.scale) == (3, 10**6)
    assert fits.capacity <= MAX_INTEGER < (fits.burst + 1) * fits.scale
    # 10**10 + 1 per hour has a denominator of 3.6 * 10**9: with this burst, 2**53 is passed by one permit.
    burst = MAX_INTEGER // (3600 * 10**6)
    exact, rounded = (Limit(10**10 + 1, "1h", burst=b) for b in (burst, burst + 1))
    assert Fraction(exact.rate, exact.scale) == Fraction(10**10 + 1, 3600 * 10**6)
    assert exact.capacity <= MAX_INTEGER
    assert rounded.capacity <= MAX_INTEGER
    assert 0 < 1 - Fraction(rounded.rate, rounded.scale) / Fraction(10**10 + 1, 3600 * 10**6) < Fraction(1, 10**6)


@cases(("limit", "message"), [
        ((1, "1s", "token_bucket", "requests", MAX_INTEGER),
         ("quota: 1 permits per 1s with a burst of 9007199254740991 cannot be counted with enough precision: "
         "use a larger unit, a shorter period or a smaller burst")),
        ((1, "100000d", "token_bucket"),
         "period: expected a period from 1 microsecond to 142 years, not '100000d'"),
        ((2, f"{MAX_DURATION}us", "token_bucket", "requests", 5),
         ("quota: 2 permits per 4503599627370496us with a burst of 5 cannot be counted with enough precision: "
         "use a larger unit, a shorter period or a smaller burst")),
        ((MAX_INTEGER, "1d", "sliding_window"),
         "quota: 9007199254740991 permits per 1d are too many for a sliding_window: use a larger unit"),
        ((2**53, "1s"), "quota: must be an integer from 1 to 2**53 - 1, not 9007199254740992"),
        ((1, f"{2**51 + 1}us", "sliding_window"), "period: must be at most 71 years for a sliding_window"),
        ((0, "1s"), "quota: must be an integer from 1 to 2**53 - 1, not 0"),
        ((True, "1s"), "quota: must be an integer from 1 to 2**53 - 1, not True"),
        ((1.5, "1s"), "quota: must be an integer from 1 to 2**53 - 1, not 1.5"),
    ])  # fmt: skip
def test_limits_beyond_the_bounds_are_rejected(limit, message):
    with pytest.raises(ConfigError) as error:
        Limit(*limit)
    assert str(error.value) == message


def test_short_sliding_windows_are_accepted():
    """Found by reading: a tick of one microsecond was considered too coarse for periods below a second."""
    for length in (1, 1000, 500_000, 999_999):
        assert Limit(10, f"{length}us", "sliding_window").tick == 1


def test_coarse_ticks_are_less_than_a_millionth():
    limit = Limit(9 * 10**9, "1s", "sliding_window")
    assert limit.tick == 1
    limit = Limit(10**9, "1h", "sliding_window")
    assert limit.tick == ceil_div(10**9 * 3600 * 10**6, MAX_INTEGER)
    assert limit.tick <= limit.length / 10**6
    assert limit.quota * (limit.length // limit.tick) <= MAX_INTEGER


def test_limits_are_data():
    limit = Limit(5, "1m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        limit.quota = 6  # type: ignore[misc]  # that it cannot be is the test
