"""The lock of decisions in memory (the memory store, shares of leases): a deque with one token.

It takes a third of the time of a `threading.Lock`, which is a fifth of a decision.

The thread that has deleted the token holds the lock:

    while True:
        try:
            del token[0]               # 1. takes the token
        except IndexError:
            yield_thread(0)            #    another thread has it
        else:
            break
    try:
        ...                            # 2. the critical section: no `yield`, no `await`, nothing that blocks
    finally:
        release(None)                  # 3. returns it: token.append

CPython runs signal handlers at the start of a function, after a call, and at a jump backwards. There is none of these
between 1 and 2, and `append` has returned the token when the call in 3 ends. So an exception of a handler never leaves
the token taken. The written-out form is needed: a function that takes the token would end with such a place.
tests/engine/test_interrupts.py raises at all of them. Changes that an interrupted critical section made are not undone:
its steps are ordered so that the next holder can continue from any of them.

Do not call a limiter from a signal handler or a finalizer: it may have interrupted the thread that holds the lock.
"""

from __future__ import annotations

from collections import deque
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from tidegate._runtime.clock import yield_thread

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasToken")

Token = deque[None]


def make_token() -> Token:
    """Create an unlocked lock."""
    return deque((None,))


def release_token(token: Token) -> None:
    """Unlock in a child process: the thread that held the lock is one of its parent."""
    token.clear()
    token.append(None)


class HasToken(Protocol):
    """An object whose methods may hold its token."""

    token: Token


def with_token(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method to hold the token of its object."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        token = self.token
        while True:
            try:
                del token[0]
            except IndexError:
                yield_thread(0)
            else:
                break
        try:
            return method(self, *args, **kwargs)
        finally:
            token.append(None)

    return run
