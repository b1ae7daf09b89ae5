"""Keeps the history in the store, so that it survives a restart of the service if the store does.

A minute is one small value, compressed JSON: the calls of its busiest policies, the latency, the keys that were denied
most, and changes of the rules; about 200 bytes for one policy and 400 for twenty, at most MAX_MINUTE_BYTES. The minutes
of the last 24 hours are a ring under the name of the service: a minute replaces that of the day before. If several
processes have the name, such as the pods of a deployment, each adds its calls to the minute. A process that starts
reads the ring. Minutes that the store did not accept are written later, for up to an hour.
"""

from __future__ import annotations

import json
import logging
import zlib
from operator import add
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.clock import TaskSignal
from tidegate.core._bounds import SECOND
from tidegate.errors import ValueConflict
from tidegate.service._dashboard.history import MAX_MINUTE_TOP, MAX_POLICIES, MINUTE, TIERS, PolicyHistory, RuleMark
from tidegate.service._decisions.denied_keys import merge_top
from tidegate.service._decisions.shared_store import is_shared
from tidegate.stores._outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores._values import Collection

if TYPE_CHECKING:
    from tidegate.service._dashboard.history import DecisionHistory, HistoryTier
    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_STORED_POLICIES: Final = 100  # of one minute, the busiest
MAX_STORED_TOP: Final = 5
MAX_TEXT_LENGTH: Final = 300  # characters of a key or a name
MAX_MINUTE_BYTES: Final = 2000  # compressed: a day is read at once
MAX_READ_BYTES: Final = 200_000  # of the JSON of one minute
MAX_LATE_MINUTES: Final = 60  # that are still written when the store is available again
MAX_WRITE_ATTEMPTS: Final = 200  # while other processes write the same minute; then it is written a minute later
RING_MINUTES: Final = TIERS[-1][1]
KEPT_SECONDS: Final = 25 * 3600


