"""The async form of a store whose `apply` blocks: one thread decides, tasks wait.

Questions that wait when the thread comes to look are decided in one transaction, one after another. A task that is
cancelled before its question is looked at was never charged; one cancelled later, or in the moment between the answer
and its reading, gets its permits given back (see `stores.cancellation`).

A signal handler may raise at any instruction of an event loop's thread, so the lock is one that can be lost
(`tidegate.lock`), and answers are delivered by two callbacks: the second does what the first could not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import SystemClock, yield_thread
from tidegate.core.bounds import SECOND
from tidegate.errors import Closed
from tidegate.lock import Lock, locked
from tidegate.stores.cancellation import CHARGING, DROPPABLE, MAX_CLOSING, corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask

    # The verb, what it is applied to, `now`, `at`, and what a store that keeps more than states adds.
    Asked = tuple[str, Sequence[Ask], int | None, int | None, object]
    Answers = list[Decision] | BaseException

MAX_CALLS_PER_TRANSACTION: Final = (
    64  # questions decided in one transaction at most: others wait for the file meanwhile
)
POLL: Final = 0.001  # seconds between two looks whether the thread has ended, when closing
steady: Final = SystemClock.steady


class QueuedCall:
    """One call of `apply`, and who waits for its answer."""

    __slots__ = ("answers", "asked", "loop", "made", "waiter")

    def __init__(self, asked: Asked) -> None:
        """Ask; nobody waits."""
        self.asked = asked
        self.answers: Answers = []
        self.made = steady()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[list[Decision]] | None = None

    @property
    def dropped(self) -> bool:
        """Whether it need not be asked, since nobody waits any more; what gives back or writes down has to be."""
        if self.waiter is None or not self.waiter.cancelled():
            return False
        return self.asked[0] in DROPPABLE and self.asked[4] is None

    def undoing(self) -> list[QueuedCall]:
        """Word what gives back the permits that nobody learned of, once."""
        verb, asks, now, _, more = self.asked
        answers, self.answers = self.answers, []
        if isinstance(answers, BaseException) or not answers or more is not None:
            return []
        found = corrections(verb, asks, answers, steady() - self.made)
        return [QueuedCall(("adjust", back, now, at, None)) for back, at in found]


class AsyncWorker:
    """A thread that answers questions, started by the first."""

    def __init__(self, answer: Callable[[list[QueuedCall]], None], wake: Callable[[Sequence[Ask]], None]) -> None:
        """Leave lists of questions to `answer`, which sets their `answers` and raises nothing.

        `wake` lets whoever waits for keys ask again.
        """
        self._answer = answer
        self._wake = wake
        self._questions: deque[QueuedCall] = deque()
        self._undelivered: list[list[QueuedCall]] = []  # answered, and on the way to their event loop
        self.lock = Lock()
        self._thread = ThreadPoolExecutor(1, "tidegate-sqlite")
        self._busy = False
        self._closed = False  # to new questions
        self._ended = False

    async def ask(self, question: QueuedCall) -> list[Decision]:
        """Have a question answered."""
        question.loop = asyncio.get_running_loop()
        question.waiter = question.loop.create_future()
        self._enter(question)
        try:
            return await question.waiter
        except asyncio.CancelledError:
            if not question.waiter.cancelled():  # answered in the same moment, but the task will not see it
                question.waiter.exception()
                self._abandon([question])
            raise

    @locked
    def _enter(self, question: QueuedCall) -> None:
        if self._closed:
            raise Closed("the store is closed")
        self._put([question])

    def _put(self, questions: list[QueuedCall]) -> None:
        """Let the thread answer these, if it still does. The lock is ours."""
        if self._ended or not questions:
            return
        self._questions.extend(questions)
        if not self._busy:
            self._thread.submit(self._work)
            self._busy = True  # after it, so that nobody counts on work that an interrupt kept from being submitted

    def _work(self) -> None:
        while some := self._take_some():
            asked = [question for question in some if not question.dropped]
            self._answer(asked)
            loops: dict[Any, list[QueuedCall]] = {}
            for question in asked:
                loops.setdefault(question.loop, []).append(question)
            for question in loops.pop(None, ()):  # what was given back
                if not isinstance(question.answers, BaseException):
                    self._wake(question.asked[1])
            for loop, answered in loops.items():
                self._send(loop, answered)

    @locked
    def _take_some(self) -> list[QueuedCall]:
        some = [self._questions.popleft() for _ in range(min(MAX_CALLS_PER_TRANSACTION, len(self._questions)))]
        self._busy = bool(some)
        return some

    def _send(self, loop: asyncio.AbstractEventLoop, questions: list[QueuedCall]) -> None:
        """Hand answers over to the event loop that waits for them."""
        self._add_undelivered(questions)
        try:
            loop.call_soon_threadsafe(self._deliver, questions)
            loop.call_soon_threadsafe(self._deliver, questions)  # if a signal handler raises in the first
        except RuntimeError:  # the loop is closed: nobody will learn of it
            self._delivered(questions)
            self._abandon(questions)

    @locked
    def _add_undelivered(self, questions: list[QueuedCall]) -> None:
        self._undelivered.append(questions)

    def _deliver(self, questions: list[QueuedCall]) -> None:
        """Hand the answers over, in the event loop; those that nobody waits for any more are undone."""
        if not any(others is questions for others in self._undelivered):
            return
        for question in questions:
            waiter, answers = question.waiter, question.answers
            if waiter is None or waiter.cancelled():
                self._abandon([question])
            elif waiter.done():
                continue  # handed over before a signal handler raised
            elif isinstance(answers, BaseException):
                waiter.set_exception(answers)
            else:
                waiter.set_result(answers)
        self._delivered(questions)

    @locked
    def _delivered(self, questions: list[QueuedCall]) -> None:
        self._undelivered = [others for others in self._undelivered if others is not questions]

    def _abandon(self, questions: list[QueuedCall]) -> None:
        """Undo charges that nobody learned of; other changes stand, and may have made permits free."""
        for question in questions:
            if question.asked[0] in CHARGING:
                self._undo(question)
            elif question.asked[0] != "peek" and not isinstance(question.answers, BaseException):
                self._wake(question.asked[1])

    @locked
    def _undo(self, question: QueuedCall) -> None:
        self._put(question.undoing())

    def close(self) -> None:
        """Answer what was asked, give back what was cancelled meanwhile, then end."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        self._closed = True
        for questions in list(self._undelivered):
            loop = questions[0].loop
            if loop is None or loop.is_closed():
                self._delivered(questions)
                self._abandon(questions)
            elif loop is here:  # which stands still while this waits
                self._abandon([question for question in questions if question.waiter and question.waiter.cancelled()])
        deadline = steady() + round(MAX_CLOSING * SECOND)
        while not self._is_done(here) and steady() < deadline:
            yield_thread(POLL)
        self._ended = True
        self._thread.shutdown(wait=True)

    def _is_done(self, here: asyncio.AbstractEventLoop | None) -> bool:
        return not self._busy and all(questions[0].loop is here for questions in self._undelivered)
