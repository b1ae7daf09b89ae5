"""Permits and responses when a call fails, or its task is cancelled, between the permit and the response."""

import asyncio

import pytest

from tests.outbound.flows import (
    CALL,
    START,
    Failing,
    SlowStore,
    Waiting,
    cancel_until_done,
    limited,
    providers,
    reply,
    settle,
    used,
)
from tidegate import StoreUnavailable
from tidegate.outbound import AsyncGate, Gate
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

SLOTS = {"concurrency": {"limit": 1, "lease": "10m"}}


@pytest.mark.parametrize(("status", "capacity"), [(200, 10), (429, 5), (503, 5)])
@pytest.mark.parametrize("headers", [(), (("X-RateLimit-Limit", "10"), ("X-RateLimit-Remaining", "0"))])
def test_a_response_is_returned_during_a_store_outage(status, capacity, headers):
    clock = ManualClock(START)
    store, known = Failing(clock=clock), limited("10/1m", **SLOTS)
    gate = Gate(known, store)

    def send(_provider):
        store.fail = True
        clock.advance(1)
        return reply(status, headers)

    result = gate.run(gate.send_flow(CALL, send))
    assert result.response == status
    assert gate.capacities() == {"x.example": capacity}
    store.fail = False
    gate.run(result.settlement.settle_flow())
    assert used(store, known)[1] == 0
    gate.close()


async def test_a_task_cancelled_after_its_response_releases_everything():
    clock = ManualClock(START)
    store, known, closed = Waiting(clock=clock), limited("10/1m", **SLOTS), []
    gate = AsyncGate(known, store)

    async def close():
        closed.append(True)

    async def send(_provider):
        store.until = asyncio.Event()
        clock.advance(1)
        return reply(close=close)

    task = asyncio.create_task(gate.run(gate.send_flow(CALL, send)))
    await settle()
    task.cancel()
    await settle()
    assert closed == [True]
    store.until.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert used(store, known) == [1, 0]
    await gate.close()


async def test_a_task_cancelled_before_sending_returns_its_permit():
    store, known = Waiting(clock=ManualClock(START)), limited("10/1m", **SLOTS)
    gate = AsyncGate(known, store)
    store.blocked, store.until = "tidegate.capacity", asyncio.Event()

    async def send(_provider):
        raise AssertionError

    task = asyncio.create_task(gate.run(gate.send_flow(CALL, send)))
    await settle()
    assert used(store, known) == [1, 1]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert used(store, known) == [0, 0]
    await gate.close()


async def test_a_request_in_flight_stays_tracked_when_it_cannot_be_recharged():
    clock = ManualClock(START)
    store, known, hang = FailingChargeStore(clock=clock), providers(2), asyncio.Event()
    gate = AsyncGate(known, store, timeout=0)

    async def slow(_provider):
        await hang.wait()
        return reply()

    async def quick(_provider):
        return reply()

    late = asyncio.create_task(gate.run(gate.send_flow(CALL, slow)))
    await settle()
    clock.advance(61)
    store.failing = True
    with pytest.raises(StoreUnavailable):
        await gate.run(gate.send_flow(CALL, quick))
    assert used(store, known) == [0]
    store.failing = False
    await gate.run(gate.send_flow(CALL, quick))
    assert used(store, known) == [2]
    hang.set()
    await late
    await gate.close()


class FailingChargeStore(MemoryStore):
    """Raises StoreUnavailable for charges without a maximum, while `failing` is set."""

    failing = False

    def apply(self, verb, asks, *rest):
        if self.failing and verb == "acquire" and asks[0][0].limits[0].quota > 10**9:
            raise StoreUnavailable("lost")
        return super().apply(verb, asks, *rest)


# ---- a task that is cancelled again and again, as the cancel scopes of anyio do --------------------------------------


@pytest.mark.parametrize("answered", [False, True])
async def test_a_slow_call_that_is_cancelled_repeatedly_releases_its_slot(answered):
    clock = ManualClock(START)
    store, known = SlowStore(clock=clock), limited("10/1m", **SLOTS)
    gate = AsyncGate(known, store)
    sent, hang = asyncio.Event(), asyncio.Event()

    async def send(_provider):
        sent.set()
        if not answered:
            await hang.wait()
        clock.advance(10)  # so late that it is charged again
        return reply(close=hang.wait)

    task = asyncio.create_task(gate.run(gate.send_flow(CALL, send)))
    await sent.wait()
    clock.advance(10)
    await cancel_until_done(task)
    assert used(store, known) == [1, 0]
    await gate.close()


async def test_a_pending_charge_that_is_cancelled_repeatedly_releases_its_slot():
    clock = ManualClock(START)
    store, known = SlowStore(clock=clock), limited("10/1m", **SLOTS)
    gate = AsyncGate(known, store)
    pending = await gate.acquire("x.example")
    clock.advance(10)
    await cancel_until_done(pending.commit())
    assert used(store, known) == [1, 0]
    await gate.close()
