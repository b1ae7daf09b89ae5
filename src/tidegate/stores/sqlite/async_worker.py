"""The async form of a store whose `apply` blocks: a thread decides, and tasks await the decisions.

The thread decides all queued calls in one transaction, one after another. A call whose task is cancelled before the
thread takes it from the queue is not charged; if the task is cancelled later, or before it reads the decision, the
charge is given back (see `stores.cancellation`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import SystemClock
from tidegate.errors import Closed
from tidegate.stores.cancellation import CHARGING, DROPPABLE, MAX_CLOSING, corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask

    # The verb, the asks, `now`, `at`, and an extra argument of a store that stores more than states.
    StoreCall = tuple[str, Sequence[Ask], int | None, int | None, object]
    Answers = list[Decision] | BaseException

MAX_CALLS_PER_TRANSACTION: Final = 64  # other processes wait for the file meanwhile
steady: Final = SystemClock.steady


class QueuedCall:
    """A call of `apply`, and the future that waits for its decisions."""

    __slots__ = ("answers", "asked", "loop", "made", "waiter")

    def __init__(self, asked: StoreCall) -> None:
        """Queue a call that no task waits for."""
        self.asked = asked
        self.answers: Answers = []
        self.made = steady()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[list[Decision]] | None = None

    @property
    def dropped(self) -> bool:
        """Whether it can be skipped, since its task was cancelled; corrections and other writes cannot."""
        if self.waiter is None or not self.waiter.cancelled():
            return False
        return self.asked[0] in DROPPABLE and self.asked[4] is None

    def undoing(self) -> list[QueuedCall]:
        """Return the calls that give back the charge of this one; none the second time."""
        verb, asks, now, _, more = self.asked
        answers, self.answers = self.answers, []
        if isinstance(answers, BaseException) or more is not None:
            return []
        found = corrections(verb, asks, answers, steady() - self.made)
        return [QueuedCall(("adjust", back, now, at, None)) for back, at in found]


class AsyncWorker:
    """A thread that applies queued calls; the first call starts it."""

    def __init__(self, answer: Callable[[list[QueuedCall]], None], wake: Callable[[Sequence[Ask]], None]) -> None:
        """Pass lists of calls to `answer`, which sets their `answers` and does not raise.

        `wake` lets callers that wait for permits of keys try again.
        """
        self._answer = answer
        self._wake = wake
        self._questions: deque[QueuedCall] = deque()
        self._undelivered: list[list[QueuedCall]] = []  # decided, but not yet delivered in their event loop
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "tidegate-sqlite")
        self._busy = False
        self._closed = False  # to new calls
        self._ended = False

    async def ask(self, question: QueuedCall) -> list[Decision]:
        """Queue a call and await its decisions."""
        question.loop = asyncio.get_running_loop()
        question.waiter = question.loop.create_future()
        with self._changed:
            if self._closed:
                raise Closed("the store is closed")
            self._put([question])
        try:
            return await question.waiter
        except asyncio.CancelledError:
            if not question.waiter.cancelled():  # decided at the same moment, but the task will not read it
                question.waiter.exception()
                self._abandon([question])
            raise

    def _put(self, questions: list[QueuedCall]) -> None:
        """Queue calls for the thread, unless it has ended. Requires the lock."""
        if self._ended or not questions:
            return
        self._questions.extend(questions)
        if not self._busy:
            self._thread.submit(self._work)
            self._busy = True  # set last, in case an interrupt prevents the submission

    def _work(self) -> None:
        while True:
            with self._changed:
                some = [self._questions.popleft() for _ in range(min(MAX_CALLS_PER_TRANSACTION, len(self._questions)))]
                self._busy = bool(some)
                self._changed.notify_all()
            if not some:
                return
            asked = [question for question in some if not question.dropped]
            self._answer(asked)
            loops: dict[Any, list[QueuedCall]] = {}
            for question in asked:
                loops.setdefault(question.loop, []).append(question)
            for question in loops.pop(None, ()):  # corrections
                if not isinstance(question.answers, BaseException):
                    self._wake(question.asked[1])
            for loop, answered in loops.items():
                self._send(loop, answered)

    def _send(self, loop: asyncio.AbstractEventLoop, questions: list[QueuedCall]) -> None:
        """Pass decisions to the event loop that waits for them."""
        with self._changed:
            self._undelivered.append(questions)
        try:
            loop.call_soon_threadsafe(self._deliver, questions)
        except RuntimeError:  # the loop is closed
            self._delivered(questions)
            self._abandon(questions)

    def _deliver(self, questions: list[QueuedCall]) -> None:
        """Set the results of the futures, in the event loop; calls whose task was cancelled are undone."""
        for question in questions:
            waiter, answers = question.waiter, question.answers
            if waiter is None or waiter.done():
                self._abandon([question])
            elif isinstance(answers, BaseException):
                waiter.set_exception(answers)
            else:
                waiter.set_result(answers)
        self._delivered(questions)

    def _delivered(self, questions: list[QueuedCall]) -> None:
        with self._changed:
            self._undelivered = [others for others in self._undelivered if others is not questions]
            self._changed.notify_all()

    def _abandon(self, questions: list[QueuedCall]) -> None:
        """Give back charges that no task has read; other changes stay, and may have made permits available."""
        for question in questions:
            if question.asked[0] in CHARGING:
                with self._changed:
                    self._put(question.undoing())
            elif question.asked[0] != "peek" and not isinstance(question.answers, BaseException):
                self._wake(question.asked[1])

    def close(self) -> None:
        """Complete queued calls, give back the charges of cancelled ones, then end the thread."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        with self._changed:
            self._closed = True
            undelivered = list(self._undelivered)
        for questions in undelivered:
            loop = questions[0].loop
            if loop is None or loop.is_closed():
                self._delivered(questions)
                self._abandon(questions)
            elif loop is here:  # blocked while this method waits
                self._abandon([question for question in questions if question.waiter and question.waiter.cancelled()])
        with self._changed:
            self._changed.wait_for(lambda: self._is_done(here), MAX_CLOSING)
            self._ended = True
        self._thread.shutdown(wait=True)

    def _is_done(self, here: asyncio.AbstractEventLoop | None) -> bool:
        return not self._busy and all(questions[0].loop is here for questions in self._undelivered)
