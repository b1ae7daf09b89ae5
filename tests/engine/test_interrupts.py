"""An exception at any instruction leaves every store, wait queue and lease usable, and admits no permit twice."""

import signal
import sqlite3
import threading
from contextlib import contextmanager, suppress
from itertools import count, takewhile

import pytest

from tests.cases import cases
from tests.engine.interrupted_calls import (
    BUCKET,
    BUCKETS,
    CALLS,
    LOG,
    SLOTS,
    START,
    WINDOWS,
    check_effects,
    used,
)
from tests.interrupts import (
    Interrupted,
    each_interruption,
    interrupt_calls,
    interrupted_at,
)
from tidegate import Limiter
from tidegate._runtime.clock import yield_thread
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("impatient_clocks")]


@pytest.mark.once
@cases("name", CALLS)
@cases("rules", [BUCKET, LOG, BUCKETS])
def test_memory_store(rules, name):
    check_effects(Limiter(rules, clock=ManualClock(START)), *CALLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["usual", "more", "refund"])
@pytest.mark.parametrize("rules", [WINDOWS, SLOTS], ids=["windows", "slots"])
def test_memory_store_with_other_algorithms(rules, name):
    check_effects(Limiter(rules, clock=ManualClock(START)), *CALLS[name])


@pytest.mark.slow
def test_memory_store_decides_on_several_keys_together():
    limiter = Limiter(BUCKET, clock=ManualClock(START))
    asks = [(limiter.policy, key, (1,)) for key in ("a", "b", "a")]
    answered = 0
    for _ in each_interruption(lambda: limiter.store.apply("acquire", asks)):
        limiter.store.apply("acquire", asks)
        answered += 1
        assert used(limiter, "a") >= 2 * answered
        assert used(limiter, "b") >= answered
    assert answered > 30


@contextmanager
def deciding(limiter, threads):
    """Run decisions in other threads; yield a list that holds the number of their decisions at the end."""
    ending = threading.Event()
    numbers = []

    def decide():
        number = 0
        while not ending.is_set():
            number += bool(limiter.try_acquire("k"))
        numbers.append(number)

    several = [threading.Thread(target=decide) for _ in range(threads)]
    for thread in several:
        thread.start()
    try:
        yield numbers
    finally:
        ending.set()
        for thread in several:
            thread.join()


def test_no_two_threads_decide_at_once():
    """A token that is replaced while a thread holds it would lose charges."""
    limiter = Limiter([f"{2**50}/1h fixed_window"], clock=ManualClock(START))
    limiter.try_acquire("k")
    with deciding(limiter, 3) as others:
        interruptions = sum(1 for _ in each_interruption(lambda: limiter.try_acquire("k")))
    answered = sum(others) + 2  # the first call, and the one that came to its end
    assert answered <= used(limiter) <= answered + interruptions


# ---- waiting --------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """The first of two interruptions, in the middle of a wait."""


class StoppingClock(ManualClock):
    """Interrupts a wait a given number of times."""

    stops = 0
    when_stopped = staticmethod(lambda: None)

    def wait(self, waits_for, until):
        if self.stops:
            self.stops -= 1
            self.when_stopped()
            raise StoppedError
        super().wait(waits_for, until)


@pytest.mark.slow
def test_waiting_in_the_queue():
    clock = ManualClock(START)
    limiter = Limiter("1/1s", clock=clock)
    limiter.acquire("k")
    kept = []

    def call():
        try:
            limiter.acquire("k")
        except Interrupted as error:
            kept.append(error)  # with its frames: what they hold is not freed by itself
            raise

    for step in each_interruption(call, every=2):
        assert limiter.waiting == 0, step
        assert limiter.acquire("k", timeout=100), step
    assert len(kept) > 50


@pytest.mark.slow
def test_an_interruption_of_the_clean_up_after_another():
    clock = StoppingClock(START)
    limiter = Limiter("1/1s", clock=clock)
    limiter.acquire("k")
    kept = []

    def call():
        clock.stops = 1
        try:
            limiter.acquire("k")
        except (StoppedError, Interrupted) as error:
            kept.append(error)
            if isinstance(error, Interrupted):
                raise
        finally:
            clock.stops = 0

    for step in each_interruption(call):
        assert limiter.waiting == 0, step
        assert limiter.acquire("k", timeout=100), step
    assert len(kept) > 50


