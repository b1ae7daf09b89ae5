"""Event loops that end right after a call, such as one `asyncio.run` for each call: their charges stay."""

import asyncio
import threading

import pytest

from tidegate import AsyncLimiter
from tidegate.testing import ManualClock


class LoopThatEndsBetweenCallbacks(asyncio.SelectorEventLoop):
    """The second callback that another thread schedules finds the loop closed; the first one has run."""

    def __init__(self):
        super().__init__()
        self.closed = threading.Event()
        self.failed = threading.Event()
        self.calls_of_threads = 0

    def call_soon_threadsafe(self, callback, *args, **options):
        if threading.current_thread() is not threading.main_thread():
            self.calls_of_threads += 1
            if self.calls_of_threads == 2:
                self.closed.wait(10)
        try:
            return super().call_soon_threadsafe(callback, *args, **options)
        except RuntimeError:
            self.failed.set()
            raise


def run_in_short_loop(call):
    loop = LoopThatEndsBetweenCallbacks()
    result = loop.run_until_complete(call)
    loop.close()
    loop.closed.set()
    assert loop.failed.wait(10)
    return result


@pytest.fixture
def limiter(tmp_path):
    limiter = AsyncLimiter("2/1m sliding_log", store=f"sqlite:///{tmp_path}/limits.db", clock=ManualClock())
    yield limiter
    asyncio.run(limiter.close())


def test_a_decision_that_was_delivered_is_not_refunded_when_the_loop_ends(limiter):
    decisions = [run_in_short_loop(limiter.try_acquire("ann")) for _ in range(4)]
    assert [bool(decision) for decision in decisions] == [True, True, False, False]
    assert asyncio.run(limiter.usage("ann"))["1m"].used == 2
