"""Waiting is fair, cancellable, bounded, and needs no real time on a ManualClock."""

import asyncio
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.servers.process import until
from tidegate import AsyncLimiter, Closed, Denied, Limit, Limiter
from tidegate._limiter.waiting import Places
from tidegate._runtime.clock import STORE_THREAD
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(START)


async def settle():
    """Let every task run until it waits for time to pass."""
    for _ in range(50):
        await asyncio.sleep(0)


async def join(limiter, order, name, **ask):
    """Start a task that waits for a permit; it is in the queue when this returns."""

    async def wait():
        await limiter.acquire("k", **ask)
        order.append(name)

    task = asyncio.create_task(wait())
    await settle()
    return task


async def test_a_waiter_gets_its_permit_at_the_exact_instant(clock):
    limiter = AsyncLimiter("1/10s", clock=clock)
    await limiter.acquire("k")
    order = []
    task = await join(limiter, order, "late")
    clock.advance(9.999_999)
    await settle()
    assert order == []
    clock.advance(0.000_001)
    await settle()
    assert order == ["late"]
    assert task.done()


class PausedOnceQueued(ManualClock):
    """As if the process stood still for a while, once its call has joined a queue."""

    pause = 0

    def steady(self):
        if self.pause and self.limiter.waiting:
            pause, self.pause = self.pause, 0
            self.advance(pause)
        return super().steady()


@cases("pause", [4, 10, 60])
def test_a_pause_of_the_process_after_the_answer_is_not_waited_for_again(pause):
    clock = PausedOnceQueued(START)
    for take in (Limiter.acquire, Limiter.reserve):
        clock.limiter = limiter = Limiter("1/10s", clock=clock)
        limiter.acquire("k")
        began, clock.pause = clock.now(), pause
        take(limiter, "k", timeout=None)
        assert clock.now() - began == max(10, pause)


async def test_first_come_first_served(clock):
    limiter = AsyncLimiter("1/1s", clock=clock)
    await limiter.acquire("k")
    order = []
    tasks = [await join(limiter, order, number) for number in range(5)]
    for served in range(5):
        assert order == list(range(served))
        clock.advance(1)
        await settle()
    assert order == [0, 1, 2, 3, 4]
    await asyncio.gather(*tasks)


async def test_a_large_cost_is_not_starved_by_small_ones(clock):
    limiter = AsyncLimiter("10/10s", clock=clock)
    await limiter.acquire("k", cost=10)
    order = []
    await join(limiter, order, "large", cost=10)
    for number in range(20):
        await join(limiter, order, number)
        clock.advance(1)
        await settle()
        if "large" in order:
            break
    assert order[0] == "large"
    await limiter.close()


async def test_higher_priority_goes_first(clock):
    limiter = AsyncLimiter("1/1s", clock=clock, ageing=5)
    await limiter.acquire("k")
    order = []
    tasks = [await join(limiter, order, name, priority=p) for name, p in [("a", 0), ("b", 0), ("c", 2), ("d", 1)]]
    for _ in tasks:
        clock.advance(1)
        await settle()
    assert order == ["c", "d", "a", "b"]


async def test_low_priority_ages_and_is_never_starved(clock):
    limiter = AsyncLimiter("1/1s", clock=clock, ageing=5)
    await limiter.acquire("k")
    order = []
    await join(limiter, order, "low")
    for number in range(40):  # a call with priority 3 arrives every second
        await join(limiter, order, number, priority=3)
        clock.advance(1)
        await settle()
        if "low" in order:
            break
    assert order.index("low") in (15, 16), "passed only by those who came within 3 * 5 seconds"
    await limiter.close()


async def test_a_timeout_behind_others_is_a_denial_even_if_permits_are_free(clock):
    limiter = AsyncLimiter("4/1s", clock=clock)
    await limiter.acquire("k", cost=3)
    await join(limiter, [], "large", cost=4)
    with pytest.raises(Denied, match="other calls are ahead of it in the queue") as denied:
        await limiter.acquire("k", timeout=0)
    assert not denied.value.decision
    assert (await limiter.usage("k"))["1s"].used == 3
    await limiter.close()


async def test_keys_do_not_wait_for_each_other(clock):
    limiter = AsyncLimiter("1/1h", clock=clock)
    await limiter.acquire("k")
    waiting = await join(limiter, [], "stuck")
    assert (await limiter.acquire("other", timeout=0)).allowed
    assert (await limiter.try_acquire("third")).allowed
    waiting.cancel()