class StoredHistory:
    """The minutes of one service in its store."""

    def __init__(self, store: Store, history: DecisionHistory, name: str) -> None:
        """Write under the name of the service: it finds them there after a restart."""
        self._clock = store.clock
        self._store = store.unleased
        self._durable = is_shared(store)
        self._history = history
        self._collection = Collection(f"tidegate.history.{name}")
        self._written: int = history.minutes.tick - 1  # the tick of the last minute that was written

    async def run(self) -> None:
        """Write each minute when it has ended, until cancelled."""
        signal = TaskSignal()
        while self._durable:
            rest = MINUTE * SECOND - self._clock.steady() % (MINUTE * SECOND)
            await self._clock.wait_async(signal, self._clock.steady() + rest + SECOND)
            try:
                await self.write()
            except Exception:  # the next minute is still written
                log.exception("the history of a minute was not written to the store")

    async def write(self) -> int:
        """Write the minutes that have ended since the last call; return how many the store has accepted."""
        self._history.sample()
        minutes = self._history.minutes
        late = min(minutes.tick - 1 - self._written, minutes.steps, MAX_LATE_MINUTES) if self._durable else 0
        for number in range(late, 0, -1):
            try:
                await self._add(self._minute(minutes) - number + 1, describe_minute(self._history, number))
            except (*OUTAGE_ERRORS, ValueConflict):
                return late - number
            self._written = minutes.tick - number
        return late

    async def _add(self, minute: int, fields: dict[str, Any]) -> None:
        """Write a minute to the ring, added to what other processes of this name have written of it."""
        name = f"{minute % RING_MINUTES}"
        for attempt in range(1, MAX_WRITE_ATTEMPTS + 1):
            value = await self._store.get_value_async(self._collection, name)
            found = None if value is None else decode_minute(value.data, minute)
            data = encode_minute({**fields, "minute": minute} if found is None else add_minutes(found, fields))
            expected = None if value is None else value.data
            try:
                await self._store.put_value_async(self._collection, name, data, KEPT_SECONDS, expected=expected)
            except ValueConflict:
                if attempt == MAX_WRITE_ATTEMPTS:
                    raise
            else:
                return

    def _minute(self, minutes: HistoryTier) -> int:
        """Return the number of the last minute by the wall clock: the one in which its middle lies."""
        return (self._history.end_of(minutes) // 1000 - MINUTE // 2) // MINUTE

    async def restore(self) -> int:
        """Put the minutes of the store before those of this process; return how many there are."""
        if not self._durable:
            return 0
        minutes = self._history.minutes
        last = self._minute(minutes) - minutes.steps
        try:
            found = await self._store.list_values_async(self._collection)
        except OUTAGE_ERRORS:
            return 0
        stored = ((number, found.get(f"{number % RING_MINUTES}")) for number in range(last, last - RING_MINUTES, -1))
        values = [None if value is None else decode_minute(value.data, number) for number, value in stored]
        while values and values[-1] is None:
            values.pop()
        prepend_minutes(self._history, values[::-1])
        return len([value for value in values if value is not None])


def describe_minute(history: DecisionHistory, number: int = 1) -> dict[str, Any]:
    """Describe a minute for JSON: the last one, or an earlier one (2: the one before it)."""
    minutes = history.minutes
    calls = {
        name[:MAX_TEXT_LENGTH]: [column.values[-number] for column in policy.columns]
        for name, policy in minutes.policies.items()
        if any(column.values[-number] for column in policy.columns)
    }
    top = [row for minute, rows in history.tops if minute == minutes.tick - number for row in rows]
    end = history.end_of(minutes) - (number - 1) * MINUTE * 1000
    return {
        "total": [column.values[-number] for column in minutes.total.columns],
        "rest": [column.values[-number] for column in (minutes.median, minutes.p99, minutes.state)],
        "policies": calls,
        "top": [row for row in top if len(str(row["key"])) <= MAX_TEXT_LENGTH],
        "marks": [mark for mark in history.marks if end - MINUTE * 1000 <= mark.at < end],
    }


def add_minutes(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add up what two processes know of the same minute; of their latencies, the higher ones count."""
    median, p99, state = zip(one["rest"], other["rest"], strict=True)
    policies = dict(one["policies"])
    for name, calls in other["policies"].items():
        policies[name] = list(map(add, calls, policies.get(name, (0, 0, 0))))
    return {
        **one,
        "total": list(map(add, one["total"], other["total"])),
        "rest": [max(median), max(p99), state[0] | state[1]],
        "policies": policies,
        "top": merge_top([*one["top"], *other["top"]], MAX_STORED_TOP),
        "marks": [*one["marks"], *other["marks"]],
    }


def encode_minute(fields: dict[str, Any]) -> bytes:
    """Write a minute as compressed JSON; if it is too large, without the less busy policies and keys."""
    busiest = sorted(fields["policies"].items(), key=lambda pair: -sum(pair[1]))[:MAX_STORED_POLICIES]
    fields = {**fields, "policies": dict(busiest), "top": fields["top"][:MAX_STORED_TOP]}
    while len(data := zlib.compress(json.dumps(fields, separators=(",", ":")).encode())) > MAX_MINUTE_BYTES:
        fields["policies"] = dict(list(fields["policies"].items())[: len(fields["policies"]) // 2])
        fields["top"] = fields["top"][: len(fields["top"]) // 2]
        fields["marks"] = fields["marks"][: len(fields["marks"]) // 2]
    return data


def decode_minute(data: bytes, minute: int) -> dict[str, Any] | None:
    """Read a minute; None if it is not what `encode_minute` writes, or another minute."""
    try:
        fields = json.loads(zlib.decompressobj().decompress(data, MAX_READ_BYTES))
        numbers = [*fields["total"], *fields["rest"], *(each for row in fields["policies"].values() for each in row)]
        valid = len(fields["total"]) == len(fields["rest"]) == 3 and all(isinstance(each, int) for each in numbers)  # noqa: PLR2004 - columns
        lists = isinstance(fields["top"], list) and isinstance(fields["marks"], list)
        return fields if valid and lists and fields["minute"] == minute else None
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return None


def prepend_minutes(history: DecisionHistory, values: list[dict[str, Any] | None]) -> None:
    """Put minutes, the oldest first, before those that the history has; None is a minute without data."""
    minutes = history.minutes
    values = values[-(minutes.length - minutes.steps) :] if minutes.steps < minutes.length else []
    known = minutes.steps
    names = {name for value in values if value is not None for name in value["policies"]}
    for name in names - minutes.policies.keys():
        if len(minutes.policies) < MAX_POLICIES:
            minutes.policies[name] = PolicyHistory(minutes.length, known)
    for name, policy in minutes.policies.items():
        for place, column in enumerate(policy.columns):
            column.prepend(0 if value is None else value["policies"].get(name, (0, 0, 0))[place] for value in values)
    for place, column in enumerate(minutes.total.columns):
        column.prepend(0 if value is None else value["total"][place] for value in values)
    for place, column in enumerate((minutes.median, minutes.p99, minutes.state)):
        column.prepend(0 if value is None else value["rest"][place] for value in values)
    newer_tops, newer_marks = list(history.tops), list(history.marks)
    history.clear_details()
    first = minutes.tick - known - len(values)
    for place, value in enumerate(values):
        if value is not None:
            history.add_top(first + place, value["top"][:MAX_MINUTE_TOP])
            history.marks.extend(RuleMark(*mark) for mark in value["marks"])
    for minute, rows in newer_tops:
        history.add_top(minute, rows)
    history.marks.extend(newer_marks)
