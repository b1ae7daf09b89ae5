"""Whether an agent has read the state of its bus: the reductions that other agents announced before it joined."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import SystemClock, TaskSignal, ThreadSignal
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate._runtime.clock import Signal

SYNC_TIMEOUT: Final = 5.0  # seconds for which `acquire` waits for the state of the bus, by default
log: logging.Logger = logging.getLogger("tidegate.swarm")


class BusSync:
    """Threads and tasks wait here until the state of the bus was read. Waits are in real time, as those of the bus.

    `over` is True once there is nothing to wait for: the state was read, the timeout passed, or the limiter was closed.
    """

    def __init__(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds from now; None: there is no bus."""
        self._clock = SystemClock()
        self.timeout: float = timeout or 0.0
        self._until = self._clock.steady() + round(self.timeout * SECOND)
        self.synced: bool = timeout is None
        self.over: bool = timeout is None
        self._closed = False
        self._waiting: set[Signal] = set()

    def finish(self) -> None:
        """Report that the state of the bus was read."""
        self.synced = self.over = True
        self._wake()

    def close(self) -> None:
        """Wake all waiters, because the limiter is closed."""
        self._closed = self.over = True
        self._wake()

    def _wake(self) -> None:
        for signal in tuple(self._waiting):
            signal.set()

    def wait(self, seconds: float | None) -> bool:
        """Block this thread until the state was read, at most `seconds`; returns whether it was."""
        with self._waiter(ThreadSignal()) as signal:
            if not self.synced and not self._closed:
                self._clock.wait(signal, self._deadline(seconds))
        return self.synced

    async def wait_async(self, seconds: float | None) -> bool:
        """Suspend this task until the state was read, at most `seconds`; returns whether it was."""
        with self._waiter(TaskSignal()) as signal:
            if not self.synced and not self._closed:
                await self._clock.wait_async(signal, self._deadline(seconds))
        return self.synced

    @contextmanager
    def _waiter(self, signal: Signal) -> Iterator[Signal]:
        self._waiting.add(signal)  # before the check of `synced`: `finish` takes the opposite order
        try:
            yield signal
        finally:
            self._waiting.discard(signal)

    def _deadline(self, seconds: float | None) -> int | None:
        return None if seconds is None else self._clock.steady() + round(seconds * SECOND)

    def started(self) -> int:
        """Return the instant at which a wait begins, for `left_of`."""
        return self._clock.steady()

    def bounded(self, timeout: float | None) -> float:
        """Return for how many seconds a call with this timeout waits for the state of the bus."""
        left = max(0, self._until - self._clock.steady()) / SECOND
        return left if timeout is None else max(0.0, min(left, timeout))

    def left_of(self, timeout: float | None, started: int) -> float | None:
        """Return what is left of a call's timeout after waiting; the first wait that ends in vain is logged."""
        if not self.over and self._clock.steady() >= self._until:
            self.over = True
            log.warning(
                "the bus did not send its state within %g s: this agent starts with its full capacity", self.timeout
            )
        return None if timeout is None else max(0.0, timeout - (self._clock.steady() - started) / SECOND)
