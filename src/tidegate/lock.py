"""Lock: mutual exclusion between threads that survives exceptions and forks.

A signal handler may raise at any instruction of the main thread, even before `try` begins or in the `finally` block
that releases a lock. A fork copies a lock that another thread holds, but not that thread. An ordinary lock then stays
locked forever. This one is recovered by the next thread that needs it, once no thread can be holding it.

The lock is a token in a deque. The holder takes it with a `del` statement, in a third of the time of a
`threading.Lock`. A thread that finds it taken yields instead of queueing: if waiting threads were woken one by one,
each short critical section would need a context switch.

Every holder follows one pattern, written out in code that must be fast, and as the decorator `locked` elsewhere:

    held = lock.token              # 1. names the lock that this frame may hold, before it does
    try:
        del held[0]                # 2. takes the token
    except IndexError:
        lock.contend()             #    or waits for it
    try:
        ...                        # 3. the critical section: no `yield`, no `await`
    finally:
        lock.release(None)         # 4. returns the token
    del held                       # 5. needed only if the frame continues with other work

A thread that holds the lock therefore has a frame on its stack whose local variable `held` is the token. After waiting
for a while, `contend` searches the stacks of all threads for such a frame. If there is none, the token is lost and is
replaced.

Why this never admits two holders: assume that the token is missing when the search begins. Every `del` and every
`release` changes the deque, and an iterator over a deque raises once the deque has changed. The token is replaced by
one call of `extend`, which first advances such an iterator, created before the search. So it succeeds only if the deque
did not change in between. A thread that held the token when the stacks were read was found by its `held`, or has
returned the token since, or has lost it. In the first case nothing is replaced, in the second `extend` fails, and the
third is the case to repair. A waiting thread has `held` set as well, but it is recognised by the frame of `contend`
above it with `idle` set: `idle` is never set after the thread took the token.

Changes that an interrupted critical section made are not undone. Order its steps so that the next holder can continue
from any of them.
"""

from __future__ import annotations

import gc
import operator
import sys
import threading
from collections import deque
from functools import wraps
from itertools import chain, repeat
from time import sleep
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasLock")

MAX_SPINS: Final = 1000  # how often a waiting thread yields before it sleeps between attempts
REENTERED: Final = (
    "a signal handler or finalizer called an operation that it interrupted: this thread already holds its lock"
)
RETRY_SLEEP: Final = 0.0001  # seconds of such a sleep


class Lock:
    """A lock for critical sections without blocking calls; the module docstring shows how to hold it.

    A waiting thread first yields `spins` times, then sleeps `pause` seconds between attempts. If the holder may
    block, as in a transaction, set `spins` to 0.
    """

    __slots__ = ("_pause", "_spins", "release", "token")

    def __init__(self, spins: int = MAX_SPINS, pause: float = RETRY_SLEEP) -> None:
        """Create an unlocked lock."""
        self.token: deque[None] = deque((None,))
        self.release: Callable[[None], None] = self.token.append
        self._spins = spins
        self._pause = pause

    def contend(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait for the token and take it; return False once `expired` returns true."""
        token = self.token
        attempts = 0
        next_check = self._spins + 1
        while True:
            idle = True
            sleep(0 if attempts < self._spins else self._pause)
            attempts += 1
            if attempts >= next_check:
                next_check += max(1, attempts // 2)
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
            except RuntimeError:  # another thread took or returned it meanwhile, so it is not lost
                return
        elif holders == {threading.get_ident()}:
            raise RuntimeError(REENTERED)


def threads_holding(token: object) -> set[int]:
    """Return the threads that may hold a token, or another object that a frame names `held`."""
    found = set()
    for thread, top in current_frames().items():
        frame: FrameType | None = top
        called = None
        try:
            while frame is not None:
                if may_hold(frame, called, token):
                    found.add(thread)
                called, frame = frame, frame.f_back
        except AttributeError:  # no longer a frame: the thread continued while its stack was read, so it is alive
            found.add(thread)
    return found


def current_frames() -> dict[int, FrameType]:
    """Return the top frame of each thread.

    Python 3.11 holds a lock of the interpreter while it allocates these frames. If that starts a garbage collection,
    and a callback of it lets another thread call this function, both wait forever (gh-106883). So no collection may
    start meanwhile. `map` makes all calls in C, where neither another thread nor a signal handler can come in between.
    """
    calls = (gc.disable, sys._current_frames, gc.enable) if gc.isenabled() else (sys._current_frames,)  # noqa: SLF001 - the only way to see the stacks of other threads
    found: dict[int, FrameType] = next(filter(None, list(map(operator.call, calls))))
    return found


def may_hold(frame: FrameType, called: FrameType | None, token: object) -> bool:
    """Return whether a frame, which has called another one, may hold a token."""
    if not frame.f_globals.get("__name__", "").startswith("tidegate.") or "held" not in frame.f_code.co_varnames:
        return False
    if frame.f_locals.get("held") is not token:
        return False
    waits = called is not None and called.f_code is Lock.contend.__code__ and called.f_locals.get("idle") is True
    return not waits


class HasLock(Protocol):
    """An object whose methods may be `locked`."""

    lock: Any  # a Lock or a threading.Lock


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method to hold the lock of its object."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(self.lock, Lock):
            with self.lock:
                return method(self, *args, **kwargs)
        lock = self.lock
        held = lock.token
        try:
            del held[0]
        except IndexError:
            lock.contend()
        try:
            return method(self, *args, **kwargs)
        finally:
            lock.release(None)

    return run
