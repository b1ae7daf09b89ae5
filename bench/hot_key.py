"""Repeated calls for one key, without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.libraries import HUGE
from bench.timing import same, slices
from bench.workers import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.libraries import Library


def allowed(library: Library) -> Callable[[], float] | None:
    """Every call may proceed."""
    if not hasattr(library, "per_day"):
        return None
    ask = library.per_day(HUGE)
    check(library.admitted(ask(library.HOT)), expected=True)
    return slices(ask, same(library.HOT))


def denied(library: Library) -> Callable[[], float] | None:
    """No call may proceed: the quota was spent before."""
    if not hasattr(library, "per_day"):
        return None
    ask = library.per_day(10)
    for _ in range(10):
        check(library.admitted(ask(library.HOT)), expected=True)
    check(library.admitted(ask(library.HOT)), expected=False)
    return slices(ask, same(library.HOT))


def told(library: Library) -> Callable[[], float] | None:
    """Every call may proceed, and the numbers of the answer are read."""
    return slices(library.per_day_told(HUGE), same(library.HOT)) if hasattr(library, "per_day_told") else None


def check(answer: bool, *, expected: bool) -> None:  # noqa: FBT001 - the answer of a library
    """Refuse to time what does not do its work."""
    if answer is not expected:
        raise AssertionError(f"a library answered {answer} instead of {expected}")


CASES = (
    Case("hot-allowed", "hot key, allowed", allowed),
    Case("hot-denied", "hot key, denied", denied),
    Case("hot-told", "hot key, numbers read", told),
)
