"""Idempotency keys in a shared store: a call with a key is charged once, whichever process answers it.

The key is a small value in the store, written in the same atomic step as the charge or the correction: one `apply` with
asks and a write. So either both are written or neither is, also after kill -9, and a call that finds the value knows
that it was charged before, and when. A denied call writes nothing: its repetition is decided again. The value is a
digest of the request, so that the same key with another request is refused.

In a Redis Cluster the value is in the slot of the charged key, so an idempotency key is unique for each policy and key
of a subject: with another policy or key it is another call. If the store is in memory or keeps no values, only
`http.replays` remembers keys; the same applies to charges while the store is unavailable.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from tidegate.core._algorithms import View
from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS, Decision
from tidegate.errors import ConfigError, RateLimitError, ValueConflict
from tidegate.service._decisions.shared_store import is_shared
from tidegate.stores._outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores._values import Collection, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Key
    from tidegate.stores import Store
    from tidegate.stores._base import Ask

log: logging.Logger = logging.getLogger("tidegate.service")

REMEMBER_FOR: Final = 600 * SECOND  # how long a key is remembered
CALLS: Final = "tidegate.calls"
DIGEST_BYTES: Final = 16
MISMATCH_ADVICE: Final = "use a new idempotency key for a new request"


class IdempotencyMismatchError(RateLimitError):
    """The idempotency key belongs to another request."""


class KeyedCall:
    """A request with an idempotency key. `repeated` is set if the store shows that it was charged before."""

    __slots__ = ("name", "repeated", "request")

    def __init__(self, key: bytes, request: bytes) -> None:
        """Name the call by a digest of its key; `request` is a digest of the request."""
        self.name: str = blake2b(key, digest_size=16).hexdigest()
        self.request: bytes = request
        self.repeated: bool = False

    @classmethod
    def read(cls, key: bytes, verb: str, body: bytes) -> KeyedCall:
        """Build the call of a request."""
        return cls(key, blake2b(verb.encode() + b" " + body, digest_size=DIGEST_BYTES).digest())

    def part(self, number: int) -> KeyedCall:
        """Return one of the calls of a batch."""
        return KeyedCall(f"{self.name} {number}".encode(), self.request)

    @property
    def caller(self) -> bytes:
        """Bytes that identify this request."""
        return self.name.encode() + self.request

    def number_at(self, instant: int) -> str:
        """Return the number of a reservation that was charged at this instant: the same for each repetition."""
        return blake2b(f"{self.name} {instant}".encode(), digest_size=8).hexdigest()


class KeyedStore:
    """A shared store as one keyed call sees it; has the `apply_async` of that store.

    A call that is cancelled while the store decides keeps its charge, for its repetition: see `Store.apply_async`.
    """

    def __init__(self, store: Store, call: KeyedCall, policy: str, key: Key) -> None:
        """Wrap this store, for a call that charges this key of this policy."""
        self._store = store
        self._call = call
        self._collection = Collection(CALLS, beside=(policy, key), listed=False)

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply the verb, unless the call was charged before: then return the current state of the limits.

        A repeated call is allowed, at the instant at which it was charged. A correction is made once, too: while the
        store is unavailable, it raises StoreUnavailable.
        """
        once = VERBS[verb].charges or VERBS[verb].corrects
        if not once or not is_shared(self._store):
            return await self._store.apply_async(verb, asks, now, at)
        try:
            return await self._store.apply_async(verb, asks, now, at, (self._write,))
        except ValueConflict as conflict:
            charged_at = self._check_request(conflict)
        except ConfigError as error:  # the keys of the asks are in several slots of a cluster
            log.debug("could not store an idempotency key, only this process remembers it: %s", error)
            return await self._store.apply_async(verb, asks, now, at)
        current = [(policy, key, (0,) * len(costs)) for policy, key, costs in asks]
        return [_allowed(each, charged_at) for each in await self._store.apply_async("peek", current, now)]

    async def forget(self) -> None:
        """Delete the value: the call was refunded, or it failed."""
        if is_shared(self._store):
            with suppress(*OUTAGE_ERRORS):
                await self._store.delete_value_async(self._collection, self._call.name)

    @property
    def _write(self) -> Write:
        return Write(self._collection, self._call.name, self._call.request, REMEMBER_FOR, expected=None)

    def _check_request(self, conflict: ValueConflict) -> int:
        """Return when the call was charged; refuse another request with the same key."""
        if conflict.found is None or conflict.found.data != self._call.request:
            raise IdempotencyMismatchError(MISMATCH_ADVICE) from None
        self._call.repeated = True
        return conflict.found.written


def was_repeated(call: KeyedCall | None) -> bool:
    """Return whether a call was charged before."""
    return call is not None and call.repeated


async def forget_call(keyed_store: KeyedStore | None) -> None:
    """Delete the value of a call that was not charged in the end."""
    if keyed_store is not None:
        await keyed_store.forget()


def _allowed(decision: Decision, at: int) -> Decision:
    """Return an allowed decision with the current numbers, for a repeated call."""
    views = tuple(View((remaining, 0, reset)) for remaining, _, reset in decision.views)
    return Decision.of_views(at, decision.policy_limits, views, within_limits=True)
