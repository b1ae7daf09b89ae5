"""The decorator of methods that hold the lock of their object.

Use `with` on a `threading.Lock` and nothing else: its methods are written in C, so an exception that a signal handler
raises cannot come between taking the lock and releasing it. `acquire` before `try` and `finally` can be interrupted in
between, and then the lock stays locked. Pass the lock to `fork_safe`: a fork copies a lock that another thread holds,
but not that thread. Do not call a limiter from a signal handler or a finalizer: it may have interrupted the holder.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasLock")


class HasLock(Protocol):
    """An object whose methods may be `locked`."""

    lock: threading.Lock


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method to hold the lock of its object."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return run
