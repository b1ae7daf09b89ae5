"""Shares capacity reductions and learned quotas of an account through the store that counts it.

Processes with the same store need no bus to share refusals: the refused process writes a notice, and the others check
for notices from time to time, after they got a permit and before they use it. A notice is one small value: the last
reduction, as the message that a bus carries, with its instant by the clock of the store; and the quotas that were
learned (`learned_quotas`), so that a process that starts later knows them before its first request. A write replaces
what was read: if another process has written in between, the process reads again.

A store that keeps no values shares nothing (`Store.keeps_values`).
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.adaptive import CapacityUpdate
from tidegate.adaptive._signing import MalformedError
from tidegate.core._bounds import SECOND
from tidegate.errors import StoreUnavailable, ValueConflict
from tidegate.stores._values import Collection, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate._policy import Key
    from tidegate._runtime.flow import CallFlow
    from tidegate.stores import Store

COLLECTION: Final = "tidegate.capacity"
NAME: Final = "notice"
NOTICE_TTL: Final = 86_400 * SECOND
CHECKS_PER_PERIOD: Final = 50
MAX_CHECK_INTERVAL: Final = SECOND


class SharedNotice(NamedTuple):
    """A reduction, and when it was made, by the store's clock."""

    update: CapacityUpdate
    since: int


class StoreCalls(NamedTuple):
    """A store, and how a gate calls it: each call returns what it is called for, or an awaitable of it."""

    store: Store
    apply: Callable[..., Any]
    get_value: Callable[..., Any]


class SharedNotices:
    """The notice of one account."""

    def __init__(
        self, domain: str, key: Key, calls: StoreCalls, length: int = SECOND, limits: tuple[str, ...] = ()
    ) -> None:
        """Check rarely enough to cost little; `length` is the account's period, `limits` names its limits."""
        self._collection = Collection(COLLECTION, (domain, key), listed=False)
        self._calls = calls
        self._limits = limits
        self._was_read = False
        self._data: bytes | None = None  # as it was last read or written
        self._notice: SharedNotice | None = None
        self.quotas: tuple[int, ...] = (0,) * len(limits)  # that were learned, by limit; 0: none
        self.check_interval: int = max(1, min(length // CHECKS_PER_PERIOD, MAX_CHECK_INTERVAL))

    def read_flow(self) -> CallFlow[SharedNotice | None]:
        """Return the reduction that another process wrote since the last check; None: there is none."""
        if not self._calls.store.keeps_values:
            return None
        try:
            value = yield partial(self._calls.get_value, self._collection, NAME)
        except StoreUnavailable:
            return None
        data = None if value is None else value.data
        self._was_read = True
        if data == self._data:
            return None
        before, self._data = self._notice, data
        self._notice, quotas = decode(data)
        self.quotas = tuple(quotas.get(name, 0) for name in self._limits)
        return None if self._notice == before else self._notice

    def write_flow(self, notice: SharedNotice) -> CallFlow[bool]:
        """Write a reduction, after a check; returns False if another process has written in between."""
        return self._write_flow(notice, self.quotas)

    def write_quotas_flow(self, quotas: tuple[int, ...]) -> CallFlow[Any]:
        """Write learned quotas; if another process has written in between, read what it wrote instead."""
        if not (yield from self._write_flow(self._notice, quotas)):
            yield from self.read_flow()

    def _write_flow(self, notice: SharedNotice | None, quotas: tuple[int, ...]) -> CallFlow[bool]:
        if not self._was_read:  # the store keeps no values, or was unavailable
            return True
        data = encode(notice, dict(zip(self._limits, quotas, strict=True)))
        write = Write(self._collection, NAME, data, NOTICE_TTL, self._data)
        try:
            yield partial(self._calls.apply, "acquire", (), None, None, (write,))
        except ValueConflict:
            return False
        except StoreUnavailable:  # a notice is not worth failing a request
            return True
        self._data, self._notice, self.quotas = data, notice, quotas
        return True


def encode(notice: SharedNotice | None, quotas: Mapping[str, int]) -> bytes:
    """Return a notice as a stored value."""
    fields: dict[str, Any] = {"quotas": {name: quota for name, quota in quotas.items() if quota}}
    if notice is not None:
        fields |= {"update": notice.update.to_json().decode(), "since": notice.since}
    return json.dumps(fields).encode()


def decode(data: bytes | None) -> tuple[SharedNotice | None, dict[str, int]]:
    """Read a stored value; one that cannot be read is ignored."""
    try:
        fields = {} if data is None else json.loads(data)
        update = fields.get("update")
        notice = None if update is None else SharedNotice(CapacityUpdate.from_json(update), int(fields["since"]))
        return notice, {str(name): int(quota) for name, quota in fields.get("quotas", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError, MalformedError):
        return None, {}
