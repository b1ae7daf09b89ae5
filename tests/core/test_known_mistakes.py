"""What well-known limiters get wrong, as far as it concerns the core and the memory store; a test or more for each."""

import threading
import tracemalloc
from itertools import pairwise

import pytest

from tidegate import Limit, Limiter, Policy
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

ALGORITHMS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log")
START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_1_denied_hits_are_not_charged(clock, algorithm):
    limiter = Limiter(f"5/1m {algorithm}", clock=clock)
    assert sum(bool(limiter.try_acquire("k")) for _ in range(100)) == 5
    waits = []
    for _ in range(50):
        clock.advance(0.1)
        waits.append(limiter.try_acquire("k").retry_after)
    assert all(earlier is not None and later is not None and earlier > later for earlier, later in pairwise(waits)), (
        "refusals lengthen no wait"
    )
    clock.advance(waits[-1])
    assert limiter.try_acquire("k")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_2_calls_denied_by_another_limit_are_not_charged(clock, algorithm):
    limiter = Limiter([f"5/1h {algorithm}", "1/1m fixed_window"], clock=clock)
    admitted = 0
    for _ in range(5 * 60):
        admitted += bool(limiter.try_acquire("k"))
        clock.advance(1)
    assert admitted == 5


class Workers:
    """Eight threads that start once and make calls in rounds."""

    def __init__(self, threads=8):
        self.threads = threads
        self.barrier = threading.Barrier(threads + 1)
        self.task = None
        self.counts = [0] * threads
        for place in range(threads):
            threading.Thread(target=self.work, args=(place,), daemon=True).start()

    def work(self, place):
        while True:
            self.barrier.wait()
            if self.task is None:
                return
            self.counts[place] = self.task()
            self.barrier.wait()

    def round(self, task):
        """Run the task in every thread at the same time; return the sum of the results."""
        self.task = task
        self.barrier.wait()
        self.barrier.wait()
        return sum(self.counts)

    def stop(self):
        self.task = None
        self.barrier.wait()


@pytest.mark.usefixtures("switching")
def test_3_contention_admits_exactly_the_limit(clock):
    """1,000 keys, 8 threads on each at once, a forced thread switch every microsecond or so."""
    rules = ["10/1h", "10/1h sliding_log", ["10/1h", "20/1d fixed_window"], "10/1h sliding_window"]
    keys = [f"k{number}" for number in range(20)]
    workers = Workers()
    try:
        for number in range(50):
            limiter = Limiter(rules[number % len(rules)], clock=clock)

            def task(limiter=limiter):
                return sum(bool(limiter.try_acquire(key)) for key in keys for _ in range(3))

            assert workers.round(task) == 10 * len(keys)
            assert not any(limiter.peek(key) for key in keys)
    finally:
        workers.stop()


class AdvancingClock(ManualClock):
    """A clock that advances by a millisecond with every read, so that threads see different times."""

    def ns(self):
        self._now += 1000
        return self._now * 1000


@pytest.mark.usefixtures("switching")
def test_3_time_is_read_inside_the_lock():
    """No thread decides at an instant before the previous decision: under contention, no call is denied needlessly."""
    seen = []

    class RecordingClock(AdvancingClock):
        def ns(self):
            now = super().ns()
            seen.append(now)
            return now

    store = MemoryStore(clock=RecordingClock(START))
    policy = Policy("p", (Limit(10**6, "1h", "sliding_log"),))
    limiter = Limiter(policy, store=store)
    workers = Workers()
    try:
        admitted = workers.round(lambda: sum(bool(limiter.try_acquire("k")) for _ in range(500)))
    finally:
        workers.stop()
    assert admitted == 4000
    assert seen == sorted(seen)
    told = [now // 1000 for now in seen][-admitted:]
    ends = policy.limits[0].length
    for number in range(0, admitted, 97):
        counted = 10**6 - store.apply("peek", [(policy, "k", (0,))], told[number] + ends)[0].remaining
        assert counted == sum(at > told[number] for at in told), "every call counts from the time that it was told"


@pytest.mark.parametrize("max_entries", [10, 1000])
def test_5_other_keys_do_not_evict_a_live_limit(clock, max_entries):
    store = MemoryStore(max_entries=max_entries, clock=clock)
    limiter = Limiter("1/1h", store=store)
    assert limiter.try_acquire("victim")
    for number in range(5 * max_entries):
        limiter.try_acquire(f"other-{number}")
    assert not limiter.try_acquire("victim")
    clock.advance(3600)
    assert limiter.try_acquire("victim")


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_log"])
def test_6_ninety_per_minute_admits_ninety_per_minute(clock, algorithm):
    limiter = Limiter(Limit(90, "1m", algorithm), clock=clock)
    admitted = 0
    for _ in range(902):
        admitted += bool(limiter.try_acquire("k"))
        clock.advance(2 / 3)
    assert admitted == 902, "a call every two thirds of a second is just what 90 a minute allow"


def test_6_no_second_quota_is_admitted_around_a_window_boundary():
    for offset in (0.0, 0.5, 0.96, 0.98, 0.999_999):
        clock = ManualClock(START + offset)
        limiter = Limiter("100/1s sliding_log", clock=clock)
        admitted = 0
        for _ in range(400):
            admitted += bool(limiter.try_acquire("k"))
            clock.advance(0.000_1)
        assert admitted == 100
    clock = ManualClock(START + 0.98)
    bucket = Limiter("100/1s", clock=clock)
    admitted = 0
    for _ in range(400):
        admitted += bool(bucket.try_acquire("k"))
        clock.advance(0.000_1)
    assert admitted == 103, "the burst, and what 40 ms refill (the fourth permit is there just after the last call)"


def test_8_a_cost_that_can_never_fit_has_no_retry_after(clock):
    limiter = Limiter(["5/1m", "10/1h sliding_log"], clock=clock)
    decision = limiter.try_acquire("k", 6)
    assert not decision
    assert decision.retry_after is None
    assert decision.violated == ("1m",)


def test_9_slots_of_a_crashed_holder_are_released(clock):
    limiter = Limiter("2/30s concurrency", clock=clock)
    limiter.try_acquire("k")
    clock.advance(10)
    limiter.try_acquire("k")
    assert limiter.try_acquire("k").retry_after == 20
    clock.advance(20)
    assert limiter.try_acquire("k")


def test_10_keys_used_once_are_removed(clock):
    store = MemoryStore(clock=clock)
    limiter = Limiter("5/1m", store=store)
    most, threads = 0, threading.active_count()
    for number in range(20_000):
        limiter.try_acquire(f"client-{number}")
        clock.advance(0.1)
        most = max(most, store.metrics()["entries"])
    assert most <= 12 * 10 + 64, "one permit is back after 12 s, and with it the key is forgotten"
    assert threading.active_count() <= threads, "no thread cleans up"


def test_12_keys_do_not_collide(clock):
    limiter = Limiter("1/1h", clock=clock)
    for key in (("a/b", "c"), ("a", "b/c"), ("a", "b", "c"), "a/b/c", ("a%2Fb", "c"), "a%2Fb/c"):
        assert limiter.try_acquire(key), key


@pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
def test_15_a_cost_of_50_000_is_one_entry(clock, algorithm):
    store = MemoryStore(clock=clock)
    limiter = Limiter(Limit(1_000_000, "1h", algorithm), store=store)
    tracemalloc.start()
    try:
        for _ in range(3):
            limiter.try_acquire("k", 50_000)
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()
    assert limiter.peek("k", 0).remaining == 850_000
