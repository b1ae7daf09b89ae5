"""verify_store with a frozen server: a store on a server bounds its calls itself."""

import os
import signal
from contextlib import contextmanager
from itertools import count

import pytest

from tests.servers.valkey import ValkeyServer
from tidegate.stores import DelegatingStore, open_store
from tidegate.testing import verify_store


@contextmanager
def stopped(server):
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


def opener(valkey, timeout, numbers=count()):  # noqa: B008 - one counter for all tests
    """Return a function that opens an empty store."""
    return lambda: open_store(f"{valkey.url}?timeout={timeout}&connect_timeout=5&prefix=p{next(numbers)}")


def test_a_store_that_ends_its_calls_in_time_passes(valkey):
    opened = opener(valkey, 0.2)
    verify_store(opened, rounds=0, frozen=lambda: stopped(valkey), deadline=2)


def test_a_store_that_ends_its_calls_too_late_is_reported(valkey):
    opened = opener(valkey, 0.4)
    with pytest.raises(AssertionError, match=r"answers within the deadline(.|\n)*the deadline is 0.1 s"):
        verify_store(opened, rounds=0, frozen=lambda: stopped(valkey), deadline=0.1)


class BlocksTheLoop(DelegatingStore):
    """Calls its server in the event loop."""

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        return self.apply(verb, asks, now, at, writes)


def test_a_store_that_blocks_the_event_loop_is_reported(valkey):
    opened = opener(valkey, 0.7)
    with pytest.raises(AssertionError, match=r"blocked the event loop|a cancelled call"):
        verify_store(lambda: BlocksTheLoop(opened()), rounds=0, frozen=lambda: stopped(valkey), deadline=1)
