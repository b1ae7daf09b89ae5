"""Which charges are corrected, and which calls are not charged."""

import asyncio
import logging

import pytest

from tests.cases import cases
from tests.outbound.flows import CALL, START, Failing, answer, limited, providers, reply, settle, settle_tokens, used
from tidegate import Denied
from tidegate.outbound import AsyncGate, Gate
from tidegate.stores import MemoryStore
from tidegate.stores._outage.guarded_store import GuardedStore
from tidegate.testing import ManualClock


@cases(
    ("limit", "estimate", "actual", "flight"),
    [
        ("90000/1m fixed_window unit=tokens", 1000, 5000, 20),
        ("90000/1m fixed_window unit=tokens", 5000, 100, 20),
        ("90000/1m calendar_window unit=tokens", 1000, 5000, 20),
        ("2000/1m unit=tokens", 100, 900, 70),
        ("2000/1m unit=tokens", 900, 100, 20),
        ("90000/1m unit=tokens", 900, 100, 5),  # too many to be charged anew, while the request is
        ("90000/1m unit=tokens", 900, 5000, 5),
    ],
)
@cases("slots", [{}, {"concurrency": 3}])
def test_tokens_of_a_recharged_request_are_settled_in_the_new_window(limit, estimate, actual, flight, slots):
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    known = limited("500/1m", limit, estimate={"tokens": estimate}, **slots)
    gate = Gate(known, store)
    settle_tokens(gate, answer(gate), 7)  # opens a window
    clock.advance(50)

    def send(_provider):
        clock.advance(flight)
        return reply()

    result = gate.run(gate.send_flow(CALL, send))
    first = 0 if flight > 10 else 7
    assert used(store, known)[1] == estimate + first
    settle_tokens(gate, result, actual)
    assert used(store, known)[1:] == [actual + first, *(0 for _ in slots)]
    gate.close()


# ---- while the store is lost -----------------------------------------------------------------------------------------


@pytest.fixture
def lost(caplog):
    """A store to be lost, what stands before it, their clock, and what finds it again."""
    caplog.set_level(logging.CRITICAL)
    clock = ManualClock(START)
    inner = Failing(clock=clock)
    store = GuardedStore(inner, background=False, clock=clock)

    def back():
        inner.fail = False
        while store.unavailable:
            clock.advance(0.05)
            store.maintain()

    yield inner, store, clock, back
    store.close()


@pytest.mark.parametrize("mode", ["deny", "local", "allow"])
async def test_requests_answered_during_an_outage_still_count(lost, mode):
    inner, store, clock, back = lost
    known, got = providers(10, on_store_error=mode), asyncio.Event()
    gate = AsyncGate(known, store, timeout=0)

    async def slow(_provider):
        await got.wait()
        return reply()

    tasks = [asyncio.create_task(gate.run(gate.send_flow(CALL, slow))) for _ in range(10)]
    await settle()
    assert used(inner, known) == [10]
    inner.fail = True
    clock.advance(2)
    got.set()
    await asyncio.gather(*tasks)
    back()
    assert used(inner, known) == [10]
    with pytest.raises(Denied):
        await gate.run(gate.send_flow(CALL, slow))
    await gate.close()


def test_refusals_during_an_outage_return_no_permits(lost):
    inner, store, clock, back = lost
    known = providers(10, on_store_error="allow")
    gate = Gate(known, store, timeout=0)
    answer(gate)
    inner.fail = True
    clock.advance(0.01)
    for _ in range(5):
        answer(gate, 429, [("Retry-After", "1")])
        clock.advance(1)
    inner.fail = False  # for another process the store was there all the time
    policy = known.match("https://x.example").policy
    for _ in range(9):
        inner.apply("acquire", ((policy, "x.example", (1,)),))
    back()
    assert used(inner, known) == [10]
    gate.close()


def test_provider_reports_during_an_outage_return_no_permits(lost):
    inner, store, clock, back = lost
    known = providers(10, on_store_error="allow")
    gate = Gate(known, store, timeout=0)
    answer(gate)
    inner.fail = True
    for _ in range(3):
        clock.advance(0.001)
        answer(gate, 200, [("X-RateLimit-Limit", "10"), ("X-RateLimit-Remaining", "2")])
    back()
    for _ in range(9):
        answer(gate, 200, [("X-RateLimit-Limit", "10"), ("X-RateLimit-Remaining", "10")])
        clock.advance(0.001)
    assert used(inner, known) == [10]
    with pytest.raises(Denied):
        answer(gate)
    gate.close()


def test_provider_charges_are_kept_for_one_period():
    clock = ManualClock(START)
    store, known = MemoryStore(clock=clock), providers(100)
    gate = Gate(known, store)
    for _ in range(200):  # somebody else uses it too
        left = max(1, 100 - used(store, known)[0] - 2)
        answer(gate, 200, [("X-RateLimit-Limit", "100"), ("X-RateLimit-Remaining", str(left))])
        clock.advance(2)
    account = gate.account_of(CALL)
    assert 0 < len(account._provider_charges) <= 31  # noqa: SLF001 - nothing else shows what is remembered
    gate.close()
