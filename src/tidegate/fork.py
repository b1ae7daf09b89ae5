"""What a fork must not copy: locks that other threads hold, threads themselves, connections, permits held ahead.

Objects register here what they do before a fork and after it, in the parent and in the child. They are referred to
weakly, so that registering keeps nothing alive. In the child, the locks named by `fork_safe` are free again first; then
the `child` methods run, in the order in which they were registered.
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

log = logging.getLogger(__name__)

L = TypeVar("L")


class ForkHooks(NamedTuple):
    """What one object does around a fork: functions of its class."""

    owner: ref[Any]
    before: Callable[[Any], object] | None
    parent: Callable[[Any], object] | None
    child: Callable[[Any], object] | None


HOOK_NUMBERS: Final = count()
HOOKS: Final[dict[int, ForkHooks]] = {}
LOCKS: Final[WeakSet[Any]] = WeakSet()
ABANDONED: Final[list[object]] = []  # in a child process: what is its parent's


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    parent: Callable[[], object] | None = None,
    child: Callable[[], object] | None = None,
) -> None:
    """Have methods of one object called before a fork, and after it in the parent and in the child.

    They should not raise; what they raise is logged.
    """
    install()
    number = next(HOOK_NUMBERS)
    methods: list[Any] = [before, parent, child]
    owner = next(method.__self__ for method in methods if method is not None)

    # A WeakMethod would fail, and say so, where the interpreter ends before its owner does.
    def forget(_: object, hooks: dict[int, ForkHooks] = HOOKS) -> None:
        hooks.pop(number, None)

    HOOKS[number] = ForkHooks(ref(owner, forget), *(None if each is None else each.__func__ for each in methods))


def fork_safe(lock: L) -> L:
    """Have a Lock, RLock, Condition or Event of `threading` start afresh in a child process."""
    install()
    LOCKS.add(lock)
    return lock


def abandon(*parents: object) -> None:
    """Keep, in a child process, what must be neither used nor finalized there: connections and loops of its parent."""
    ABANDONED.extend(parents)


@cache
def install() -> None:
    """Have the interpreter call us, where it can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=run_before, after_in_parent=run_in_parent, after_in_child=run_in_child)


def run_before() -> None:
    """Do what is to be done before a fork."""
    for hooks in list(HOOKS.values()):
        run(hooks.owner(), hooks.before)


def run_in_parent() -> None:
    """Do what is to be done in the parent."""
    for hooks in list(HOOKS.values()):
        run(hooks.owner(), hooks.parent)


def run_in_child() -> None:
    """Do what is to be done in the child."""
    for lock in list(LOCKS):
        lock._at_fork_reinit()  # noqa: SLF001 - how `threading` and `logging` do it; the only way to do it in place
    for hooks in list(HOOKS.values()):
        run(hooks.owner(), hooks.child)


def run(owner: object | None, function: Callable[[Any], object] | None) -> None:
    """Call a function of an object that is still there; one that raises keeps no other from its work."""
    if owner is None or function is None:
        return
    try:
        function(owner)
    except BaseException:  # nothing that is raised around a fork reaches the program
        log.exception("%s failed around a fork", getattr(function, "__qualname__", function))
