"""The only place that reads a clock or sleeps.

Time is an argument everywhere else. A Clock tells it in nanoseconds since 1970 (`ns`), which the engine cuts down to
whole microseconds, and lets a thread or a task wait for a Signal until some instant of its own steady time (`steady`,
microseconds, never stepping back).
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from tidegate.lock import Lock, locked

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE_GRACE = 0.5  # real seconds without any sign of life after which a wait on a ManualClock moves the clock itself
yield_thread = time.sleep  # yield_thread(0) lets another thread run


class Signal(Protocol):
    """Something to wait for: set once from any thread, seen by the one thread or task that waits."""

    def set(self) -> None:
        """Wake the waiter, now or when it comes to wait."""

    def clear(self) -> None:
        """Forget an earlier set."""

    def is_set(self) -> bool:
        """Tell whether it was set since it was last cleared."""

    def wait(self, seconds: float | None) -> Any:  # noqa: ANN401 - a flag for threads, a coroutine for tasks
        """Wait until set, or until so many real seconds have passed."""


ThreadSignal = threading.Event


class TaskSignal:
    """A Signal for a task of the running event loop."""

    def __init__(self) -> None:
        """Belong to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._flag = False

    def set(self) -> None:
        """Wake the task, from whatever thread."""
        self._flag = True
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        if self._flag:  # not cleared meanwhile
            self._event.set()

    def clear(self) -> None:
        """Forget an earlier set."""
        self._flag = False
        self._event.clear()

    def is_set(self) -> bool:
        """Tell whether it was set since it was last cleared."""
        return self._flag

    async def wait(self, seconds: float | None) -> None:
        """Wait until set, or until so many real seconds have passed."""
        if seconds is None:
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            pass


class Clock(Protocol):
    """Tells the time and waits."""

    def ns(self) -> int:
        """Nanoseconds since 1970."""

    def steady(self) -> int:
        """Microseconds of a time that never steps back."""

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or steady time reaches `until`."""

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or steady time reaches `until`."""


class SystemClock:
    """The machine's clock."""

    ns = staticmethod(time.time_ns)

    @staticmethod
    def steady() -> int:
        """Microseconds of the machine's monotonic clock."""
        return time.monotonic_ns() // 1000

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or steady time reaches `until`."""
        signal.wait(self._seconds(until))

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or steady time reaches `until`."""
        await signal.wait(self._seconds(until))

    def _seconds(self, until: int | None) -> float | None:
        # Rounded up to the next millisecond at most: waking early would only mean asking twice.
        return None if until is None else max(0, until - self.steady() + 1) / 1_000_000


class ManualClock:
    """A clock for tests: it stands still until `advance` moves it, so that waiting needs no real time.

    A wait on it ends when `advance` reaches its instant, in order of instants. Where nobody can move the clock, because
    the waiter is the only thread or task there is, the wait moves it itself, at once; likewise where nothing happens
    for half a second (nobody moves the clock, no wait begins or ends). So `limiter.acquire(...)` on a ManualClock never
    hangs a test, and a test with several threads or tasks decides itself when time passes.
    """

    def __init__(self, start: float = 0.0) -> None:
        """Start at so many seconds since 1970."""
        self._now = round(start * 1_000_000)
        self.lock = Lock()
        self._alarms: list[tuple[int, int, Signal]] = []
        self._order = count()
        self._waiting: set[int] = set()  # the alarms that still matter; others are dropped when they come up
        self._moves = 0  # signs of life: moves of the clock, and waits begun and ended
        self._alone = False  # nobody moved it for a while; waits move it themselves until someone does

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
        """Let time pass (or, with a negative number, step back) and wake who waited for it."""
        for signal in self._pass(round(seconds * 1_000_000)):
            signal.set()

    @locked
    def _pass(self, microseconds: int) -> list[Signal]:
        """Let time pass, and tell whose instant has come."""
        self._moves += 1
        self._alone = False
        return self._move(self._now + microseconds)

    def _move(self, to: int) -> list[Signal]:
        """Set the time, and tell whose instant has come. The lock is ours."""
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
        """Move to the next instant anybody waits for, unless someone else moved the clock meanwhile."""
        for signal in self._pass_until_alarm(moves):
            signal.set()

    @locked
    def _pass_until_alarm(self, moves: int) -> list[Signal]:
        alarm = self._next_alarm() if self._moves == moves else None
        if alarm is None:
            return []
        self._moves += 1
        self._alone = True
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
                patience = 0.001 if self._alone else IDLE_GRACE
                if (until is not None and threading.active_count() == 1) or not signal.wait(patience):
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
                await signal.wait(0.001 if self._alone else IDLE_GRACE)
                if not signal.is_set():
                    self._jump(moves)
