"""The only module that reads a clock or sleeps.

Everywhere else, time is an argument. A Clock returns the time in nanoseconds since 1970 (`ns`), which the engine
truncates to microseconds. A thread or a task can wait for a Signal until an instant of the clock's monotonic time
(`steady`, in microseconds).
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from contextlib import contextmanager, suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, cast

from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

STORE_THREAD = "tidegate-store"  # name of the threads that make calls of stores for others, and outlive the store
IDLE_GRACE = 0.5  # real seconds without activity after which a wait on a ManualClock advances the clock itself
yield_thread: Callable[[float], None] = time.sleep  # yield_thread(0) lets another thread run


def is_only_caller() -> bool:
    """Return whether no other thread could advance a ManualClock or set a signal."""
    return sum(thread.name != STORE_THREAD for thread in threading.enumerate()) == 1


class Signal(Protocol):
    """An event that any thread may set and that one thread or task waits for."""

    def set(self) -> None:
        """Wake the waiter, now or when it starts to wait."""

    def clear(self) -> None:
        """Undo an earlier `set`."""

    def is_set(self) -> bool:
        """Return whether it was set since it was last cleared."""

    def wait(self, seconds: float | None, /) -> object:  # a boolean for threads, a coroutine for tasks
        """Wait until set, or for this many real seconds."""


class ThreadSignal:
    """A Signal for a thread. An exception that a signal handler raises in any of its methods leaves it usable.

    That is not true of `threading.Event`: its lock may stay locked, and the next `set` would wait forever. Here, each
    step is one call of a SimpleQueue, which is implemented in C. The signal is set while the queue has an item.
    """

    def __init__(self) -> None:
        """Create a signal that is not set."""
        self._items: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Wake the thread, from any thread."""
        if self._items.empty():
            self._items.put(None)

    def clear(self) -> None:
        """Undo an earlier `set`."""
        with suppress(Empty):
            while True:
                self._items.get_nowait()

    def is_set(self) -> bool:
        """Return whether it was set since it was last cleared."""
        return not self._items.empty()

    def wait(self, seconds: float | None = None, /) -> bool:
        """Wait until set, or for this many real seconds; return whether it is set."""
        try:
            self._items.get(timeout=None if seconds is None else max(0.0, seconds))
        except Empty:
            return False
        self._items.put(None)  # it stays set until it is cleared
        return True