async def test_only_the_first_waiter_calls_the_store(clock):
    asked = []
    limiter = AsyncLimiter("1/1s", clock=clock, observer=asked.append)
    await limiter.acquire("k")
    order = []
    tasks = [await join(limiter, order, number) for number in range(100)]
    asked.clear()
    clock.advance(1)
    await settle()
    assert order == [0]
    assert len(asked) <= 3, "the first asks and gets; the second asks and learns how long to wait"
    for task in tasks:
        task.cancel()


async def test_the_deadline_raises_denied_with_the_decision(clock):
    limiter = AsyncLimiter("1/10s", clock=clock)
    await limiter.acquire("k")
    first = asyncio.create_task(limiter.acquire("k", timeout=5))
    second = asyncio.create_task(limiter.acquire("k", timeout=5))
    await settle()
    clock.advance(4.999_999)
    await settle()
    assert not first.done()
    assert not second.done()
    clock.advance(0.000_001)
    for task in (first, second):
        with pytest.raises(Denied) as denied:
            await task
        assert denied.value.decision.retry_after == 5
        assert "'k' got no permit within 5 s" in str(denied.value)
    assert limiter.waiting == 0


def test_an_impossible_cost_is_denied_at_once(clock):
    limiter = Limiter(["5/1s", Limit(3, "1m", name="tight")], clock=clock)
    with pytest.raises(Denied, match="'k': the cost exceeds what tight can ever allow") as denied:
        limiter.acquire("k", cost=4)
    assert denied.value.decision.retry_after is None
    assert clock.now() == START


async def test_an_impossible_cost_is_denied_at_once_behind_a_queue(clock):
    limiter = AsyncLimiter("3/1m", clock=clock)
    await limiter.acquire("k", cost=3)
    waiting = await join(limiter, [], "first")
    with pytest.raises(Denied):
        await limiter.acquire("k", cost=4)
    assert clock.now() == START
    waiting.cancel()


async def test_a_cancelled_waiter_leaves_the_queue_and_is_not_charged(clock):
    limiter = AsyncLimiter("1/1s", clock=clock)
    await limiter.acquire("k")
    order = []
    first = await join(limiter, order, "cancelled")
    await join(limiter, order, "next")
    first.cancel()
    await settle()
    assert limiter.waiting == 1
    clock.advance(1)
    await settle()
    assert order == ["next"]
    assert limiter.waiting == 0
    assert limiter.waiting == 0
    assert (await limiter.usage("k"))["1s"].used == 1, "a cancelled call is charged nothing"


async def test_asyncio_timeouts_work_like_cancellation():
    limiter = AsyncLimiter("1/1h")
    await limiter.acquire("k")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await limiter.acquire("k")
    assert limiter.waiting == 0


async def test_close_wakes_all_waiters(clock):
    limiter = AsyncLimiter("1/1h", clock=clock)
    await limiter.acquire("k")
    tasks = [await join(limiter, [], number) for number in range(10)]
    await limiter.close()
    for task in tasks:
        with pytest.raises(Closed):
            await task
    assert limiter.waiting == 0


@pytest.mark.parametrize("free", ["release", "refund", "reset", "cancel", "update"])
async def test_returned_permits_wake_the_first_waiter(clock, free):
    limiter = AsyncLimiter(Limit(1, "1h", algorithm="concurrency"), clock=clock)
    reservation = await limiter.reserve("k")
    order = []
    await join(limiter, order, "waited")
    if free == "cancel":
        await reservation.cancel()
    elif free == "update":
        limiter.update(Limit(2, "1h", algorithm="concurrency"))
    else:
        await getattr(limiter, free)("k")
    await settle()
    assert order == ["waited"]
    assert clock.now() == START


async def test_permits_returned_by_another_limiter_wake_the_first_waiter(clock):
    store = MemoryStore(clock=clock)
    limiter, other = (AsyncLimiter(Limit(1, "1h", "concurrency"), store=store) for _ in range(2))
    await other.acquire("k")
    order = []
    await join(limiter, order, "waited")
    await other.release("k")
    await settle()
    assert order == ["waited"]
    assert clock.now() == START


