"""Idempotency keys in a shared store: a call with a key is charged once, whichever process answers it.

The key is a mark in the store (see `marks`), made in the same atomic step as the charge: all asks of one `apply` are
decided together. So either both are made or neither is, and a call that finds the mark knows that it was charged
before, and when. A denied call makes no mark: repeated, it is decided anew. The mark remembers a digest of the request,
so that the same key with another request is refused.

Where the store is in memory, `http.replays` alone remembers keys: nobody else can be asked. The same goes for a Redis
cluster that keeps the two entries in different slots, and for the time while a store is lost.
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
    is_repeated,
    made_at,
    mark_policy,
    number_from,
    numbers_of,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tidegate.stores import Store
    from tidegate.stores.base import Ask

log = logging.getLogger("tidegate.service")

REMEMBER_FOR: Final = 600 * SECOND  # how long a key is remembered
CALL_POLICY: Final = mark_policy("tidegate.call", REMEMBER_FOR / SECOND)
CHARGING_VERBS: Final = ("acquire", "hold")
ABANDONED_TASKS: Final[set[asyncio.Task[list[Decision]]]] = set()  # an event loop keeps no task by itself
MISMATCH_ADVICE: Final = "use a new idempotency key for a new request"


class IdempotencyMismatchError(RateLimitError):
    """The idempotency key belongs to another request."""


class KeyedCall:
    """One request with an idempotency key. `repeated` tells whether it was found to have been charged before."""

    __slots__ = ("name", "repeated", "request")

    def __init__(self, key: bytes, request: int) -> None:
        """Name it by a digest of its key; `request` is a digest of what is asked."""
        self.name = blake2b(key, digest_size=16).hexdigest()
        self.request = request
        self.repeated = False

    @classmethod
    def read(cls, key: bytes, verb: str, body: bytes) -> KeyedCall:
        """Read a request."""
        return cls(key, number_from(verb.encode(), body))

    def part(self, number: int) -> KeyedCall:
        """Give one of several calls that are made by one request."""
        return KeyedCall(f"{self.name} {number}".encode(), self.request)

    @property
    def number(self) -> int:
        """Tell this request from others, as a number that a mark can remember."""
        return number_from(self.name.encode(), self.request.to_bytes(NUMBER_BYTES, "big"))

    def number_at(self, instant: int) -> str:
        """Give the number of what the call got when it was charged at this instant: the same for each repetition."""
        return blake2b(f"{self.name} {instant}".encode(), digest_size=8).hexdigest()


class KeyedStore:
    """Asks a shared store for one keyed call; has the `apply_async` of that store."""

    def __init__(self, store: Store, call: KeyedCall) -> None:
        """Ask this store."""
        self._store = store
        self._call = call

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply the verb to one key, unless that was done before: then tell how the key is now.

        A repeated call is allowed at the instant at which it was charged.
        """
        if verb not in CHARGING_VERBS:
            return await self._store.apply_async(verb, asks, now, at)
        try:
            mark, *decisions = await finished(self._store.apply_async(verb, (self._mark, *asks), now, at))
        except ConfigError as error:  # a cluster keeps them apart
            log.debug("an idempotency key is remembered by this process alone: %s", error)
            return await self._store.apply_async(verb, asks, now, at)
        if not self._found(mark):
            return decisions
        return [_allowed(decision, made_at(mark)) for decision in decisions]

    async def take(self) -> bool:
        """Make the mark by itself, for a call that charges nothing; False: it was made before."""
        (mark,) = await self._store.apply_async("acquire", (self._mark,))
        return not self._found(mark)

    async def forget(self) -> None:
        """Take the mark back: what the call was charged was given back, or it was never made."""
        await self._store.apply_async("reset", (self._mark,))

    @property
    def _mark(self) -> Ask:
        return CALL_POLICY, self._call.name, (1, self._call.request)

    def _found(self, mark: Decision) -> bool:
        """Tell whether the mark was made before; refuse another request with the same key."""
        if isinstance(mark, LocalDecision) or not is_repeated(mark):
            return False
        if numbers_of(mark) != (self._call.request,):
            raise IdempotencyMismatchError(MISMATCH_ADVICE)
        self._call.repeated = True
        return True


async def finished(asking: Coroutine[Any, Any, list[Decision]]) -> list[Decision]:
    """Ask a store such that the question is finished even if the caller is cancelled.

    A store gives back what a cancelled call took. A repetition that comes in between finds the mark, and would be
    allowed for a charge that is given back. So the charge of a keyed call stays, for the repetition.
    """
    task = asyncio.ensure_future(asking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        ABANDONED_TASKS.add(task)
        task.add_done_callback(_forget_abandoned)
        raise


def _forget_abandoned(task: asyncio.Task[list[Decision]]) -> None:
    ABANDONED_TASKS.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody is told that it never was


def was_repeated(call: KeyedCall | None) -> bool:
    """Tell whether a call was charged before."""
    return call is not None and call.repeated


async def forget(via: KeyedStore | None) -> None:
    """Forget a call that was charged nothing in the end."""
    if via is not None:
        await via.forget()


def _allowed(decision: Decision, at: int) -> Decision:
    """Turn the denial that a repeated call shares with its mark into how its limits are now."""
    views = tuple((remaining, 0, reset) for remaining, _, reset in decision.views)
    return Decision((True, at, decision[2], views, None))
