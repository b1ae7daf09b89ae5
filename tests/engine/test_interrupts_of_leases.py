"""An exception at any instruction leaves leases usable, and admits no permit twice."""

import pytest

from tests.cases import cases
from tests.engine.interrupted_calls import CALLS, START, used
from tests.interrupts import (
    each_interruption,
    rarely,
)
from tidegate import Limiter
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("impatient_clocks")]

LEASED = {
    **{name: call for name, (call, _) in CALLS.items()},
    "settle": lambda limiter: limiter.reserve("k", 3).cancel(),
    "renew": lambda limiter: [limiter.try_acquire("k") for _ in range(3)],
    "metrics": lambda limiter: limiter.store.metrics(),
}


def outstanding(limiter):
    return limiter.store.metrics()["lease_outstanding_requests"]


def go_on(limiter, clock):
    """Call at such a rate that a share lasts for a few calls, and another follows."""
    for _ in range(4):
        clock.advance(0.05)
        assert limiter.try_acquire("k")


@pytest.mark.once
@cases("name", LEASED)
def test_leased_store(name):
    clock = ManualClock(START)
    shared = MemoryStore(clock=clock)
    limiter = Limiter([f"{2**40}/1h fixed_window"], store=shared, lease=True)
    other = Limiter([f"{2**40}/1h fixed_window"], store=shared)
    for step in each_interruption(lambda: LEASED[name](limiter), every=rarely(2)):
        assert other.peek("k"), step
        go_on(limiter, clock)
    limiter.close()


@pytest.mark.parametrize("name", ["usual", "more", "acquire"])
def test_leased_store_with_a_thread_that_renews(name):
    shared = MemoryStore()
    limiter = Limiter([f"{2**40}/1h fixed_window"], store=shared, lease=0.01)
    for step in each_interruption(lambda: LEASED[name](limiter), every=rarely(2)):
        assert limiter.try_acquire("k", 2), step
        assert shared.apply_one("peek", limiter.policy, "k", (1,)), step
    limiter.close()


@pytest.mark.parametrize("name", ["usual", "more", "renew"])
def test_leased_store_never_admits_more_than_the_limit(name):
    """This process and then another one together admit no more than the limit."""
    clock = ManualClock(START)
    shared = MemoryStore(clock=clock)
    limiter = Limiter(["5000/1h fixed_window"], store=shared, lease=True)
    answered = 0

    def take(cost=1):
        nonlocal answered
        if limiter.try_acquire("k", cost):
            answered += cost

    calls = {"usual": take, "more": lambda: take(3), "renew": lambda: [take() for _ in range(3)]}
    for _ in each_interruption(calls[name], every=rarely(2)):
        take()
        clock.advance(0.01)
    limiter.close()
    other = Limiter(["5000/1h fixed_window"], store=shared)
    assert used(other) >= answered
    while other.try_acquire("k"):
        answered += 1
    assert answered <= 5000


def test_a_key_whose_share_was_lost_gets_another():
    clock = ManualClock(START)
    shared = MemoryStore(clock=clock)
    limiter = Limiter([f"{2**40}/1h fixed_window"], store=shared, lease=True)
    for step in each_interruption(lambda: LEASED["renew"](limiter), every=rarely(5)):
        clock.advance(12)  # longer than a call may keep others from asking for a share
        for _ in range(6):
            go_on(limiter, clock)
        assert outstanding(limiter) > 0, step
