"""The libraries compared: one module each, loaded only in the process that measures it.

A comparison asks a library for a function of a key that makes one decision. Each library is set up the way its own
documentation shows, in memory, with its fastest strategy whose answer is comparable; `STRATEGY` says which.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Ask = Callable[[Any], Any]
    AskAsync = Callable[[Any], Awaitable[Any]]

OURS: Final = "tidegate"
PEERS: Final = ("limits", "limits_moving", "throttled_py", "pyrate_limiter", "aiolimiter")
DAY: Final = 86_400
HUGE: Final = 1_000_000_000  # a quota that no measurement uses up
FIVE: Final = (
    (100_000_000, 60),
    (200_000_000, 3_600),
    (300_000_000, DAY),
    (400_000_000, 7 * DAY),
    (500_000_000, 30 * DAY),
)


class Library(Protocol):
    """What a module of this folder offers; each function may be missing where the library cannot do it."""

    NAME: str
    STRATEGY: str
    DISTRIBUTION: str
    HOT: Any  # what the functions are called with for one and the same key

    def per_day(self, quota: int, days: int = 1) -> Ask:
        """Ask for one permit of `quota` in a day (or so many days), for a key."""

    def admitted(self, answer: Any) -> bool:  # noqa: ANN401 - each library answers with a type of its own
        """Tell from an answer whether the call may proceed."""

    def per_day_told(self, quota: int) -> Ask:
        """Ask as `per_day` does, and read how many permits are left and when they come back."""

    def five(self) -> Ask:
        """Ask the five limits of FIVE."""

    def per_day_async(self, quota: int) -> AskAsync:
        """Ask as `per_day` does, to be awaited."""

    def per_day_keyed_async(self, quota: int) -> AskAsync:
        """Ask as `per_day_async` does, for keys; only of a library that has none itself."""


def load(module: str) -> Library:
    """Import a library's module by its name."""
    return cast("Library", importlib.import_module(f"bench.libraries.{module}"))
