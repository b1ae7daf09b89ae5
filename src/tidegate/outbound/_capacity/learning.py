"""Learns the limits of a provider from its responses. Pure functions: rate limit advice in, corrections out.

A provider may only lower the remaining quota that tidegate assumes: others may use the same quota, or its limit may be
stricter than the file says. Nothing raises it above what is configured; a later response can only undo what an
earlier one lowered. The effect of a response ends with the limit's period, so an absurd value does little harm.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.fork import fork_safe
from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Limit
    from tidegate.headers import Advice, LimitAdvice

FORBIDDEN: Final = 403
TOO_MANY_REQUESTS: Final = 429
SERVICE_UNAVAILABLE: Final = 503
MAX_PROVIDER_CHARGES: Final = 1_000  # per account, that may be returned
SAME_WINDOW_RATIO: Final = 1.05  # windows whose lengths differ by less are considered the same


class LimitCorrection(NamedTuple):
    """What the provider reported about one of our limits: `remaining` permits until `reset` (microseconds from now)."""

    limit_index: int
    remaining: int
    reset: int | None


def effective_status(status: int, advice: Advice) -> int:
    """Return 429 for a 403 that is a refusal: GitHub also uses 403 for requests over a limit.

    Unlike other 403 responses, such a response says when to try again, or that nothing is left.
    """
    is_refusal = status == FORBIDDEN and (advice.retry_after is not None or advice.remaining == 0)
    return TOO_MANY_REQUESTS if is_refusal else status


def required_wait(advice: Advice) -> float | None:
    """Return how many seconds to wait after a refusal: Retry-After, or the reset of a limit that has nothing left."""
    if advice.retry_after is not None or advice.remaining != 0:
        return advice.retry_after
    return advice.reset_after


def find_corrections(limits: Sequence[Limit], advice: Advice) -> list[LimitCorrection]:
    """Match each reported limit with a remaining quota to one of our limits."""
    found: dict[int, LimitCorrection] = {}
    for reported in advice.limits:
        if reported.remaining is None:
            continue
        index = match_limit(limits, reported)
        if index is None:
            continue
        reset = (
            None if reported.reset_after is None else min(round(reported.reset_after * SECOND), limits[index].length)
        )
        new = LimitCorrection(index, min(reported.remaining, limits[index].burst), reset)
        old = found.get(index)
        if old is None or new.remaining < old.remaining:
            found[index] = new
    return list(found.values())


def match_limit(limits: Sequence[Limit], reported: LimitAdvice) -> int | None:
    """Return the index of the reported limit: same unit, then same window, same quota, or the only one that fits."""
    same = [i for i, limit in enumerate(limits) if limit.unit == reported.unit and not limit.rules.holds_slots]
    if reported.window is not None:
        length = reported.window * SECOND
        close = [
            i for i in same if limits[i].length / SAME_WINDOW_RATIO <= length <= limits[i].length * SAME_WINDOW_RATIO
        ]
        return close[0] if close else None
    if len(same) > 1 and reported.quota is not None:
        equal = [i for i in same if limits[i].quota == reported.quota]
        same = equal or same
    if len(same) > 1 and reported.reset_after is not None:  # it resets within its period: the shortest possible one
        same = [i for i in same if limits[i].length >= reported.reset_after * SECOND] or same
    return min(same, key=lambda i: limits[i].length, default=None)


class ProviderCharge(NamedTuple):
    """A charge made because of a provider's report: which limit, how much, when (by the store's clock)."""

    limit_index: int
    amount: int
    at: int


class ProviderCharges:
    """Charges made because of provider reports, which later reports may return. Thread-safe."""

    def __init__(self) -> None:
        """Start without charges."""
        self._charges: list[ProviderCharge] = []
        self._lock = fork_safe(threading.Lock())

    def __len__(self) -> int:
        """Return the number of charges."""
        return len(self._charges)

    def add(self, charge: ProviderCharge) -> None:
        """Add a charge."""
        with self._lock:
            self._charges.append(charge)
            del self._charges[:-MAX_PROVIDER_CHARGES]  # dropped charges are returned only when their period ends

    def drop_expired(self, limits: Sequence[Limit], now: int) -> None:
        """Drop charges whose period has ended, or whose limit no longer exists."""
        with self._lock:
            self._charges = [
                each
                for each in self._charges
                if each.limit_index < len(limits) and each.at > now - limits[each.limit_index].length
            ]

    def clear(self) -> None:
        """Drop all charges."""
        with self._lock:
            self._charges.clear()

    def take(self, limit_index: int, amount: int = MAX_INTEGER) -> list[ProviderCharge]:
        """Remove and return up to `amount` of the charges of a limit, oldest first."""
        taken, left = [], []
        with self._lock:
            for each in self._charges:
                part = min(amount, each.amount) if each.limit_index == limit_index else 0
                amount -= part
                if part:
                    taken.append(each._replace(amount=part))
                if part < each.amount:
                    left.append(each._replace(amount=each.amount - part))
            self._charges = left
        return taken
