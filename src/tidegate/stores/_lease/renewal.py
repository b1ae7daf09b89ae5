"""Runs the jobs of a leased store in the background: in a thread, or in a task under asyncio."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import SystemClock, TaskSignal
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.errors import RateLimitError

if TYPE_CHECKING:
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
        self._thread = BackgroundThread(self._run, "leases", clock=store.clock, keeps_owner=True)
        self._signal: TaskSignal | None = None  # wakes the task
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._failing = False

    # ---- threads -----------------------------------------------------------------------------------------------------

    def ensure_running(self) -> None:
        """Make sure that jobs are run."""
        if not self._real_time:
            self.run_jobs()
        elif self._is_needed() and not self._wake_task():
            self._thread.wake()

    def run_jobs(self) -> None:
        """Run all jobs."""
        while (job := self._manager.next_job()) is not None:
            self._run_job(job)

    def _run(self) -> int | None:
        self.run_jobs()
        if not self._goes_on():
            return None
        due = self._manager.next_due()
        return self._store.clock.steady() if due is None else due

    def _run_job(self, job: LeaseFlow) -> None:
        try:
            run(job, self._store.send)
        except RateLimitError as error:
            self._log_failure(error)
        else:
            self._failing = False

    def stop(self) -> None:
        """Stop the thread or task; wait until the thread has ended."""
        self._request_stop()
        self._thread.stop(CLOSE_TIMEOUT)

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def ensure_running_async(self) -> None:
        """Make sure that jobs are run."""
        if self._is_needed():
            self._start_task()

    @locked
    def _start_task(self) -> None:
        """Wake the thread or task, or start a task if there is neither."""
        if self._thread.running:
            self._thread.wake()
        elif not self._wake_task() and not self._stopping:
            self._signal = TaskSignal()
            self._task = asyncio.get_running_loop().create_task(self._run_async(self._signal), name="leases")

    async def run_jobs_async(self) -> None:
        """Run all jobs, many at once."""
        while (job := self._manager.next_job()) is not None:
            jobs = [job]
            while len(jobs) < MAX_CONCURRENT_JOBS and (job := self._manager.next_job()) is not None:
                jobs.append(job)
            await asyncio.gather(*map(self._run_job_async, jobs))

    async def _run_async(self, signal: TaskSignal) -> None:
        try:
            while True:
                signal.clear()
                await self.run_jobs_async()
                if self._end_task():
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
        """Stop the thread or task, and wait until it has ended."""
        self._request_stop()
        task = self._task
        if self._thread.running:
            await asyncio.to_thread(self._thread.stop, CLOSE_TIMEOUT)
        elif task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([task], timeout=CLOSE_TIMEOUT)
        self._thread.stop(0)  # no other one is started

    # ---- both --------------------------------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        return bool(self._manager.jobs) or (
            self._task is None and not self._thread.running and self._real_time and self._manager.next_due() is not None
        )

    @locked
    def _request_stop(self) -> None:
        """Request the end of the task; no other one is started."""
        self._stopping = True
        self._wake_task()

    def _wake_task(self) -> bool:
        """Wake the task; returns whether there is one."""
        task, signal = self._task, self._signal
        if task is None or signal is None or task.done() or task.get_loop().is_closed():
            return False
        signal.set()
        return True

    def _goes_on(self) -> bool:
        """Return whether there are jobs or shares."""
        due = self._manager.next_due()
        return bool(self._manager.jobs) or (self._real_time and not self._stopping and due is not None)

    @locked
    def _end_task(self) -> bool:
        """Make a later call start another task, if there are no jobs and no shares; returns whether it will."""
        if self._goes_on():
            return False
        self._task = self._signal = None
        return True

    def _log_failure(self, error: RateLimitError) -> None:
        """Log the first of a series of failures; later calls raise the error themselves."""
        if not self._failing:
            self._failing = True
            self._store.outage_log.warning("could not renew or return leases: %s", error)
