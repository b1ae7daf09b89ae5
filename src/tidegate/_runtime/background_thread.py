"""BackgroundThread: the one kind of thread that works for an object while its callers go on."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakMethod, ref

from tidegate._runtime.clock import Clock, SystemClock, ThreadSignal
from tidegate._runtime.fork import at_fork
from tidegate.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable

log: logging.Logger = logging.getLogger("tidegate")

RETRY_AFTER: Final = 1_000_000  # microseconds, after a job that raised


class BackgroundThread:
    """Runs a job, a method of its owner, whenever it is due.

    The job returns when it runs next, in the clock's steady time, or None if there is nothing to do: then the thread
    ends, and the next `start` or `wake` starts another one. An exception is logged, and the job runs again after a
    second. The thread ends with its owner, unless it `keeps_owner` alive while it runs. It is a daemon: it does not
    keep the process running. A forked process starts without the thread.
    """

    def __init__(
        self,
        job: Callable[[], int | None],
        name: str,
        *,
        delay: float = 0.0,
        clock: Clock | None = None,
        keeps_owner: bool = False,
    ) -> None:
        """Run this method; the first time `delay` seconds after `start`."""
        self._job: Callable[[], Callable[[], int | None] | None] = (lambda: job) if keeps_owner else WeakMethod(job)
        self._name = name
        self._delay = round(delay * 1_000_000)
        self._clock = clock or SystemClock()
        self._stopped = False
        self._reset()
        at_fork(child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        signal = self._signal = ThreadSignal()  # set: the job runs now
        job = self._job()
        self._owner = None if job is None else ref(job.__self__, lambda _: signal.set())  # type: ignore[attr-defined]  # a method
        self._needed = False  # whether `start` was called since the job last began
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether there is a thread. An exception of a signal handler can prevent the start of a new one."""
        thread = self._thread
        return thread is not None and thread.ident is not None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        self._needed = True  # before the check, see `_may_end`
        if not self.running:
            with self._lock:
                if not self.running and not self._stopped:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()

    def wake(self) -> None:
        """Run the job now."""
        self._signal.set()
        self.start()

    def stop(self, timeout: float | None = None) -> None:
        """Run the job once more if the thread runs, and end it; waits at most `timeout` seconds (None: no limit).

        While the job returns an instant that has passed, it runs again. After `stop`, no thread is started.
        """
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._signal.set()
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        signal, due = self._signal, self._clock.steady() + self._delay
        while self._thread is threading.current_thread():
            self._clock.wait(signal, due)
            signal.clear()
            self._needed = False
            job = self._job()
            if job is None:
                return
            following = self._perform(job)
            del job  # else the owner could not be freed while the thread waits
            now = self._clock.steady()
            if following is None or (self._stopped and following > now):
                if self._may_end():
                    return
                following = now + self._delay
            due = following

    def _perform(self, job: Callable[[], int | None]) -> int | None:
        try:
            return job()
        except Closed:
            return None
        except Exception:
            log.exception("%s failed; it runs again in 1 s", self._name)
            return self._clock.steady() + RETRY_AFTER

    def _may_end(self) -> bool:
        """Make a later `start` start another thread; returns false if it was called since the job began."""
        with self._lock:
            thread, self._thread = self._thread, None  # before the check: `start` takes the opposite order
            if self._needed and not self._stopped:
                self._thread = thread
        return self._thread is None
