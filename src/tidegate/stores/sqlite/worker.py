"""The async form of a store whose `apply` blocks: one thread decides, tasks wait.

Questions that wait when the thread comes to look are decided in one transaction, one after another. A task that is
cancelled before its question is looked at was never charged; one cancelled later gets its permits given back. What
gives back is not dropped with its task.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask

    # The verb, what it is applied to, `now`, `at`, and what a store that keeps more than states adds.
    Asked = tuple[str, Sequence[Ask], int | None, int | None, object]
    Answers = list[Decision] | BaseException

TOGETHER: Final = 64  # questions decided in one transaction at most: others wait for the file meanwhile


class Question:
    """One call of `apply`, and who waits for its answer."""

    __slots__ = ("answers", "asked", "loop", "waiter")

    def __init__(self, asked: Asked) -> None:
        """Ask; nobody waits."""
        self.asked = asked
        self.answers: Answers = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[list[Decision]] | None = None

    @property
    def takes(self) -> bool:
        """Whether it takes permits and does nothing else, so that who does not wait for them does not want them."""
        return self.asked[0] in ("acquire", "hold") and self.asked[4] is None

    @property
    def dropped(self) -> bool:
        """Whether it need not be asked, since nobody waits any more; what gives back or writes down has to be."""
        return self.waiter is not None and self.waiter.cancelled() and (self.takes or self.asked[0] == "peek")

    def undoing(self) -> list[Question]:
        """Word what gives back the permits that nobody learned of."""
        verb, asks, *_ = self.asked
        if not self.takes or isinstance(self.answers, BaseException) or not self.answers[0]:
            return []
        at = self.answers[0].at
        # Which of its charges a bucket corrects is only known where it was marked; else the latest is, just made.
        marked = [undo(ask, buckets=False) for ask in asks]
        latest = [undo(ask, buckets=True) for ask in asks]
        if verb == "hold":
            back = [(policy, key, tuple(-c for c in costs)) for policy, key, costs in asks]
            return [Question(("adjust", back, None, at, None))]
        return [Question(("adjust", marked, None, at, None)), Question(("adjust", latest, None, None, None))]


def undo(ask: Ask, *, buckets: bool) -> Ask:
    """Word the opposite of a charge, for buckets or for all others."""
    policy, key, costs = ask
    pairs = zip(policy.limits, costs, strict=True)
    return policy, key, tuple(-c if (limit.algorithm == "token_bucket") is buckets else 0 for limit, c in pairs)


class Worker:
    """A thread that answers questions, started by the first."""

    def __init__(self, answer: Callable[[list[Question]], None]) -> None:
        """Leave lists of questions to `answer`, which sets their `answers` and raises nothing."""
        self._answer = answer
        self._questions: deque[Question] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "tidegate-sqlite")
        self._busy = False
        self._closed = False

    async def ask(self, question: Question) -> list[Decision]:
        """Have a question answered."""
        question.loop = asyncio.get_running_loop()
        question.waiter = question.loop.create_future()
        self._put([question])
        try:
            return await question.waiter
        except asyncio.CancelledError:
            if not question.dropped:  # answered in the same moment, but the task will not see it
                self._put(question.undoing())
            raise

    def _put(self, questions: list[Question]) -> None:
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            self._questions.extend(questions)
            if questions and not self._busy:
                self._thread.submit(self._work)
                self._busy = True  # after it, so that nobody counts on work that an interrupt kept from being submitted

    def _work(self) -> None:
        while True:
            with self._lock:
                some = [self._questions.popleft() for _ in range(min(TOGETHER, len(self._questions)))]
                self._busy = bool(some)
            if not some:
                return
            asked = [question for question in some if not question.dropped]
            self._answer(asked)
            loops: dict[Any, list[Question]] = {}
            for question in asked:
                loops.setdefault(question.loop, []).append(question)
            for loop, answered in loops.items():
                if loop is None:
                    continue
                try:
                    loop.call_soon_threadsafe(self._deliver, answered)
                except RuntimeError:  # the loop is closed: nobody will learn of it
                    self._undo(answered)

    def _deliver(self, questions: list[Question]) -> None:
        """Hand the answers over, in the event loop; those that nobody waits for any more are undone."""
        for question in questions:
            waiter, answers = question.waiter, question.answers
            if waiter is None or waiter.done():
                self._undo([question])
            elif isinstance(answers, BaseException):
                waiter.set_exception(answers)
            else:
                waiter.set_result(answers)

    def _undo(self, questions: list[Question]) -> None:
        with self._lock:
            for question in questions:
                self._questions.extend(question.undoing())
            if self._questions and not self._busy:
                self._thread.submit(self._work)
                self._busy = True

    def close(self) -> None:
        """Answer what was asked, then end."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)