class TaskSignal:
    """A Signal for a task of the running event loop."""

    def __init__(self) -> None:
        """Create a signal for the running loop."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._set = False

    def set(self) -> None:
        """Wake the task, from any thread."""
        self._set = True
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_event)

    def _set_event(self) -> None:
        if self._set:  # not cleared meanwhile
            self._event.set()

    def clear(self) -> None:
        """Undo an earlier `set`."""
        self._set = False
        self._event.clear()

    def is_set(self) -> bool:
        """Return whether it was set since it was last cleared."""
        return self._set

    async def wait(self, seconds: float | None) -> None:
        """Wait until set, or for this many real seconds."""
        if seconds is None:
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            pass


class Clock(Protocol):
    """Returns the time, and waits."""

    def ns(self) -> int:
        """Nanoseconds since 1970."""

    def steady(self) -> int:
        """Microseconds of a monotonic time."""

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or steady time reaches `until`."""

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or steady time reaches `until`."""


class SystemClock:
    """The clock of the system."""

    ns: staticmethod[[], int] = staticmethod(time.time_ns)

    @staticmethod
    def steady() -> int:
        """Microseconds of the monotonic clock of the system."""
        return time.monotonic_ns() // 1000

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or steady time reaches `until`."""
        signal.wait(self._seconds(until))

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or steady time reaches `until`."""
        await cast("Awaitable[None]", signal.wait(self._seconds(until)))

    def _seconds(self, until: int | None) -> float | None:
        # Rounded up: a wake-up that is too early would only cost a second call to the store.
        return None if until is None else max(0, until - self.steady() + 1) / 1_000_000


class ManualClock:
    """A clock for tests: time passes only when `advance` is called, so waiting takes no real time.

    A wait ends when `advance` reaches its instant, in the order of instants. If the waiter is the only thread or task,
    the wait advances the clock itself at once. It also does so if nothing happens for half a second (the clock does not
    move, and no wait begins or ends). So `limiter.acquire(...)` on a ManualClock never hangs a test, and a test with
    several threads or tasks controls when time passes.
    """

    def __init__(self, start: float = 0.0) -> None:
        """Start at this many seconds since 1970."""
        self._now = round(start * 1_000_000)
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._alarms: list[tuple[int, int, Signal]] = []
        self._order = count()
        self._waiting: set[int] = set()  # numbers of the alarms that are still needed; others are dropped when due
        self._moves = 0  # activity: moves of the clock, and waits begun and ended
        self._self_driven = False  # not advanced for a while: waits move the clock until `advance` is called

    def ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._now * 1000

    def steady(self) -> int:
        """Microseconds since 1970."""
        return self._now

    def now(self) -> float:
        """Seconds since 1970."""
        return self._now / 1_000_000

    def advance(self, seconds: float) -> None:
        """Advance the time (or step back, if negative) and end the waits that are due."""
        for signal in self._advance(round(seconds * 1_000_000)):
            signal.set()

    @locked
    def _advance(self, microseconds: int) -> list[Signal]:
        """Advance the time, and return the signals that are due."""
        self._moves += 1
        self._self_driven = False
        return self._move(self._now + microseconds)

    def _move(self, to: int) -> list[Signal]:
        """Set the time, and return the signals that are due. The caller holds the lock."""
        self._now = to
        due = []
        while (alarm := self._next_alarm()) is not None and alarm[0] <= self._now:
            self._waiting.discard(alarm[1])
            due.append(alarm[2])
        return due

    def _next_alarm(self) -> tuple[int, int, Signal] | None:
        while self._alarms and self._alarms[0][1] not in self._waiting:
            heapq.heappop(self._alarms)
        return self._alarms[0] if self._alarms else None

    def _jump(self, moves: int) -> None:
        """Move to the instant of the next alarm, unless the clock was moved meanwhile."""
        for signal in self._advance_to_alarm(moves):
            signal.set()

    @locked
    def _advance_to_alarm(self, moves: int) -> list[Signal]:
        alarm = self._next_alarm() if self._moves == moves else None
        if alarm is None:
            return []
        self._moves += 1
        self._self_driven = True
        return self._move(max(alarm[0], self._now))

    @contextmanager
    def _alarm(self, signal: Signal, until: int | None) -> Iterator[None]:
        number = next(self._order)
        self._moves += 1
        if until is not None:
            self._set_alarm(until, number, signal)
        try:
            yield
        finally:
            self._moves += 1
            self._waiting.discard(number)

    @locked
    def _set_alarm(self, until: int, number: int, signal: Signal) -> None:
        self._waiting.add(number)
        heapq.heappush(self._alarms, (until, number, signal))

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or the clock reaches `until`."""
        if until is not None and until <= self._now:
            return
        with self._alarm(signal, until):
            while not signal.is_set() and (until is None or self._now < until):
                moves = self._moves
                timeout = 0.001 if self._self_driven else IDLE_GRACE
                if (until is not None and is_only_caller()) or not signal.wait(timeout):
                    self._jump(moves)

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or the clock reaches `until`."""
        if until is not None and until <= self._now:
            return
        with self._alarm(signal, until):
            while not signal.is_set() and (until is None or self._now < until):
                moves = self._moves
                if len(asyncio.all_tasks()) == 1 and until is not None:
                    self._jump(moves)
                    break
                await cast("Awaitable[None]", signal.wait(0.001 if self._self_driven else IDLE_GRACE))
                if not signal.is_set():
                    self._jump(moves)
