"""Idempotency keys in a shared store: a call with a key is charged once, whichever process answers it.

The key is a write-once entry in the store (see `write_once`), written in the same atomic step as the charge: all asks
of one `apply` are decided together. So either both are written or neither is, and a call that finds the entry knows
that it was charged before, and when. A denied call writes no entry: its repetition is decided again. The entry stores a
digest of the request, so that the same key with another request is refused.

If the store is in memory, only `http.replays` remembers keys: there is no other process. The same applies to a Redis
cluster that keeps the two entries in different slots, and while the store is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, RateLimitError
from tidegate.service.decisions.write_once import (
    NUMBER_BYTES,
    digest_number,
    read_numbers,
    was_written,
    write_once_policy,
    written_at,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tidegate.stores import Store
    from tidegate.stores.base import Ask

log: logging.Logger = logging.getLogger("tidegate.service")

REMEMBER_FOR: Final = 600 * SECOND  # how long a key is remembered
CALL_POLICY: Final = write_once_policy("tidegate.call", REMEMBER_FOR / SECOND)
CHARGING_VERBS: Final = ("acquire", "hold")
ABANDONED_TASKS: Final[set[asyncio.Task[list[Decision]]]] = set()  # an event loop holds only weak references to tasks
MISMATCH_ADVICE: Final = "use a new idempotency key for a new request"


class IdempotencyMismatchError(RateLimitError):
    """The idempotency key belongs to another request."""


class KeyedCall:
    """A request with an idempotency key. `repeated` is set if the store shows that it was charged before."""

    __slots__ = ("name", "repeated", "request")

    def __init__(self, key: bytes, request: int) -> None:
        """Name the call by a digest of its key; `request` is a digest of the request."""
        self.name: str = blake2b(key, digest_size=16).hexdigest()
        self.request: int = request
        self.repeated: bool = False

    @classmethod
    def read(cls, key: bytes, verb: str, body: bytes) -> KeyedCall:
        """Build the call of a request."""
        return cls(key, digest_number(verb.encode(), body))

    def part(self, number: int) -> KeyedCall:
        """Return one of the calls of a batch."""
        return KeyedCall(f"{self.name} {number}".encode(), self.request)

    @property
    def number(self) -> int:
        """A number that identifies this request, small enough for a write-once entry."""
        return digest_number(self.name.encode(), self.request.to_bytes(NUMBER_BYTES, "big"))

    def number_at(self, instant: int) -> str:
        """Return the number of a reservation that was charged at this instant: the same for each repetition."""
        return blake2b(f"{self.name} {instant}".encode(), digest_size=8).hexdigest()


class KeyedStore:
    """A shared store as one keyed call sees it; has the `apply_async` of that store."""

    def __init__(self, store: Store, call: KeyedCall) -> None:
        """Wrap this store."""
        self._store = store
        self._call = call

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply the verb, unless the call was charged before: then return the current state of the limits.

        A repeated call is allowed, at the instant at which it was charged.
        """
        if verb not in CHARGING_VERBS:
            return await self._store.apply_async(verb, asks, now, at)
        try:
            entry, *decisions = await complete(self._store.apply_async(verb, (self._entry, *asks), now, at))
        except ConfigError as error:  # a cluster keeps the two entries on different nodes
            log.debug("could not store an idempotency key, only this process remembers it: %s", error)
            return await self._store.apply_async(verb, asks, now, at)
        if not self._was_charged(entry):
            return decisions
        return [_allowed(decision, written_at(entry)) for decision in decisions]

    async def write_entry(self) -> bool:
        """Write the entry alone, for a call that charges nothing; False if it was written before."""
        (entry,) = await self._store.apply_async("acquire", (self._entry,))
        return not self._was_charged(entry)

    async def forget(self) -> None:
        """Delete the entry: the call was refunded, or it failed."""
        await self._store.apply_async("reset", (self._entry,))

    @property
    def _entry(self) -> Ask:
        return CALL_POLICY, self._call.name, (1, self._call.request)

    def _was_charged(self, entry: Decision) -> bool:
        """Return whether the entry was written before; refuse another request with the same key."""
        if isinstance(entry, LocalDecision) or not was_written(entry):
            return False
        if read_numbers(entry) != (self._call.request,):
            raise IdempotencyMismatchError(MISMATCH_ADVICE)
        self._call.repeated = True
        return True


async def complete(operation: Coroutine[Any, Any, list[Decision]]) -> list[Decision]:
    """Complete an operation on a store even if the caller is cancelled.

    A store refunds a cancelled call. A repetition that arrives before the refund finds the entry and would be allowed
    for a charge that is then refunded. So the charge of a keyed call stays, for the repetition.
    """
    task = asyncio.ensure_future(operation)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        ABANDONED_TASKS.add(task)
        task.add_done_callback(_forget_abandoned)
        raise


def _forget_abandoned(task: asyncio.Task[list[Decision]]) -> None:
    ABANDONED_TASKS.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log that it never was


def was_repeated(call: KeyedCall | None) -> bool:
    """Return whether a call was charged before."""
    return call is not None and call.repeated


async def forget_call(keyed_store: KeyedStore | None) -> None:
    """Delete the entry of a call that was not charged in the end."""
    if keyed_store is not None:
        await keyed_store.forget()


def _allowed(decision: Decision, at: int) -> Decision:
    """Turn the denial that a repeated call shares with its entry into an allowed decision with the current numbers."""
    views = tuple((remaining, 0, reset) for remaining, _, reset in decision.views)
    return Decision.of_views(at, decision.policy_limits, views, within_limits=True)
