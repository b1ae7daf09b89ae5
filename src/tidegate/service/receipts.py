"""Reservations by id, without keeping any: the id is a signed receipt that says what was charged, where and when.

So a restart loses no reservation, and any process that shares the secret (and the store) can settle it. That each is
settled once only is counted by the store itself: the first to take the single permit of the receipt's own key settles,
everybody after is told that it is settled already. A store in memory, whose entries are few and which nobody shares, is
spared that: `Marks` remembers what was settled.
"""

from __future__ import annotations

import binascii
import heapq
import hmac
import json
import secrets
import threading
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from tidegate.core import Limit
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.limiter import seconds
from tidegate.policy import Policy, normal_key
from tidegate.reservation import AsyncReservation
from tidegate.stores.cancellation import Background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.limiter import AsyncLimiter
    from tidegate.stores import Store

SETTLED: Final = "tidegate.settled"
SIZE: Final = 16  # bytes of a signature
LONGEST_TTL: Final = 86_400
LONGEST: Final = 16_384  # characters of a receipt
MOST: Final = 200_000  # settled reservations that are remembered beside a store in memory
UNKNOWN: Final = "no such reservation: its id is not one of ours, or it was made under another secret"


class AlreadySettledError(RateLimitError):
    """Somebody has committed or cancelled this reservation before."""


class Receipt(NamedTuple):
    """What a receipt says."""

    number: str
    slot: str
    key: str | list[str]
    costs: dict[str, int]
    at: int
    charged: bool
    ttl: float

    @property
    def end(self) -> int:
        """Until when it can be read, in microseconds since 1970."""
        return self.at + round(2 * self.ttl * SECOND)

    def again(self, limiter: AsyncLimiter, policy: Policy) -> AsyncReservation:
        """Make the reservation again; limits that came or went meanwhile are not corrected."""
        costs = tuple(self.costs.get(limit.name, 0) for limit in policy.limits)
        decision = Decision((self.charged, self.at, policy.limits, (), None))
        left = self.ttl - max(0, limiter.clock.ns() // 1000 - self.at) / SECOND
        settle = limiter._settle  # noqa: SLF001 - what `reserve` itself hands to a reservation
        return AsyncReservation(settle, limiter.clock, policy, normal_key(self.key), costs, decision, left)


class Marks:
    """Remembers which receipts were settled while they can be read; the first to end go if there are too many."""

    def __init__(self, most: int = MOST) -> None:
        """Remember at most so many."""
        self._most = most
        self._lock = threading.Lock()
        self._settled: set[str] = set()
        self._ends: list[tuple[int, str]] = []  # a heap: when a receipt is read no more

    def take(self, number: str, end: int, now: int) -> bool:
        """Mark a receipt that is read until `end` as settled; False: it is already."""
        with self._lock:
            if number in self._settled:
                return False
            while self._ends and (self._ends[0][0] < now or len(self._ends) >= self._most):
                self._settled.discard(heapq.heappop(self._ends)[1])
            self._settled.add(number)
            heapq.heappush(self._ends, (end, number))
            return True

    def drop(self, number: str) -> None:
        """Take a mark back; should it be made again, it ends at the same time."""
        with self._lock:
            self._settled.discard(number)


MARKS: Final[WeakKeyDictionary[Store, Marks]] = WeakKeyDictionary()  # whoever settles over a store has to know


class Receipts:
    """Writes and reads receipts."""

    def __init__(self, store: Store, secret: bytes, background: Background | None = None) -> None:
        """Sign with the secret, or, without one, with a new one that only this process has.

        Settlements whose task is cancelled are completed in the `background`.
        """
        self._store = store
        self._background = background or Background()
        self._marks = MARKS.setdefault(store, Marks()) if store.instant else None
        self._secret = blake2b(secret, digest_size=32).digest() if secret else secrets.token_bytes(32)

    @staticmethod
    def check_ttl(ttl: object) -> float:
        """Take a time to settle within."""
        found = seconds("ttl", ttl)
        if not 0 < found <= LONGEST_TTL:
            raise ConfigError(f"must be above 0 and at most {LONGEST_TTL} seconds, not {ttl!r}", field="ttl")
        return found

    def write(self, slot: str, held: AsyncReservation, ttl: float) -> str:
        """Write the receipt of a reservation."""
        costs = {limit.name: cost for limit, cost in zip(held.policy.limits, held.costs, strict=True)}
        charged = any(at is not None for at in held.ats)  # not where the store was lost and the policy says allow
        said = json.dumps([secrets.token_hex(8), slot, held.key, costs, held.decision.at, charged, ttl]).encode()
        return f"{_text(said)}.{_text(self._sign(said))}"

    def _sign(self, said: bytes) -> bytes:
        return blake2b(said, key=self._secret, digest_size=SIZE).digest()

    def read(self, receipt: str) -> Receipt:
        """Check a receipt and read it."""
        if not isinstance(receipt, str) or len(receipt) > LONGEST:
            raise ResourceUnknown(UNKNOWN)
        try:
            head, _, tail = receipt.partition(".")
            said, signature = urlsafe_b64decode(_padded(head)), urlsafe_b64decode(_padded(tail))
        except (ValueError, binascii.Error):
            raise ResourceUnknown(UNKNOWN) from None
        if not hmac.compare_digest(signature, self._sign(said)):
            raise ResourceUnknown(UNKNOWN)
        found = Receipt(*json.loads(said))
        if self._store.clock.ns() // 1000 > found.end:
            raise ResourceUnknown("this reservation ended long ago: the estimate stands")
        return found

    async def settle(self, receipt: Receipt, settle: Callable[[], Awaitable[None]]) -> None:
        """Settle once; a settlement that was begun is completed even if its task is cancelled."""
        if self._marks is not None:
            await self._settle(receipt, settle)
        else:
            await self._background.complete(self._settle(receipt, settle))

    async def _settle(self, receipt: Receipt, settle: Callable[[], Awaitable[None]]) -> None:
        """Mark the receipt as settled, then settle; take the mark back if that was not possible."""
        if not await self._mark(receipt):
            raise AlreadySettledError("this reservation is settled already")
        try:
            await settle()
        except Exception:
            if self._marks is not None:
                self._marks.drop(receipt.number)
            else:
                await self._store.apply_async("reset", ((once(receipt), receipt.number, (0,)),))
            raise

    async def _mark(self, receipt: Receipt) -> bool:
        """Take the receipt's only permit; its key is its number: there are several ways to write the same bytes."""
        if self._marks is not None:
            return self._marks.take(receipt.number, receipt.end, self._store.clock.ns() // 1000)
        mark = (await self._store.apply_async("acquire", ((once(receipt), receipt.number, (1,)),)))[0]
        if isinstance(mark, LocalDecision):
            raise StoreUnavailable("the store cannot be asked whether this reservation is settled already")
        return mark.allowed


def once(receipt: Receipt) -> Policy:
    """Allow one settlement, in a window that opens with it and lasts longer than the receipt will still be read."""
    return Policy(SETTLED, (Limit(1, 2 * receipt.ttl + 1, "fixed_window", name="once"),))


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _padded(text: str) -> bytes:
    return text.encode("ascii") + b"=" * (-len(text) % 4)
