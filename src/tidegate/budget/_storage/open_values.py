"""Open batches as small values of the store, written and deleted in the steps that charge and settle the batches.

A batch belongs to the budget object that reserved it: its owner. The owner has a value, too, whose time to live is the
owner's lease: it is written with the first batch, and renewed several times per lease while batches are open. So the
batches of a killed process are known to be left when its lease has ended. A denied check, or a call that reads usage,
refunds them, and writes RETURNED in their place, in the same step: each is returned once, even if several try.

An owner that was suspended for longer than its lease finds that mark when it settles the batch. The actual cost is
charged again then, even beyond a quota.
"""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.fork import at_fork
from tidegate.core._bounds import SECOND
from tidegate.errors import ValueConflict
from tidegate.stores._values import Collection, Write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.budget._storage.settlements import Settlement
    from tidegate.budget._storage.sqlite import Completion
    from tidegate.stores._base import Ask
    from tidegate.stores._values import Value

    Costs = tuple[int, ...]
    Values = Mapping[str, Value]

log: logging.Logger = logging.getLogger("tidegate.budget")

LEASE_SECONDS: float = 30.0  # for which an owner counts as alive after it was seen
RENEWALS_PER_LEASE: float = 3
BATCH_TTL: Final = 40 * 86_400 * SECOND  # of a batch: longer than the longest tier
RETURNED: Final = b"returned"
RETURNED_TTL: Final = 7 * 86_400 * SECOND  # after that, a late settlement counts as made
RETURN_INTERVAL: Final = SECOND  # between two searches for batches of ended owners
dump = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would create an encoder for each call


class ApplyValues(NamedTuple):
    """A call of the store: the verb, the asks, the instant of the charge to correct, and values and completed tasks."""

    verb: str
    asks: tuple[Ask, ...]
    at: int | None = None
    writes: tuple[Write, ...] = ()
    completion: Completion | None = None


class ListValues(NamedTuple):
    """Reads a collection."""

    collection: Collection


if TYPE_CHECKING:
    ValueStep = ApplyValues | ListValues


