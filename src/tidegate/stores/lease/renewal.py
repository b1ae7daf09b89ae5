"""Does the chores of a leased store, so that no call waits for them: a thread, or under asyncio a task."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

from tidegate.clock import SystemClock, TaskSignal, ThreadSignal
from tidegate.errors import RateLimitError
from tidegate.lock import Lock, locked

if TYPE_CHECKING:
    from tidegate.clock import Signal
    from tidegate.stores.lease.manager import Steps
    from tidegate.stores.lease.store import LeasedStore

log = logging.getLogger(__name__)

MAX_CONCURRENT_JOBS: Final = 64  # how many chores a task has under way at once
CLOSE_TIMEOUT: Final = 5.0  # real seconds for which closing waits for a chore under way


class BackgroundRenewal:
    """Runs while there is anything to look after, and is started again by the call that needs it.

    There is one at a time, of the kind that the call was. A clock that is not the machine's stands still while nobody
    moves it, so nothing waits for it here: calls do the chores themselves, then.
    """

    def __init__(self, store: LeasedStore) -> None:
        """Look after this store."""
        self._store = store
        self._desk = store.desk
        self._timed = isinstance(store.clock, SystemClock)
        self.lock = Lock()
        self._signal: Signal | None = None  # of whoever runs
        self._runs: threading.Thread | asyncio.Task[None] | None = None
        self._ending = False
        self._failing = False

    # ---- threads -----------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """See that what there is to do gets done."""
        if not self._timed:
            self.work()
        elif self._needed():
            self._start_thread()

    @locked
    def _start_thread(self) -> None:
        """Start the thread that is needed, unless one runs already, and was woken."""
        if not self._wake() and not self._ending:
            self._signal = ThreadSignal()
            self._runs = threading.Thread(target=self._run, args=(self._signal,), name="leases", daemon=True)
            self._runs.start()

    def work(self) -> None:
        """Do all chores there are."""
        while (chore := self._desk.chore()) is not None:
            self._attempt(chore)

    def _run(self, signal: Signal) -> None:
        while True:
            signal.clear()
            self.work()
            if self._leave():
                return
            self._store.clock.wait(signal, self._desk.due())

    def _attempt(self, chore: Steps) -> None:
        try:
            self._store.drive(chore)
        except RateLimitError as error:
            self._complain(error)
        else:
            self._failing = False

    def end(self) -> None:
        """Run no more."""
        runs = self._end()
        if isinstance(runs, threading.Thread):
            runs.join(CLOSE_TIMEOUT)

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def tend_async(self) -> None:
        """See that what there is to do gets done."""
        if self._needed():
            self._start_task()

    @locked
    def _start_task(self) -> None:
        """Start the task that is needed, unless one runs already, and was woken."""
        if not self._wake() and not self._ending:
            self._signal = TaskSignal()
            self._runs = asyncio.get_running_loop().create_task(self._run_async(self._signal), name="leases")

    async def work_async(self) -> None:
        """Do all chores there are, many at once."""
        while (chore := self._desk.chore()) is not None:
            chores = [chore]
            while len(chores) < MAX_CONCURRENT_JOBS and (chore := self._desk.chore()) is not None:
                chores.append(chore)
            await asyncio.gather(*map(self._attempt_async, chores))

    async def _run_async(self, signal: Signal) -> None:
        try:
            while True:
                signal.clear()
                await self.work_async()
                if self._leave():
                    return
                await self._store.clock.wait_async(signal, self._desk.due())
        except asyncio.CancelledError:  # the loop ends: this is the last chance to return what is held
            self._desk.return_all()
            await self.work_async()
            raise

    async def _attempt_async(self, chore: Steps) -> None:
        try:
            await self._store.drive_async(chore)
        except RateLimitError as error:
            self._complain(error)
        else:
            self._failing = False

    async def end_async(self) -> None:
        """Run no more."""
        runs = self._end()
        if isinstance(runs, threading.Thread):
            await asyncio.to_thread(runs.join, CLOSE_TIMEOUT)
        elif runs is not None and runs.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([runs], timeout=CLOSE_TIMEOUT)

    # ---- both --------------------------------------------------------------------------------------------------------

    def _needed(self) -> bool:
        return bool(self._desk.chores) or (self._runs is None and self._timed and self._desk.due() is not None)

    @locked
    def _end(self) -> threading.Thread | asyncio.Task[None] | None:
        """Have whoever runs end; tell who that is."""
        self._ending = True
        self._wake()
        return self._runs

    def _wake(self) -> bool:
        """Wake whoever runs; tell whether anybody does. The lock is ours."""
        runs = self._runs
        alive = False
        if isinstance(runs, threading.Thread):
            alive = runs.is_alive()
        elif runs is not None:
            alive = not runs.done() and not runs.get_loop().is_closed()
        if alive and self._signal is not None:
            self._signal.set()
        return alive

    @locked
    def _leave(self) -> bool:
        """Leave if there is nothing to look after."""
        stay = self._desk.chores or (self._timed and not self._ending and self._desk.due() is not None)
        if not stay:
            self._runs = self._signal = None
        return not stay

    def _complain(self, error: RateLimitError) -> None:
        """Say once that the store cannot be asked; the calls that follow will meet the same and say more."""
        if not self._failing:
            self._failing = True
            log.warning("leases cannot be renewed or returned: %s", error)
