"""Requests in flight when a window ends, a file changes, or another thread reads their state."""

import asyncio
import threading

import pytest

from tests.outbound.flows import CALL, START, answer, limited, providers, reply, settle, used
from tidegate import Denied
from tidegate._runtime.clock import TaskSignal
from tidegate.outbound import AsyncGate, Gate, Providers, request_options
from tidegate.outbound._quota.arrival import DelayAllowance
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock


class SlowProvider:
    """A provider that requests reach after 0.2 s, and that responds 0.1 s later."""

    def __init__(self, clock):
        self.clock = clock
        self.arrivals = []

    async def send(self, _provider):
        await self.clock.wait_async(TaskSignal(), self.clock.steady() + 200_000)
        self.arrivals.append(round(self.clock.now() - START, 3))
        await self.clock.wait_async(TaskSignal(), self.clock.steady() + 100_000)
        return reply()

    async def pass_time(self, seconds, step):
        for _ in range(round(seconds / step)):
            await settle()
            self.clock.advance(step)
        await settle()


@pytest.mark.parametrize("algorithm", ["calendar_window", "fixed_window"])
@pytest.mark.parametrize("longer", [(), ("500/1h",)])
@pytest.mark.parametrize("patient", [True, False])
async def test_requests_in_flight_at_the_end_of_a_window_count_in_the_next(algorithm, longer, patient, monkeypatch):
    """Whether patience with slow answers is lost or not: to count in the right window costs nothing."""
    if not patient:
        monkeypatch.setattr(DelayAllowance, "spend", lambda *_: False)
    clock = ManualClock(START)
    far = SlowProvider(clock)
    gate = AsyncGate(limited({"limit": 5, "period": "1m", "algorithm": algorithm}, *longer), MemoryStore(clock=clock))
    await gate.run(gate.send_flow(CALL, lambda _: asyncio.sleep(0, reply())))  # opens the first window
    clock.advance(59.9)
    tasks = [asyncio.create_task(gate.run(gate.send_flow(CALL, far.send))) for _ in range(10)]
    await far.pass_time(1, step=0.05)
    assert len([at for at in far.arrivals if 60 <= at < 120]) == 5
    await far.pass_time(65, step=0.5)
    assert far.arrivals[-1] < 180
    assert max(sum(start <= at < start + 60 for at in far.arrivals) for start in (0, 60, 120)) <= 5
    await asyncio.gather(*tasks)
    await gate.close()


@pytest.mark.parametrize("changed", ["limit: 2\nperiod: 10s\napi_key: b", "limit: 2\nperiod: 10s\nlearn: 'off'"])
async def test_a_changed_file_keeps_requests_in_flight(tmp_path, changed):
    file = tmp_path / "x.yaml"
    file.write_text("domain: x.example\nlimit: 2\nperiod: 10s\napi_key: a\n")
    file.chmod(0o600)
    clock, hang = ManualClock(START), asyncio.Event()
    known = Providers.load(directories=[str(tmp_path)])
    gate = AsyncGate(known, MemoryStore(clock=clock), reload=None)

    async def slow(_provider):
        await hang.wait()
        return reply()

    async def quick(_provider):
        return reply()

    async def ask():
        with request_options(timeout=0):
            try:
                return (await gate.run(gate.send_flow(CALL, quick))).response
            except Denied:
                return None

    late = [asyncio.create_task(gate.run(gate.send_flow(CALL, send))) for send in (slow, quick)]
    await settle()
    file.write_text(f"domain: x.example\n{changed}\n")
    known.reload()
    clock.advance(5)
    assert await ask() is None
    clock.advance(6)
    assert [await ask(), await ask()] == [200, None]
    hang.set()
    await asyncio.gather(*late)
    await gate.close()


def test_changed_limits_keep_requests_in_flight():
    clock = ManualClock(START)
    gate = Gate(providers(2, "10s"), MemoryStore(clock=clock), timeout=0)

    def send(_provider):
        gate.planner.providers = providers(3, "10s")
        assert [answer(gate).response, answer(gate).response] == [200, 200]
        clock.advance(11)
        assert [answer(gate).response, answer(gate).response] == [200, 200]
        with pytest.raises(Denied):
            answer(gate)
        return reply()

    assert gate.run(gate.send_flow(CALL, send)).response == 200
    gate.close()


def test_a_stale_snapshot_does_not_undo_a_refusal():
    clock = ManualClock(START)
    gate = Gate(providers(1000), MemoryStore(clock=clock), timeout=0)
    answer(gate)
    account = gate.account_of(CALL)
    snapshot, peeked, refused = account.account_capacity.shared_capacity.snapshot, threading.Event(), threading.Event()

    def slow_snapshot(resource):
        found = snapshot(resource)
        if threading.current_thread() is thread:
            peeked.set()
            refused.wait(0.2)  # it never is within that time, unless somebody did not wait for this thread
        return found

    account.account_capacity.shared_capacity.snapshot = slow_snapshot
    thread = threading.Thread(target=account.refresh)
    thread.start()
    peeked.wait()
    answer(gate, 429, [("Retry-After", "3600")])
    refused.set()
    thread.join()
    with pytest.raises(Denied) as denied:
        answer(gate)
    assert denied.value.decision.retry_after == 3600
    gate.close()


class Slow(MemoryStore):
    """Delays charges without a maximum until the event `until` is set."""

    instant = False
    until = None

    async def apply_async(self, verb, asks, *rest):
        policy = asks[0][0]
        if verb == "acquire" and policy.name.startswith("provider:") and policy.limits[0].quota > 10**9:
            await self.until.wait()
        return self.apply(verb, asks, *rest)


async def test_a_request_refused_while_it_is_recharged_counts_once():
    clock, hang = ManualClock(START), asyncio.Event()
    store, known = Slow(clock=clock), providers(4)
    store.until = asyncio.Event()
    gate = AsyncGate(known, store)

    async def refused(_provider):
        await hang.wait()
        return reply(429, [("Retry-After", "0")])

    async def quick(_provider):
        return reply()

    tasks = [asyncio.create_task(gate.run(gate.send_flow(CALL, refused)))]
    await settle()
    clock.advance(61)
    tasks.append(asyncio.create_task(gate.run(gate.send_flow(CALL, quick))))
    await settle()
    hang.set()
    await settle()
    store.until.set()
    assert [(await task).response for task in tasks] == [429, 200]
    assert used(store, known) == [2]  # both may have arrived now
    await gate.close()
