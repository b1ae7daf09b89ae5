"""Limits and schedules as Hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from tidegate import Limit
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.errors import ConfigError

START = 1_735_689_600 * SECOND + 123_456  # 2025-01-01, shortly after midnight
DAY = 86_400 * SECOND
LENGTHS = (1, 2, 10, 997, 1000, 250_000, SECOND, 60 * SECOND, 3600 * SECOND, DAY, 7 * DAY, 365 * DAY)
NAMES = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")
CALENDARS = ("minute", "hour", "day", "week", "month", "year")

quotas = st.one_of(st.integers(1, 5), st.integers(1, 100), st.sampled_from([1000, 90_000, 10**7]))
lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(1, 100), st.integers(1, 90 * SECOND))


@st.composite
def limits(draw, algorithms=(*NAMES, "calendar_window"), name="", unit="requests"):
    algorithm = draw(st.sampled_from(algorithms))
    if algorithm == "calendar_window":
        zone = draw(st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kolkata"]))
        return Limit(draw(quotas), draw(st.sampled_from(CALENDARS)), algorithm, unit, name=name, timezone=zone)
    quota, burst = draw(quotas), draw(st.one_of(st.just(0), quotas)) if algorithm == "token_bucket" else 0
    length = draw(lengths)
    if algorithm == "sliding_window":
        quota = min(quota, MAX_INTEGER // length)  # weighed exactly; coarser ones have a test of their own
    try:
        return Limit(quota, f"{length}us", algorithm, unit, burst=burst, name=name)
    except ConfigError:  # 10**7 per year and the like are refused only with absurd bursts
        return Limit(1, f"{length}us", algorithm, unit, name=name)


@st.composite
def gaps(draw, length):
    """Draw the time until the next call; negative if the clock steps back."""
    whole = st.sampled_from([0, 0, 1, length - 1, length, length + 1, 2 * length, -1])
    return draw(st.one_of(whole, st.integers(0, length), st.integers(0, max(1, length // 10)), st.integers(-length, 0)))


def costs(limit, most=1):
    """Draw the cost of a call: mostly small, sometimes the quota, rarely more."""
    return st.one_of(st.just(1), st.integers(1, max(1, limit.burst // 3)), st.integers(1, limit.burst + most))


def used(limit, state, now):
    """Return the permits in use: more than the limit has if it was lowered, or a correction took more."""
    return limit.burst - limit.rules.view(state, limit, 0, now).remaining
