"""Keeps the history in the store, so that it survives a restart of the service if the store does.

Once a minute, the service writes that minute to the store: the calls of its busiest policies, the latency, the keys
that were denied most, and changes of the rules, as compressed JSON. The minutes of a service are a collection of
values, named after the minute by the wall clock. A service that starts reads those of the last 24 hours under its name.
"""

from __future__ import annotations

import json
import logging
import zlib
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ValueConflict
from tidegate.service.dashboard.history import MAX_MINUTE_TOP, MAX_POLICIES, MINUTE, TIERS, PolicyHistory, RuleMark
from tidegate.service.decisions.shared_store import is_shared
from tidegate.stores.outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores.values import Collection

if TYPE_CHECKING:
    from tidegate.service.dashboard.history import DecisionHistory, HistoryTier
    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_STORED_POLICIES: Final = 100  # of one minute, the busiest
MAX_STORED_TOP: Final = 5
MAX_TEXT_LENGTH: Final = 300  # characters of a key or a name
MAX_MINUTE_BYTES: Final = 12_000  # compressed: a day is read at once
MAX_READ_BYTES: Final = 200_000  # of the JSON of one minute
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
        self._written: int | None = None  # the tick of the last minute that was written

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

    async def write(self) -> bool:
        """Write the last minute, unless that was done before; return whether the store has it."""
        self._history.sample()
        minutes = self._history.minutes
        if not self._durable or not minutes.steps or self._written == minutes.tick:
            return False
        name, data = f"{self._minute(minutes)}", encode_minute(self._history)
        try:
            await self._store.put_value_async(self._collection, name, data, KEPT_SECONDS, expected=None)
        except ValueConflict:  # written before the last restart of the service
            pass
        except OUTAGE_ERRORS:
            return False
        self._written = minutes.tick
        return True

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
        stored = (found.get(f"{number}") for number in range(last, last - TIERS[-1][1], -1))
        values = [None if value is None else decode_minute(value.data) for value in stored]
        while values and values[-1] is None:
            values.pop()
        prepend_minutes(self._history, values[::-1])
        return len([value for value in values if value is not None])


def encode_minute(history: DecisionHistory) -> bytes:
    """Write the last minute as compressed JSON; if it is too large, without the less busy policies and keys."""
    minutes = history.minutes
    calls = {
        name[:MAX_TEXT_LENGTH]: [column.values[-1] for column in policy.columns]
        for name, policy in minutes.policies.items()
        if any(column.values[-1] for column in policy.columns)
    }
    busiest = dict(sorted(calls.items(), key=lambda pair: -sum(pair[1]))[:MAX_STORED_POLICIES])
    top = [row for minute, rows in history.tops if minute == minutes.tick - 1 for row in rows][:MAX_STORED_TOP]
    end = history.end_of(minutes)
    fields: dict[str, Any] = {
        "total": [column.values[-1] for column in minutes.total.columns],
        "rest": [column.values[-1] for column in (minutes.median, minutes.p99, minutes.state)],
        "policies": busiest,
        "top": [row for row in top if len(str(row["key"])) <= MAX_TEXT_LENGTH],
        "marks": [mark for mark in history.marks if end - MINUTE * 1000 <= mark.at < end],
    }
    while len(data := zlib.compress(json.dumps(fields, separators=(",", ":")).encode())) > MAX_MINUTE_BYTES:
        fields["policies"] = dict(list(fields["policies"].items())[: len(fields["policies"]) // 2])
        fields["top"] = fields["top"][: len(fields["top"]) // 2]
        fields["marks"] = fields["marks"][:1]
    return data


def decode_minute(data: bytes | None) -> dict[str, Any] | None:
    """Read a minute; None if it is not what `encode_minute` writes."""
    if data is None:
        return None
    try:
        fields = json.loads(zlib.decompressobj().decompress(data, MAX_READ_BYTES))
        numbers = [*fields["total"], *fields["rest"], *(each for row in fields["policies"].values() for each in row)]
        valid = len(fields["total"]) == len(fields["rest"]) == 3 and all(isinstance(each, int) for each in numbers)  # noqa: PLR2004 - columns
        return fields if valid and isinstance(fields["top"], list) and isinstance(fields["marks"], list) else None
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
