"""Runs the jobs of a leased store in the background: in a thread, or in a task under asyncio."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import SystemClock, TaskSignal, ThreadSignal
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.errors import RateLimitError

if TYPE_CHECKING:
    from tidegate._runtime.clock import Signal
    from tidegate.stores._lease.steps import LeaseFlow
    from tidegate.stores._lease.store import LeasedStore

MAX_CONCURRENT_JOBS: Final = 64  # jobs that the background task runs at once, at most
CLOSE_TIMEOUT: Final = 5.0  # real seconds that closing waits for running jobs


class BackgroundRenewal:
    """A background thread or task that runs while there are jobs or shares; a call starts it when it is needed.

    At most one runs at a time: a thread if a synchronous call started it, a task if an async call did. With a clock
    other than the SystemClock nothing runs in the background: calls run the jobs themselves.
    """

    def __init__(self, store: LeasedStore) -> None:
        """Serve this store."""
        self._store = store
        self._manager = store.manager
        self._real_time = isinstance(store.clock, SystemClock)
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._signal: Signal | None = None  # wakes the runner
        self._runner: threading.Thread | asyncio.Task[None] | None = None
        self._stopping = False
        self._failing = False

    # ---- threads -----------------------------------------------------------------------------------------------------

    def ensure_running(self) -> None:
        """Make sure that jobs are run."""
        if not self._real_time:
            self.run_jobs()
        elif self._is_needed():
            self._start_thread()

    @locked
    def _start_thread(self) -> None:
        """Wake the runner, or start a thread if there is none."""
        if not self._wake() and not self._stopping:
            self._signal = ThreadSignal()
            self._runner = threading.Thread(target=self._run, args=(self._signal,), name="leases", daemon=True)
            self._runner.start()

    def run_jobs(self) -> None:
        """Run all jobs."""
        while (job := self._manager.next_job()) is not None:
            self._run_job(job)

    def _run(self, signal: Signal) -> None:
        while True:
            signal.clear()
            self.run_jobs()
            if self._stop_if_idle():
                return
            self._store.clock.wait(signal, self._manager.next_due())

    def _run_job(self, job: LeaseFlow) -> None:
        try:
            run(job, self._store.send)
        except RateLimitError as error:
            self._log_failure(error)
        else:
            self._failing = False

    def stop(self) -> None:
        """Stop the runner and wait until it has ended."""
        runner = self._request_stop()
        if isinstance(runner, threading.Thread):
            runner.join(CLOSE_TIMEOUT)

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def ensure_running_async(self) -> None:
        """Make sure that jobs are run."""
        if self._is_needed():
            self._start_task()

    @locked
    def _start_task(self) -> None:
        """Wake the runner, or start a task if there is none."""
        if not self._wake() and not self._stopping:
            self._signal = TaskSignal()
            self._runner = asyncio.get_running_loop().create_task(self._run_async(self._signal), name="leases")

    async def run_jobs_async(self) -> None:
        """Run all jobs, many at once."""
        while (job := self._manager.next_job()) is not None:
            jobs = [job]
            while len(jobs) < MAX_CONCURRENT_JOBS and (job := self._manager.next_job()) is not None:
                jobs.append(job)
            await asyncio.gather(*map(self._run_job_async, jobs))

    async def _run_async(self, signal: Signal) -> None:
        try:
            while True:
                signal.clear()
                await self.run_jobs_async()
                if self._stop_if_idle():
                    return
                await self._store.clock.wait_async(signal, self._manager.next_due())
        except asyncio.CancelledError:  # the loop ends: the last chance to return shares
            self._manager.return_all()
            await self.run_jobs_async()
            raise

    async def _run_job_async(self, job: LeaseFlow) -> None:
        try:
            await run_async(job, self._store.send_async)
        except RateLimitError as error:
            self._log_failure(error)
        else:
            self._failing = False

    async def stop_async(self) -> None:
        """Stop the runner and wait until it has ended."""
        runner = self._request_stop()
        if isinstance(runner, threading.Thread):
            await asyncio.to_thread(runner.join, CLOSE_TIMEOUT)
        elif runner is not None and runner.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([runner], timeout=CLOSE_TIMEOUT)

    # ---- both --------------------------------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        return bool(self._manager.jobs) or (
            self._runner is None and self._real_time and self._manager.next_due() is not None
        )

    @locked
    def _request_stop(self) -> threading.Thread | asyncio.Task[None] | None:
        """Request the end of the runner, and return it."""
        self._stopping = True
        self._wake()
        return self._runner

    def _wake(self) -> bool:
        """Wake the runner; returns whether there is one. Requires the lock."""
        runner = self._runner
        alive = False
        if isinstance(runner, threading.Thread):
            alive = runner.is_alive()
        elif runner is not None:
            alive = not runner.done() and not runner.get_loop().is_closed()
        if alive and self._signal is not None:
            self._signal.set()
        return alive

    @locked
    def _stop_if_idle(self) -> bool:
        """Make the runner end if there are no jobs and no shares; returns whether it does."""
        needed = self._manager.jobs or (self._real_time and not self._stopping and self._manager.next_due() is not None)
        if not needed:
            self._runner = self._signal = None
        return not needed

    def _log_failure(self, error: RateLimitError) -> None:
        """Log the first of a series of failures; later calls raise the error themselves."""
        if not self._failing:
            self._failing = True
            self._store.outage_log.warning("could not renew or return leases: %s", error)