@pytest.mark.slow
def test_waiters_behind_a_call_that_ended_without_leaving_are_served():
    """Found in use: a key stayed blocked with 999 permits free, by a waiter whose call had been interrupted."""
    clock = StoppingClock(START)
    limiter = Limiter("1000/1h", clock=clock)
    behind = []

    def join_behind():
        behind.append(threading.Thread(target=limiter.acquire, args=("k",), daemon=True))
        behind[-1].start()
        while limiter.waiting < 2:
            yield_thread(0)

    def interrupted_wait(step):
        limiter.reset("k")
        assert limiter.try_acquire("k", 1000)
        clock.stops = 1
        with suppress(StoppedError, Interrupted), interrupted_at(step) as countdown:
            limiter.acquire("k")
        clock.stops = 0
        return countdown.left <= 0

    steps = []
    for step in takewhile(interrupted_wait, count(1)):
        steps.append(step)
        assert limiter.acquire("k", timeout=100), step  # also finds a lock that was lost
    clock.when_stopped = join_behind
    for step in steps[len(steps) // 2 :]:  # in the clean-up, after another call has joined the queue
        assert interrupted_wait(step)
        if behind:
            behind[-1].join(30)  # the clock moves by itself while nothing else happens
            assert not behind[-1].is_alive(), step
    assert behind


# ---- reservations and blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settle", ["commit", "cancel"])
def test_a_reservation_is_settled_once(settle):
    limiter = Limiter(BUCKET, clock=ManualClock(START))
    limiter.try_acquire("k", 1000)
    before = used(limiter)
    actual = {"commit": (2,), "cancel": ()}[settle]
    left = sum(actual)
    held = limiter.reserve("k", 5)
    for step in each_interruption(lambda: getattr(held, settle)(*actual)):  # noqa: B023 - the present one is meant
        after = used(limiter)
        assert after in (before + 5, before + left), step
        if not held.settled:
            getattr(held, settle)(*actual)
            assert used(limiter) == before + left, step
        before = used(limiter)
        held = limiter.reserve("k", 5)


def test_a_block_with_a_reservation():
    limiter = Limiter(BUCKET, clock=ManualClock(START))
    limiter.try_acquire("k", 1000)
    before = used(limiter)

    def block():
        with limiter.reserve("k", 5) as held:
            held.commit(2)

    for step in each_interruption(block, every=4):
        after = used(limiter)
        assert before <= after <= before + 5, step
        before = after


def test_a_block_with_a_slot():
    """A slot whose block was interrupted is free at the latest when its lease ends."""
    clock = ManualClock(START)
    limiter = Limiter("2/10s concurrency", clock=clock)

    def block():
        with limiter.limited("k", timeout=0):
            pass

    for step in each_interruption(block, every=4):
        assert used(limiter) <= 1, step
        with limiter.limited("k", timeout=0):
            assert used(limiter) >= 1
        clock.advance(10)
        assert used(limiter) == 0, step


@pytest.mark.parametrize("rule", ["1000000000/1s", "1000000000/1h sliding_log"])
def test_a_decorated_function(rule):
    limiter = Limiter(rule, clock=ManualClock(START))
    limited = limiter.limited("k")(lambda: 5)
    limiter.acquire("k")
    for step in each_interruption(limited):
        assert limited() == 5, step


# ---- real signals ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
@pytest.mark.parametrize("kind", ["memory", "leased", "sqlite", "url"])
def test_signals(tmp_path, kind):
    stores = {
        "memory": MemoryStore,
        "leased": MemoryStore,
        "sqlite": lambda: SQLiteStore(tmp_path / "limits.db"),
        "url": lambda: f"sqlite:///{tmp_path}/limits.db",
    }
    limiter = Limiter("1000000000000/1h fixed_window", store=stores[kind](), lease=True if kind == "leased" else None)
    limiter.try_acquire("k")
    answered = 0

    def call():
        nonlocal answered
        assert limiter.try_acquire("k")
        answered += 1

    interrupt_calls(call, 200)
    assert limiter.try_acquire("k")
    assert answered <= used(limiter)
    limiter.close()
    if kind in ("sqlite", "url"):
        assert sqlite3.connect(tmp_path / "limits.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_signals_while_waiting():
    limiter = Limiter("1/1ms")
    interrupt_calls(lambda: limiter.acquire("k"), 200)
    assert limiter.waiting == 0
    assert limiter.acquire("k", timeout=10)
