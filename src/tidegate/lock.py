"""Lock: mutual exclusion between threads that no exception and no fork can lose.

A signal handler may raise at any instruction of the main thread: before `try` begins, and in the very clean-up that
was to release a lock. A fork copies a lock that another thread holds, but not that thread. An ordinary lock then stays
taken for ever. This one is released by the next thread that needs it, once no thread can be holding it any more.

The lock is a token in a deque. The holder takes it with a `del` statement, which costs a third of a
`threading.Lock`, and a thread that finds it taken yields instead of queueing: a queue of threads, each woken with the
lock but without the interpreter, turns every short critical section into a context switch.

Every holder follows one pattern, written out where each nanosecond counts, and as the decorator `locked` elsewhere:

    held = lock.token              # 1. says which lock this frame may hold, before it does
    try:
        del held[0]                # 2. takes the token
    except IndexError:
        lock.contend()             #    ... or waits for it
    try:
        ...                        # 3. the critical section: no `yield`, no `await`
    finally:
        lock.give(None)            # 4. gives the token back
    del held                       # 5. needed only if the frame goes on to other work

So a thread that holds the lock has a frame on its stack whose local variable `held` is the token. `contend` looks for
such a frame in every thread after it has waited for a while. If there is none, the token is lost, and is replaced.

Why that never admits two holders. Let the token be missing when the look begins. Every `del` and every `give` changes
the deque, and an iterator over a deque refuses to go on once the deque has changed. The token is replaced by one call,
`extend`, which first asks such an iterator, made before the look: so it succeeds only if nobody took or gave anything
in between. A thread that held the token when the stacks were read is either seen with its `held`, or it has given the
token back since, or it has left without doing so. In the first case nothing is replaced, in the second `extend`
fails, and the third is the loss to be repaired. A thread that waits has `held` set as well, but is known by `contend`
as the function it called, with `idle` set: it is never idle after it took the token.

What a critical section had changed when it was interrupted is not undone. Its steps must be in such an order that the
next holder can go on from any of them.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from functools import wraps
from itertools import chain, repeat
from time import sleep
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasLock")

MAX_SPINS: Final = 1000  # how often a thread yields to the others before it sleeps between two attempts
REENTERED: Final = (
    "a signal handler or a finalizer called back into an operation that it interrupted in the same thread"
)
RETRY_SLEEP: Final = 0.0001  # seconds of such a sleep


class Lock:
    """A lock for critical sections without blocking calls; the module's docstring shows how to hold it.

    `spins` and `rest` say how a thread waits: so many times it only yields, then it sleeps for so many seconds between
    two attempts. Where the holder blocks, as it does in a transaction, `spins` should be 0.
    """

    __slots__ = ("_rest", "_spins", "give", "token")

    def __init__(self, spins: int = MAX_SPINS, rest: float = RETRY_SLEEP) -> None:
        """Start free."""
        self.token: deque[None] = deque((None,))
        self.give = self.token.append
        self._spins = spins
        self._rest = rest

    def contend(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait for the token and take it; give up, and return False, once `expired` says so."""
        token = self.token
        attempts = 0
        look = self._spins + 1
        while True:
            idle = True
            sleep(0 if attempts < self._spins else self._rest)
            attempts += 1
            if attempts >= look:
                look += max(1, attempts // 2)
                self._replace_lost_token()
            if expired is not None and expired():
                return False
            idle = False
            try:
                del token[0]
            except IndexError:
                idle = True  # noqa: F841 - read by `may_hold`, from another thread
                continue
            return True

    def _replace_lost_token(self) -> None:
        """Put the token back if no thread can be holding it."""
        token = self.token
        unchanged = iter(token)
        if token:
            return
        holders = threads_holding(token)
        if not holders:
            try:
                token.extend(chain(unchanged, repeat(None, 1)))
            except RuntimeError:  # somebody took it or gave it back meanwhile, so it is not lost
                return
        elif holders == {threading.get_ident()}:
            raise RuntimeError(REENTERED)


def threads_holding(token: object) -> set[int]:
    """Find the threads that may hold a token, or anything else that a frame names as `held`."""
    found = set()
    for thread, top in sys._current_frames().items():  # noqa: SLF001 - the only way to see the stacks of other threads
        frame: FrameType | None = top
        called = None
        while frame is not None:
            if may_hold(frame, called, token):
                found.add(thread)
            called, frame = frame, frame.f_back
    return found


def may_hold(frame: FrameType, called: FrameType | None, token: object) -> bool:
    """Tell whether a frame, which has called another one, may hold a token."""
    if not frame.f_globals.get("__name__", "").startswith("tidegate.") or "held" not in frame.f_code.co_varnames:
        return False
    if frame.f_locals.get("held") is not token:
        return False
    waits = called is not None and called.f_code is Lock.contend.__code__ and called.f_locals.get("idle") is True
    return not waits


class HasLock(Protocol):
    """An object whose methods may be `locked`."""

    lock: Lock


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method hold the lock of its object."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        lock = self.lock
        held = lock.token
        try:
            del held[0]
        except IndexError:
            lock.contend()
        try:
            return method(self, *args, **kwargs)
        finally:
            lock.give(None)

    return run
