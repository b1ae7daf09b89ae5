"""A signal handler that calls a store in the middle of a call of its thread gets an error; nobody waits for ever."""

import os
import signal
import sys
import threading

import pytest

from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tidegate import Limiter


def functions_of(thread):
    """The functions that a thread is in."""
    names, frame = set(), sys._current_frames().get(thread.ident)  # noqa: SLF001 - there is no other way
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.parametrize("others", [0, 1], ids=["while its batch is sent", "while it waits to send"])
def test_a_handler_that_calls_the_store_gets_an_error_and_the_call_its_answer(others):
    found = []

    def handler(*_):
        try:
            limiter.try_acquire("handler")
        except RuntimeError as error:
            found.append(str(error))

    with ValkeyServer() as server, Limiter("1000000/1m", store=f"{server.url}?timeout=10&deadline=10s") as limiter:
        limiter.try_acquire("k")
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            server.ask("CLIENT", "PAUSE", "1500", "ALL")
            threads = [threading.Thread(target=limiter.try_acquire, args=("other",)) for _ in range(others)]
            for thread in threads:
                thread.start()
                until(lambda thread=thread: "_send" in functions_of(thread), "the other call is sent")
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            assert limiter.try_acquire("k").allowed
            timer.join()
            for thread in threads:
                thread.join(20)
            assert not any(thread.is_alive() for thread in threads)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert found == ["a signal handler or finalizer called a store in the middle of a call of the same thread"]
