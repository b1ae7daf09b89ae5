"""Hooks that run around a fork: a child must not use locks, threads, connections or leased permits of its parent.

Objects register methods to run before a fork, and after it in the parent and in the child. The registry holds weak
references, so it keeps no object alive. In the child, the locks passed to `fork_safe` are released first; then the
`child` methods run in the order of their registration.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakSet, ref

if TYPE_CHECKING:
    from collections.abc import Callable

log: logging.Logger = logging.getLogger("tidegate")

L = TypeVar("L")


class ForkHooks(NamedTuple):
    """The methods that one object runs around a fork, as functions of its class."""

    owner: ref[Any]
    before: Callable[[Any], object] | None
    parent: Callable[[Any], object] | None
    child: Callable[[Any], object] | None


HOOK_NUMBERS: Final = count()
HOOKS: Final[dict[int, ForkHooks]] = {}
LOCKS: Final[WeakSet[Any]] = WeakSet()
ABANDONED: Final[list[object]] = []  # in a child process: objects of its parent


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    parent: Callable[[], object] | None = None,
    child: Callable[[], object] | None = None,
) -> None:
    """Register methods of one object to call before a fork, and after it in the parent and in the child.

    They should not raise; exceptions are logged.
    """
    install()
    number = next(HOOK_NUMBERS)
    methods: list[Any] = [before, parent, child]
    owner = next(method.__self__ for method in methods if method is not None)

    # A WeakMethod would fail and print an error if the interpreter exits before its owner is freed.
    def forget(_: object, hooks: dict[int, ForkHooks] = HOOKS) -> None:
        hooks.pop(number, None)

    HOOKS[number] = ForkHooks(ref(owner, forget), *(None if each is None else each.__func__ for each in methods))


def fork_safe(lock: L) -> L:
    """Make a Lock, RLock, Condition or Event of `threading` start unlocked in a child process."""
    install()
    LOCKS.add(lock)
    return lock


def abandon(*parents: object) -> None:
    """Keep objects of the parent, such as connections and loops, from being used or finalized in a child process."""
    ABANDONED.extend(parents)


@cache
def install() -> None:
    """Register with the interpreter, on platforms that can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=run_before, after_in_parent=run_in_parent, after_in_child=run_in_child)


def run_before() -> None:
    """Run the hooks before a fork."""
    for hooks in list(HOOKS.values()):
        run(hooks.owner(), hooks.before)


def run_in_parent() -> None:
    """Run the hooks of the parent."""
    for hooks in list(HOOKS.values()):
        run(hooks.owner(), hooks.parent)


def run_in_child() -> None:
    """Run the hooks of the child."""
    for lock in list(LOCKS):
        lock._at_fork_reinit()  # noqa: SLF001 - how `threading` and `logging` do it; the only way to do it in place
    for hooks in list(HOOKS.values()):
        run(hooks.owner(), hooks.child)


def run(owner: object | None, function: Callable[[Any], object] | None) -> None:
    """Call a hook if its object still exists; an exception does not stop the others."""
    if owner is None or function is None:
        return
    try:
        function(owner)
    except BaseException:  # no exception of a hook may reach the program
        log.exception("fork hook %s failed", getattr(function, "__qualname__", function))
