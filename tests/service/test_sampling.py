"""The counters are sampled while threads of gRPC add policies; a sample or a read that fails does not end anything."""

import asyncio
import sys
import threading
import time
from zlib import crc32

import pytest

from tests.cases import cases
from tests.service.harness import InProcessService
from tidegate import StoreUnavailable
from tidegate.core._decision import LocalDecision
from tidegate.observe._counters import Counters
from tidegate.service._decisions.audit import AuditLog, Origin
from tidegate.service._decisions.stats import DECISIONS
from tidegate.service._runtime.shared_memory import SharedCounters, WorkerMemory
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

POLICIES = 300
THREADS = 4
ROUNDS = 5
DOMAIN = {
    "domain": "edge",
    "descriptors": [
        {"key": "path", "value": f"/{number}", "rate_limit": {"unit": "hour", "requests_per_unit": 5}}
        for number in range(POLICIES)
    ],
}


@pytest.fixture
def frequent_switches():
    """Let CPython switch between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def decide_in_threads(decider, loop):
    """Decide on one descriptor of each policy in several threads, as gRPC does; return the running threads."""
    domain = decider.policies.domains["edge"]

    def decide():
        for number in range(POLICIES):
            variant, key = domain.match([("path", f"/{number}")])
            assert decider.acquire_in_thread(loop, variant, key, 1).allowed

    threads = [threading.Thread(target=decide) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.usefixtures("frequent_switches")
async def test_metrics_and_the_overview_while_threads_add_policies():
    for _ in range(ROUNDS):
        async with InProcessService(domains=[DOMAIN]) as service:
            threads = decide_in_threads(service.decider, asyncio.get_running_loop())
            while any(thread.is_alive() for thread in threads):
                service.clock.advance(1)  # a new sample
                for path in ("/metrics", "/v1/overview"):
                    assert (await service.http.get(path)).status_code == 200
            await asyncio.sleep(0)  # what the threads left to the event loop is counted
            counts = service.decider.stats.totals().counts
            assert {count.allowed for count in counts.values()} == {THREADS}
            assert len(counts) == POLICIES


class SwitchingCounters(Counters):
    """Counters of one process, in which other threads run in the middle of an addition."""

    def _new_row(self, kind, labels):
        time.sleep(0)  # yields the processor, no waiting
        return super()._new_row(kind, labels)


@pytest.fixture(params=["one process", "shared memory"])
def counters(request, monkeypatch):
    if request.param == "one process":
        yield SwitchingCounters()
        return

    def switch_threads_then_crc32(text):
        time.sleep(0)  # as above
        return crc32(text)

    monkeypatch.setattr("tidegate.service._runtime.shared_memory.crc32", switch_threads_then_crc32)
    memory = WorkerMemory.create(1, 0)
    yield SharedCounters([memory.areas[0].counters], 0, ManualClock(start=0))
    memory.close()


@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_add_the_same_rows_count_in_the_same_ones(counters):
    found = [{} for _ in range(THREADS)]  # rows, by each thread

    def count(thread):
        for number in range(POLICIES):
            name = f"policy-{(number + thread) % POLICIES}"  # threads meet at each policy
            found[thread][name] = counters.row(DECISIONS, name)

    threads = [threading.Thread(target=count, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counters.own(DECISIONS)  # what is read meanwhile
        counters.totals(DECISIONS)
    assert len(counters.totals(DECISIONS)) == len(counters.own(DECISIONS)) == POLICIES
    assert all(row is found[0][name] for rows in found for name, row in rows.items())


async def test_a_sample_that_fails_ends_neither_the_timer_nor_other_samples(caplog):
    async with InProcessService(policies={"api": "5/1h"}) as service:
        overview, samples = service.app.overview, []
        source = overview.source

        class FailingOnce:
            """The values of a process, except that the first sample fails."""

            def __getattr__(self, name):
                return getattr(source, name)

            def totals(self):
                samples.append(1)
                if len(samples) == 1:
                    raise RuntimeError("dictionary changed size during iteration")
                return source.totals()

        overview.use_source(FailingOnce())
        service.clock.advance(1)
        counted: list[int] = []
        service.app.on_sample += [lambda: counted.remove(0), lambda: counted.append(1)]
        overview.start()
        assert counted == [1]
        assert [record.exc_info[0] for record in caplog.records] == [RuntimeError, ValueError]
        service.clock.advance(1)
        deadline = asyncio.get_running_loop().time() + 20
        while len(samples) < 2:
            assert asyncio.get_running_loop().time() < deadline, "no further sample"
            service.clock.advance(1)
            await asyncio.sleep(0.05)
        overview.close()


class UnavailableStore(MemoryStore):
    """A shared store that is unavailable for the reads after the first ones, while `available` says so."""

    instant = False

    def __init__(self, clock):
        super().__init__(clock=clock)
        self.available = 10**9  # reads until it is unavailable

    async def apply_async(self, verb, *arguments, **options):
        decisions = await super().apply_async(verb, *arguments, **options)
        self.available -= verb == "peek"
        return decisions if self.available >= 0 else [LocalDecision(decision) for decision in decisions]

    async def list_values_async(self, *arguments):
        self.available -= 1
        if self.available < 0:
            raise StoreUnavailable("for a test")
        return await super().list_values_async(*arguments)


@cases("reads", range(12))
async def test_audit_entries_that_could_not_be_read_are_read_again(reads):
    """Whichever read of the store fails once."""
    clock = ManualClock(start=1_728_000_000)
    store = UnavailableStore(clock)
    for day in range(2):
        await AuditLog(store).add("block", "api", f"key-{day}", Origin("somebody", "", "abuse"))
        clock.advance(86_400)
    log = AuditLog(store)
    store.available = reads
    assert len(await log.read()) <= 2
    store.available = 10**9
    clock.advance(60)
    assert [entry.key for entry in await log.read()] == ["key-1", "key-0"]
