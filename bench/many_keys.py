"""Calls for 100,000 keys that have a state, in random order, and calls for new keys."""

from __future__ import annotations

import random
from itertools import count, cycle
from typing import TYPE_CHECKING, Final

from bench.hot_key import check
from bench.timing import slices
from bench.workers import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.libraries import Library

KEYS: Final = 100_000
QUOTA: Final = 1_000  # a day: no key spends it all here, and none is full again (so rightly forgotten) for a minute


def known(library: Library) -> Callable[[], float] | None:
    """Ask keys that have a state."""
    if not hasattr(library, "per_day"):
        return None
    ask = library.per_day(QUOTA)
    keys = shuffled()
    for key in keys:
        check(library.admitted(ask(key)), expected=True)
    return slices(ask, cycle(keys))


def new(library: Library) -> Callable[[], float] | None:
    """Ask each key for the first time."""
    if not hasattr(library, "per_day"):
        return None
    return slices(library.per_day(QUOTA), (f"user:{number}" for number in count()))


def shuffled() -> list[str]:
    """Make the keys, in an order that no cache foresees."""
    keys = [f"user:{number}" for number in range(KEYS)]
    random.Random(1).shuffle(keys)
    return keys


CASES = (
    Case("many-known", "100,000 keys", known),
    Case("many-new", "new keys", new),
)
