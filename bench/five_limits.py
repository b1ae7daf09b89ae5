"""A policy of five limits (a minute, an hour, a day, a week, a month), each deciding every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.hot_key import check
from bench.timing import same, slices
from bench.workers import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.libraries import Library


def five(library: Library) -> Callable[[], float] | None:
    """Ask five limits on one key."""
    if not hasattr(library, "five"):
        return None
    ask = library.five()
    check(library.admitted(ask(library.HOT)), expected=True)
    return slices(ask, same(library.HOT))


CASES = (Case("five", "5 limits, hot key", five),)