def test_a_single_thread_advances_the_manual_clock(clock):
    limiter = Limiter("1/10s", clock=clock)
    limiter.acquire("k")
    limiter.acquire("k")
    assert clock.now() == START + 10
    with pytest.raises(Denied):
        limiter.acquire("k", timeout=5.0)
    assert clock.now() == START + 15


async def test_a_single_task_advances_the_manual_clock(clock):
    limiter = AsyncLimiter("1/10s", clock=clock)
    for _ in range(100):
        await limiter.acquire("k")
    assert clock.now() == START + 990


def test_threads_wait_in_order_and_are_woken_by_advance(clock):
    limiter = Limiter("1/1s", clock=clock)
    limiter.acquire("k")
    served, entered = [], threading.Semaphore(0)

    def work(number):
        limiter.acquire("k")
        served.append(number)
        entered.release()

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while limiter.waiting <= number:
            threading.Event().wait(0.001)
    for count in range(1, 5):
        clock.advance(1)
        assert entered.acquire(timeout=10)
        assert served == list(range(count))
    for thread in threads:
        thread.join(10)


def test_close_wakes_threads():
    limiter = Limiter("1/1h")
    limiter.acquire("k")
    outcome = []

    def work():
        try:
            limiter.acquire("k")
        except Closed as error:
            outcome.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    while limiter.waiting < 5:
        threading.Event().wait(0.001)
    limiter.close()
    for thread in threads:
        thread.join(10)
    assert len(outcome) == 5


async def test_real_time_waits_are_exact_enough():
    limiter = AsyncLimiter("1/20ms")
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(limiter.acquire("k") for _ in range(6)))
    assert 0.1 <= loop.time() - began < 5, "never early; late only as far as the machine is busy"


waiter = st.tuples(
    st.integers(0, 30),  # when it comes, in tenths of a second
    st.integers(1, 4),  # what it asks for
    st.integers(0, 2),  # its priority
    st.one_of(st.none(), st.integers(0, 60)),  # its patience, in tenths of a second
    st.booleans(),  # whether it is cancelled half-way
)


@given(
    st.lists(waiter, min_size=1, max_size=12),
    st.sampled_from(["2/1s burst=4", "4/2s sliding_log", "4/1s fixed_window"]),
)
def test_any_number_of_waiters_is_served(crowd, rule):
    """Every waiter ends; no more are admitted than the same calls one by one; no waiter is left in a queue."""

    async def run():
        clock = ManualClock(START)
        seen = []
        limiter = AsyncLimiter(rule, clock=clock, observer=seen.append)
        tasks = []
        for tenth in range(31):
            for comes, cost, priority, patience, cancelled in crowd:
                if comes == tenth:
                    timeout = None if patience is None else patience / 10
                    ask = limiter.acquire("k", cost=cost, timeout=timeout, priority=priority)
                    tasks.append((asyncio.create_task(ask), cancelled))
            await settle()
            clock.advance(0.1)
            await settle()
            for task, cancelled in tasks:
                if cancelled and tenth % 7 == 6:
                    task.cancel()
        for _ in range(2000):
            if all(task.done() for task, _ in tasks):
                break
            clock.advance(0.1)
            await settle()
        assert all(task.done() for task, _ in tasks)
        assert limiter.waiting == 0
        admitted = [record for record in seen if record.verb == "acquire" and record.decision.allowed]
        done = 0
        for task, _ in tasks:
            with suppress(asyncio.CancelledError, Denied):
                await task
                done += 1
        assert len(admitted) == done, "every charged call has its permit"

    asyncio.run(run())


def verbs_of(asked):
    return [record.verb for record in asked]


async def test_an_acquire_that_times_out_asks_twice(clock):
    asked = []
    limiter = AsyncLimiter("1/10s", clock=clock, observer=asked.append)
    await limiter.acquire("k")
    asked.clear()
    with pytest.raises(Denied, match=r"1 s: 10s would allow it in 9\.0 s"):
        await limiter.acquire("k", timeout=1)
    assert verbs_of(asked) == ["acquire", "acquire"], "at once, and at the deadline"


def test_an_acquire_of_a_thread_that_times_out_asks_twice(clock):
    asked = []
    limiter = Limiter("1/10s", clock=clock, observer=asked.append)
    limiter.acquire("k")
    asked.clear()
    with pytest.raises(Denied, match=r"1 s: 10s would allow it in 9\.0 s"):
        limiter.acquire("k", timeout=1)
    assert verbs_of(asked) == ["acquire", "acquire"]


