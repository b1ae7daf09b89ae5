"""What tests of the swarm share."""

import asyncio
import inspect
import itertools
import threading

import pytest

from tidegate._runtime.clock import SystemClock
from tidegate.bus import open_bus
from tidegate.swarm import AsyncMemoryLimiter, AsyncSwarmLimiter, MemoryLimiter, SwarmLimiter
from tidegate.testing import ManualClock

START = 1_728_000_000
names = itertools.count()


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture
def hub(clock):
    """Opens buses to one hub in this process, and closes them."""
    url, opened = f"local://swarm-{next(names)}", []

    def open_one(clock=clock):
        opened.append(open_bus(url, clock=clock))
        return opened[-1]

    open_one.url = url
    yield open_one
    for bus in opened:
        bus.close()


class WatchedClock(SystemClock):
    """Real time, and the threads that have waited for some of it."""

    def __init__(self):
        self.waiting = set()

    def wait(self, signal, until):
        self.waiting.add(threading.get_ident())
        super().wait(signal, until)


class LimiterKind:
    """Sync or async: its classes, and how to get the result of a call."""

    def __init__(self, memory, swarm, run):
        self.memory = memory
        self.swarm = swarm
        self.run = run


@pytest.fixture(params=["threads", "tasks"])
def face(request):
    if request.param == "threads":
        yield LimiterKind(MemoryLimiter, SwarmLimiter, lambda result: result)
        return

    async def finish(call):
        return await call

    with asyncio.Runner() as runner:
        yield LimiterKind(
            AsyncMemoryLimiter,
            AsyncSwarmLimiter,
            lambda call: runner.run(finish(call)) if inspect.isawaitable(call) else call,
        )
