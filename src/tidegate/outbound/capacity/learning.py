"""What a provider's answer teaches about its limits. Pure: words in, corrections out.

A provider may only lower what we take to be left: others may use the same quota, or its limit may be stricter than the
file says. Nothing it says raises anything above what is configured; what it lowered, it may take back. Whatever it
says, the effect of one answer ends with the limit's period, so that an absurd value does little harm.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.fork import fork_safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Limit
    from tidegate.headers import Advice, LimitAdvice

TOO_MANY_REQUESTS: Final = 429
SERVICE_UNAVAILABLE: Final = 503
MAX_LESSONS: Final = 1_000  # of one account that may be taken back
SAME_WINDOW_RATIO: Final = 1.05  # two windows that differ by less are taken for the same
COUNTED_ALGORITHMS: Final = ("token_bucket", "fixed_window", "calendar_window", "sliding_window", "sliding_log")


class LimitCorrection(NamedTuple):
    """What was said of one of our limits: this much is left, for that many microseconds (None: not said)."""

    place: int
    remaining: int
    reset: int | None


def corrections(limits: Sequence[Limit], advice: Advice) -> list[LimitCorrection]:
    """Find our limit for each that the provider spoke of, as far as it says what is left."""
    found: dict[int, LimitCorrection] = {}
    for said in advice.limits:
        if said.remaining is None:
            continue
        index = which(limits, said)
        if index is None:
            continue
        reset = None if said.reset_after is None else min(round(said.reset_after * SECOND), limits[index].length)
        new = LimitCorrection(index, min(said.remaining, limits[index].burst), reset)
        old = found.get(index)
        if old is None or new.remaining < old.remaining:
            found[index] = new
    return list(found.values())


def which(limits: Sequence[Limit], said: LimitAdvice) -> int | None:
    """Tell which of our limits is spoken of: the same unit, then the same window, quota, or the only one that fits."""
    same = [i for i, limit in enumerate(limits) if limit.unit == said.unit and limit.algorithm in COUNTED_ALGORITHMS]
    if said.window is not None:
        length = said.window * SECOND
        close = [
            i for i in same if limits[i].length / SAME_WINDOW_RATIO <= length <= limits[i].length * SAME_WINDOW_RATIO
        ]
        return close[0] if close else None
    if len(same) > 1 and said.quota is not None:
        equal = [i for i in same if limits[i].quota == said.quota]
        same = equal or same
    if len(same) > 1 and said.reset_after is not None:  # it resets within the period: the shortest that can be meant
        same = [i for i in same if limits[i].length >= said.reset_after * SECOND] or same
    return min(same, key=lambda i: limits[i].length, default=None)


class ProviderCharge(NamedTuple):
    """A charge that only the provider's word stands for: which limit, how much, when (by the store's clock)."""

    place: int
    amount: int
    at: int


class ProviderCharges:
    """What the provider took and may give back. Thread-safe."""

    def __init__(self) -> None:
        """Know of none."""
        self._known: list[ProviderCharge] = []
        self._lock = fork_safe(threading.Lock())

    def __len__(self) -> int:
        """Count them."""
        return len(self._known)

    def add(self, lesson: ProviderCharge) -> None:
        """Keep one."""
        with self._lock:
            self._known.append(lesson)
            del self._known[:-MAX_LESSONS]  # what these took does not come back before its period has ended

    def forget(self, limits: Sequence[Limit], now: int) -> None:
        """Drop those whose charges have ended by themselves, or were made to limits that are no more."""
        with self._lock:
            self._known = [
                each for each in self._known if each.place < len(limits) and each.at > now - limits[each.place].length
            ]

    def clear(self) -> None:
        """Drop them all."""
        with self._lock:
            self._known.clear()

    def take(self, place: int, amount: int) -> list[ProviderCharge]:
        """Take as much as may come back of a limit, oldest first."""
        taken, left = [], []
        with self._lock:
            for each in self._known:
                part = min(amount, each.amount) if each.place == place else 0
                amount -= part
                if part:
                    taken.append(each._replace(amount=part))
                if part < each.amount:
                    left.append(each._replace(amount=each.amount - part))
            self._known = left
        return taken
