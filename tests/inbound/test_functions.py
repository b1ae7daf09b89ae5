"""Limits on plain functions: all limits of a function are decided together."""

import asyncio

import pytest

from tidegate import ConfigError, Denied, StoreUnavailable
from tidegate.inbound.functions import Limits, limit
from tidegate.stores import DelegatingStore, MemoryStore
from tidegate.testing import ManualClock


class LostStore(DelegatingStore):
    """Fails while it is lost."""

    lost = False

    def apply(self, verb, asks, now=None, at=None, writes=()):
        if self.lost:
            raise StoreUnavailable("the store is lost")
        return super().apply(verb, asks, now, at, writes)


def calls(function, *arguments, times):
    """Call a function so many times; the limits that said no, or None, for each call."""
    found = []
    for _ in range(times):
        try:
            function(*arguments)
        except Denied as error:
            found.append(error.decision.violated)
        else:
            found.append(None)
    return found


def test_a_call_that_the_inner_limit_denies_is_not_charged_to_the_outer():
    clock = ManualClock(start=1_728_000_000)
    limits = Limits(clock=clock)

    @limits.limit("5/1h")
    @limits.limit("1/1m", key=lambda user: user)
    def act(user):
        return user

    assert calls(act, "a", times=10) == [None] + [("1m",)] * 9
    # The nine denied calls of one user have used nothing of what all share.
    assert [calls(act, user, times=1) for user in "bcde"] == [[None]] * 4
    assert calls(act, "f", times=1) == [("1h",)]


def test_a_call_that_the_outer_limit_denies_is_not_charged_to_the_inner():
    clock = ManualClock(start=1_728_000_000)
    limits = Limits(clock=clock)

    @limits.limit("2/1m")
    @limits.limit("3/1h", key=lambda user: user)
    def act(user):
        return user

    assert calls(act, "a", times=6) == [None, None, *[("1m",)] * 4]
    clock.advance(60)
    assert calls(act, "a", times=2) == [None, ("1h",)]


def test_limits_in_different_stores_are_given_back():
    clock = ManualClock(start=1_728_000_000)
    limits = Limits(clock=clock)

    @limits.limit("3/1h token_bucket")
    @Limits(clock=ManualClock(start=1_728_000_000)).limit("1/1m", key=lambda user: user)
    def act(user):
        return user

    assert calls(act, "a", times=10) == [None] + [("1m",)] * 9
    assert [calls(act, user, times=1) for user in "bcd"] == [[None], [None], [("1h",)]]


def test_the_error_names_each_limit_that_said_no():
    clock = ManualClock(start=1_728_000_000)
    limits = Limits(clock=clock)

    @limits.limit("1/1m", name="burst")
    @limits.limit("1/1h", name="hourly")
    def act():
        """Do nothing."""

    act()
    with pytest.raises(Denied, match="limit exceeded: burst, hourly; try again later") as raised:
        act()
    assert raised.value.decision.retry_after == 3600.0


def test_coroutine_functions_are_decided_together():
    clock = ManualClock(start=1_728_000_000)
    limits = Limits(clock=clock)

    @limits.limit("5/1h")
    @limits.limit("1/1m", key=lambda user: user)
    async def act(user):
        await asyncio.sleep(0)
        return user

    async def run():
        found = []
        for user in "aaaaaabcdef":
            try:
                found.append(await act(user))
            except Denied as error:
                found.append(error.decision.violated[0])
        return found

    assert asyncio.run(run()) == ["a", *["1m"] * 5, "b", "c", "d", "e", "1h"]


def test_two_limits_that_would_share_a_count_need_a_name():
    with pytest.raises(ConfigError, match=r"name: two limits of .*act have the name 'all/1m'.*name='burst'"):

        @limit("10/1m")
        @limit("5/1m")
        def act():
            """Do nothing."""


def test_one_instance_on_two_functions_counts_each():
    shared = Limits(clock=ManualClock(start=1_728_000_000)).limit("1/1m")

    @shared
    def one():
        """Do nothing."""

    @shared
    def other():
        """Do nothing."""

    assert calls(one, times=2) == calls(other, times=2) == [None, ("1m",)]


def test_a_number_as_key_is_counted_as_its_string():
    limits = Limits(clock=ManualClock(start=1_728_000_000))

    @limits.limit("1/1m", key=lambda user: user)
    def act(user):
        """Do nothing."""

    assert calls(act, 7, times=2) == [None, ("1m",)]
    assert calls(act, "7", times=1) == [("1m",)]
    with pytest.raises(ConfigError, match="a key is a string"):
        act(None)


def test_an_error_of_the_store_is_raised_and_charges_nothing():
    clock = ManualClock(start=1_728_000_000)
    lost = LostStore(MemoryStore(clock=clock))

    @Limits(clock=clock).limit("2/1m")
    @Limits(store=lost).limit("9/1m", name="in the lost store")
    def act():
        """Do nothing."""

    lost.lost = True
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            act()
    lost.lost = False
    assert calls(act, times=3) == [None, None, ("1m",)]