async def test_a_call_that_waits_asks_once_before_it_sleeps(clock):
    asked = []
    limiter = AsyncLimiter("1/10s", clock=clock, observer=asked.append)
    await limiter.acquire("k")
    asked.clear()
    await limiter.acquire("k", timeout=60)
    assert verbs_of(asked) == ["acquire", "acquire"], "denied, and allowed 10 s later"
    assert clock.now() == START + 10


class RefillsAfterAsking(MemoryStore):
    """A store in which a permit of another process comes back right after a denial, one second after the start."""

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        decision = super().apply_one(verb, policy, key, costs, now, at)
        if verb == "acquire" and not decision and self.clock.now() == START + 1:
            super().apply_one("reset", policy, key, costs)
        return decision


def test_the_first_in_the_queue_is_not_told_that_others_are_ahead(clock):
    limiter = Limiter("1/10s", store=RefillsAfterAsking(clock=clock))
    limiter.acquire("k")
    with pytest.raises(Denied, match=r"would allow it in 9\.0 s"):
        limiter.acquire("k", timeout=1)


async def test_a_call_that_was_overtaken_is_told_so_at_its_deadline(clock):
    limiter = AsyncLimiter("1/10s", clock=clock, ageing=100)
    await limiter.acquire("k")
    order = []
    task = asyncio.create_task(limiter.acquire("k", timeout=10))
    await settle()
    urgent = await join(limiter, order, "urgent", cost=1, priority=1)
    later = await join(limiter, order, "later", cost=1, priority=1)
    clock.advance(10)
    with pytest.raises(Denied) as denied:
        await task
    assert denied.value.decision.at == (START + 10) * 1_000_000, "what it was told is not from before it was overtaken"
    for each in (urgent, later):
        each.cancel()


class ActsAfterDenial(MemoryStore):
    """Calls `then` once, after a call was denied and before its caller learns of it."""

    then = None

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        decision = super().apply_one(verb, policy, key, costs, now, at)
        if verb == "acquire" and not decision and self.then is not None:
            then, self.then = self.then, None
            then()
        return decision


@pytest.mark.parametrize("returns", ["release", "update"])
def test_permits_that_return_before_the_call_joins_its_queue_are_not_missed(clock, returns):
    store = ActsAfterDenial(clock=clock)
    limiter = Limiter(Limit(1, "1h", "concurrency", name="slots"), store=store)
    first = limiter.acquire("k")
    if returns == "release":
        store.then = lambda: limiter.release("k", 1, first)
    else:
        store.then = lambda: limiter.update(Limit(2, "1h", "concurrency", name="slots"))
    assert limiter.acquire("k", timeout=60)
    assert store.then is None
    assert clock.now() == START, "it did not wait"


@pytest.mark.timeout(20)
def test_threads_of_a_store_do_not_keep_a_manual_clock_from_moving(clock, monkeypatch):
    """They outlive their store, so a wait in a later test would take the whole grace."""
    monkeypatch.setattr("tidegate._runtime.clock.IDLE_GRACE", 1000)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name=STORE_THREAD)
    thread.start()
    try:
        limiter = Limiter("1/1h", clock=clock)
        assert all(limiter.acquire("k") for _ in range(3))
        assert clock.now() == START + 2 * 3600
    finally:
        ended.set()
        thread.join()


def test_a_call_whose_predecessor_leaves_while_it_joins_the_queue_does_not_sleep_for_ever(monkeypatch):
    """Between the look at the queue and joining it, the call ahead is served: nobody would wake the one that joins."""
    limiter = Limiter(Limit(1, "1h", "concurrency"))
    limiter.acquire("k")
    ahead = threading.Thread(target=limiter.acquire, args=("k",))
    ahead.start()
    until(lambda: limiter.queues.waiting("k") == 1, "the call ahead waits")
    look = Places.occupied_before

    def look_late(places, waiter):
        if ahead.is_alive():
            limiter.release("k")
            ahead.join()
            limiter.release("k")
        return look(places, waiter)

    monkeypatch.setattr(Places, "occupied_before", look_late)
    found = []
    late = threading.Thread(target=lambda: found.append(limiter.acquire("k", timeout=30).allowed))
    late.start()
    late.join(10)
    assert found == [True]