class OpenValues:
    """The open batches of a budget, of all processes. Methods that end in `_flow` yield ValueSteps."""

    def __init__(self, policy: str, key: Key, batch_ttl: int, clock: Clock) -> None:
        """Keep the batches charged to this policy and key; they are returned after `batch_ttl` microseconds."""
        self._open = open_collection(policy, key)
        self._owners = Collection("budget owners", (policy, key))
        self._batch_ttl = batch_ttl
        self._clock = clock
        self._lease = round(LEASE_SECONDS * SECOND)
        self._start_over()
        at_fork(child=self._start_over)

    def _start_over(self) -> None:
        """Become another owner, in a forked process too: the open batches of the parent stay with the parent."""
        self.owner: str = secrets.token_hex(8)
        self._numbers = count()
        self._held: dict[str, bytes] = {}  # by the names of batches that are being checked, or open: as first written
        self._renewed: int | None = None  # when the lease was last renewed, in steady time
        self._searched: int | None = None

    # ---- check -------------------------------------------------------------------------------------------------------

    def reserve(self, policy: Policy, costs: Costs) -> tuple[str, tuple[Write, ...]]:
        """Name a batch that is going to be charged; returns the writes of the step that charges it."""
        name = f"{self.owner}:{next(self._numbers)}"
        data = self._held[name] = encode(policy, costs)
        write = Write(self._open, name, data, BATCH_TTL, None)
        return name, (write, *self._renewals())

    def confirm(self, writes: tuple[Write, ...], began: int) -> None:
        """Remember that a step that began at this steady instant was made; one of its writes may renew the lease."""
        if any(write.collection is self._owners for write in writes):
            self._renewed = began

    def release(self, name: str) -> None:
        """Forget a batch that was denied, cancelled or settled; if it is stored after all, it is returned later."""
        self._held.pop(name, None)

    def _renewals(self) -> tuple[Write, ...]:
        renewed, now = self._renewed, self._clock.steady()
        if renewed is not None and 0 <= now - renewed < self._lease / RENEWALS_PER_LEASE:
            return ()
        return (Write(self._owners, self.owner, b"", self._lease),)

    def renew_flow(self) -> Flow[ValueStep, bool]:
        """Renew the lease, if batches are open; returns whether there are."""
        began = self._clock.steady()
        if self._held and (writes := self._renewals()):
            yield ApplyValues("acquire", (), writes=writes)
            self._renewed = began
        return bool(self._held)

    def leave_flow(self) -> Flow[ValueStep, None]:
        """Delete the value of this owner; batches that are still open can be returned at once."""
        if self._renewed is not None:
            yield ApplyValues("acquire", (), writes=(Write(self._owners, self.owner, None),))

    # ---- settle ------------------------------------------------------------------------------------------------------

    def settle_flow(self, settlement: Settlement) -> Flow[ValueStep, None]:
        """Correct the charge of a batch and its value. It can be repeated if the store did not answer."""
        policy, unlimited, key, at, name, share, completion = settlement
        stored = self._held.get(name) if share.first else None
        if stored is None:
            stored = encode(policy, share.before, None if share.first else at)
        after = dict(zip(names(policy), share.after, strict=True))
        while True:
            last = not any(after.values())
            data = None if last else encode(policy, tuple(after.values()), at)
            write = Write(self._open, name, data, 0 if last else BATCH_TTL, stored)
            asks = ((policy, key, share.corrections),) if any(share.corrections) else ()
            try:
                yield ApplyValues("adjust" if asks else "acquire", asks, at, (write,), completion)
            except ValueConflict as conflict:
                if conflict.found is None:  # settled before: the answer was lost
                    return self.release(name)
                if conflict.found.data == RETURNED:
                    break
                stored = conflict.found.data  # another thread has settled a part
                settled = zip(names(policy), share.before, share.after, strict=True)
                left = decode(conflict.found)[1]
                after = {limit: max(0, left.get(limit, 0) - (old - new)) for limit, old, new in settled}
            else:
                return self.release(name) if last else None
        charge = tuple(cost - new for cost, new in zip(share.actual, share.unreserved, strict=True))
        writes = () if any(share.after) else (Write(self._open, name, None, 0, RETURNED),)
        asks = ((unlimited, key, charge),) if any(charge) else ()
        with suppress(ValueConflict):  # charged before: the answer was lost
            yield ApplyValues("acquire", asks, None, writes, completion)
        return self.release(name)

    # ---- return ------------------------------------------------------------------------------------------------------

    def return_ended_flow(self, policy: Policy, key: Key, now: int, *, at_once: bool = False) -> Flow[ValueStep, int]:
        """Refund the batches of owners that have ended, and expired ones, at most once per second; returns how many."""
        steady = self._clock.steady()
        if not at_once and self._searched is not None and 0 <= steady - self._searched < RETURN_INTERVAL:
            return 0
        self._searched = steady
        found = yield from self._ended_flow(now)
        total = 0
        for name, value in found:
            at, reserved = decode(value)
            back = tuple(-reserved.get(limit, 0) for limit in names(policy))
            write = Write(self._open, name, RETURNED, RETURNED_TTL, value.data)
            with suppress(ValueConflict):  # another process was first
                yield ApplyValues("adjust", ((policy, key, back),), at, (write,))
                total += 1
        if total:
            log.info("returned %d batches that a process has left open", total)
        return total

    def _ended_flow(self, now: int) -> Flow[ValueStep, list[tuple[str, Value]]]:
        """List the batches that nobody is going to settle."""
        values: Values = yield ListValues(self._open)  # before the owners: these are written with their first batch
        if not values:
            return []
        owners: Values = yield ListValues(self._owners)
        return [
            (name, value)
            for name, value in values.items()
            if value.data != RETURNED and self._is_left(name, value, owners, now)
        ]

    def _is_left(self, name: str, value: Value, owners: Values, now: int) -> bool:
        owner = name.partition(":")[0]
        is_known = name in self._held if owner == self.owner else owner in owners
        return not is_known or value.written + self._batch_ttl <= now

    def list_flow(self, policy: Policy) -> Flow[ValueStep, list[tuple[int, Costs]]]:
        """Return the instant of each open batch of all owners, and what is still reserved for it at each limit."""
        values: Values = yield ListValues(self._open)
        found = [decode(value) for value in values.values() if value.data != RETURNED]
        return [(at, tuple(reserved.get(name, 0) for name in names(policy))) for at, reserved in found]


def renewal_interval() -> float:
    """Return after how many seconds a lease is renewed."""
    return LEASE_SECONDS / RENEWALS_PER_LEASE


def open_collection(policy: str, key: Key) -> Collection:
    """Return the collection of the open batches that are charged to a policy and key."""
    return Collection("budget batches", (policy, key))


def names(policy: Policy) -> list[str]:
    """Return the names of the limits of a policy."""
    return [limit.name for limit in policy.limits]


def encode(policy: Policy, costs: Costs, at: int | None = None) -> bytes:
    """Write what is still reserved, by limit; `at` is the instant of the charge, if it is not that of the value."""
    reserved = {name: cost for name, cost in zip(names(policy), costs, strict=True) if cost}
    return dump([at, reserved]).encode()


def decode(value: Value) -> tuple[int, dict[str, int]]:
    """Read the instant of the charge, and what is still reserved, by limit."""
    at, reserved = json.loads(value.data)
    return value.written if at is None else at, reserved
