"""An exception in a caller leaves what it shares with background threads usable."""

import asyncio
import signal
import threading

import pytest

from tests.interrupts import each_interruption, interrupt_calls
from tests.servers.process import until
from tidegate._runtime.clock import ThreadSignal
from tidegate.bus._network import NetworkBus

needs_timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")


def in_time(call):
    """Return what a call returns in another thread, which may hang."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(20)
    assert answers, "the call hangs"
    return answers[0]


def test_a_signal_of_threads_survives_exceptions_in_its_methods():
    signal_of_threads = ThreadSignal()

    def use_it():
        signal_of_threads.set()
        signal_of_threads.wait(0)
        signal_of_threads.clear()

    for _ in each_interruption(use_it):
        signal_of_threads.set()
        assert [signal_of_threads.wait(1), signal_of_threads.is_set()] == [True, True]
        signal_of_threads.clear()
        assert [signal_of_threads.wait(0), signal_of_threads.is_set()] == [False, False]


# ---- buses ----------------------------------------------------------------------------------------------------------


class Connection:
    """A connection to a server that accepts everything, and never sends anything."""

    async def listen(self, subject):
        """Accept a subscription."""

    async def send(self, subject, payload):
        """Accept a message."""

    async def retain(self, subject, payload, retain):
        return True

    async def read_retained(self, subject, found):
        """Find nothing."""

    async def lost(self):
        await asyncio.Event().wait()

    async def close(self):
        """End."""


class SlowBus(NetworkBus):
    """A bus whose server can be reached only after a while."""

    reachable = False

    async def _connect(self, _arrived):
        if not self.reachable:
            raise ConnectionRefusedError
        return Connection()


def bus_threads(bus):
    return [thread for thread in threading.enumerate() if bus.address in thread.name and thread.is_alive()]


@needs_timers
def test_signals_while_waiting_for_a_bus():
    bus = SlowBus("waited for")
    interrupt_calls(lambda: bus.wait(0), 300, 0.0005)
    bus.reachable = True
    assert in_time(lambda: bus.wait(15))
    assert bus.connected
    bus.close()
    assert not bus_threads(bus)


@needs_timers
def test_signals_in_calls_to_a_bus():
    bus = SlowBus("called")
    bus.reachable = True

    def call():
        bus.publish("a.b", b"x")
        bus.wait(1)
        bus.metrics()

    interrupt_calls(call, 300, 0.0005)
    assert in_time(lambda: (call(), bus.wait(15)))[1]
    until(lambda: not bus.metrics()["queued"], "sending")
    bus.close()
    assert not bus_threads(bus)


@needs_timers
def test_signals_while_closing_a_bus():
    bus = SlowBus("closed")
    interrupt_calls(bus.close, 100, 0.0005)
    in_time(lambda: [bus.close()])
    assert not bus_threads(bus)
