"""Counts the denials of each key, to find the keys that are denied most. For display only: no decision depends on it.

Denials are counted in slots of ten seconds, aligned with the minutes of the history. A slot holds a bounded number of
keys: if there are more, those with the fewest denials are dropped, so that the keys with many denials stay. Their
counts can then be too low, never too high.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from heapq import nlargest
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._runtime.lock import locked
from tidegate.core._bounds import SECOND
from tidegate.service._decisions.row_selection import select_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidegate._policy import Key

SLOT: Final = 10 * SECOND
SLOTS_PER_MINUTE: Final = 6
MINUTE: Final = 60 * SECOND
MAX_SLOT_KEYS: Final = 512
MAX_TOP: Final = 40  # keys that a process reports
MILLISECOND: Final = 1000  # microseconds


class DeniedKey(NamedTuple):
    """A key that was denied. `denied` counts the last minute, `this_minute` the current minute of the history."""

    policy: str
    key: Key
    limits: tuple[str, ...]  # the limits that the last denied call exceeded
    denied: int
    this_minute: int
    last_at: int  # milliseconds since 1970


class DeniedKeys:
    """The denials of one process, by policy and key, in the last minute. Thread-safe."""

    __slots__ = ("_counts", "_last", "_offset", "_slot", "_slot_end", "_slots", "_totals", "lock")

    def __init__(self) -> None:
        """Start without denials."""
        self.lock: threading.Lock = threading.Lock()
        self._offset = 0
        self._slot = self._slot_end = 0  # of the current slot: its start and end, in microseconds since 1970
        self._counts: dict[tuple[str, Key], int] = {}  # of the current slot
        self._totals: Counter[str] = Counter()  # all denials of the current slot, by policy
        self._slots: deque[tuple[int, dict[tuple[str, Key], int], Counter[str]]] = deque(maxlen=SLOTS_PER_MINUTE)
        self._last: dict[tuple[str, Key], tuple[tuple[str, ...], int]] = {}  # limits and time of the last denial

    @locked
    def record(self, policy: str, key: Key, limits: tuple[str, ...], now: int) -> None:
        """Count a denial at this time, in microseconds since 1970."""
        place = (policy, key)
        if not self._slot <= now < self._slot_end:
            self._start_slot(now)
        counts = self._counts
        counts[place] = counts.get(place, 0) + 1
        self._totals[policy] += 1
        self._last[place] = (limits, now)
        if len(counts) > MAX_SLOT_KEYS:
            self._drop_rare_keys()

    def align(self, now: int, steady: int) -> None:
        """Let further slots start at multiples of their length of the steady clock, as the minutes of the history."""
        self._offset = (now - steady) % SLOT

    def _start_slot(self, now: int) -> None:
        if self._counts:
            self._slots.append((self._slot, self._counts, self._totals))
        self._slot = now - (now - self._offset) % SLOT
        self._slot_end = self._slot + SLOT
        self._counts, self._totals = {}, Counter()
        self._forget_unknown()

    def _drop_rare_keys(self) -> None:
        """Keep the half of the keys with the most denials, in the current slot."""
        kept = nlargest(MAX_SLOT_KEYS // 2, self._counts.items(), key=itemgetter(1))
        self._counts = dict(kept)
        self._forget_unknown()

    def _forget_unknown(self) -> None:
        known = {place for _, counts, _ in self._slots for place in counts} | self._counts.keys()
        self._last = {place: last for place, last in self._last.items() if place in known}

    def _last_minute(self, now: int) -> list[tuple[int, dict[tuple[str, Key], int], Counter[str]]]:
        """Return the slots whose middle lies in the last minute, the current one last."""
        slots = (*self._slots, (self._slot, self._counts, self._totals))
        return [each for each in slots if each[0] + SLOT // 2 >= now - MINUTE]

    @locked
    def top(self, now: int, steady: int) -> list[DeniedKey]:
        """Return the keys with the most denials in the last minute.

        `steady` is the steady time: the minutes of the history start at full minutes of that clock.
        """
        self.align(now, steady)
        minute_start = now - steady % MINUTE
        minute: Counter[tuple[str, Key]] = Counter()
        this_minute: Counter[tuple[str, Key]] = Counter()
        for slot, counts, _ in self._last_minute(now):
            minute.update(counts)
            if slot + SLOT // 2 >= minute_start:
                this_minute.update(counts)
        return [
            DeniedKey(*place, self._last[place][0], count, this_minute[place], self._last[place][1] // MILLISECOND)
            for place, count in select_rows(minute.items(), itemgetter(1), lambda item: item[0][0], MAX_TOP)
        ]

    @locked
    def count_by_policy(self, now: int) -> dict[str, tuple[int, int]]:
        """Return the denials of each policy in the last minute, and of how many different keys (at least)."""
        slots = self._last_minute(now)
        denials: Counter[str] = Counter()
        for _, _, totals in slots:
            denials.update(totals)
        keys = Counter(policy for policy, _ in {place for _, counts, _ in slots for place in counts})
        return {policy: (count, keys[policy]) for policy, count in denials.items()}


def merge_top(rows: Iterable[dict[str, Any]], max_rows: int) -> list[dict[str, Any]]:
    """Add up the rows of the same policy and key (of several processes, or minutes), the most denied first.

    If there are too many, each policy keeps some of its rows.
    """
    found: dict[tuple[str, Key], dict[str, Any]] = {}
    for row in rows:
        place = place_of(row)
        known = found.get(place)
        if known is None:
            found[place] = dict(row)
            continue
        latest = row if row["last_at"] > known["last_at"] else known
        found[place] = {
            **latest,
            "denied": known["denied"] + row["denied"],
            "this_minute": known["this_minute"] + row["this_minute"],
        }
    return select_rows(found.values(), itemgetter("denied"), itemgetter("policy"), max_rows)


def place_of(row: Mapping[str, Any]) -> tuple[str, Key]:
    """Return the policy and the key of a row; rows of other processes have composite keys as lists."""
    key = row["key"]
    return row["policy"], key if isinstance(key, str) else tuple(key)
