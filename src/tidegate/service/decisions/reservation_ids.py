"""Reservations by id, without keeping any: the id is a signed receipt that says what was charged, where and when.

So a restart loses no reservation, and any process on the same store can settle it: `signing` says by which keys an id
is signed. Each id is settled once: whoever makes its mark in the store settles it (see `marks`), and every later caller
is told that it is settled already. A store in memory, whose entries are few and which is not shared, is spared that:
`Marks` remembers what was settled.
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

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.fork import fork_safe
from tidegate.limiter import seconds
from tidegate.policy import normal_key
from tidegate.reservation import AsyncReservation
from tidegate.service.decisions.write_once import is_repeated, mark_policy, numbers_of
from tidegate.stores.cancellation import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.limiter import AsyncLimiter
    from tidegate.policy import Policy
    from tidegate.service.decisions.signing import SigningKeys
    from tidegate.stores import Store

SETTLED_POLICY: Final = "tidegate.settled"
SIGNATURE_BYTES: Final = 16  # bytes of a signature
MAX_TTL: Final = 86_400
MAX_ID_LENGTH: Final = 16_384  # characters of a receipt
MAX_SETTLED: Final = 200_000  # settled reservations that are remembered beside a store in memory
UNKNOWN_ID: Final = "no such reservation: its id is not one of ours, or it was made under another secret"
SETTLED_ALREADY: Final = "this reservation is settled already"


class AlreadySettledError(RateLimitError):
    """Somebody has committed or cancelled this reservation before."""


class ReservationId(NamedTuple):
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


class SettledIds:
    """Remembers which receipts were settled, for as long as these can be read.

    Bounded: with too many, the marks that end first are dropped, and every receipt that ends no later than they did
    counts as settled from then on. So a dropped mark never lets anybody settle twice.
    """

    def __init__(self, most: int = MAX_SETTLED) -> None:
        """Remember at most so many."""
        self._most = most
        self._lock = fork_safe(threading.Lock())
        self._settled: set[str] = set()
        self._ends: list[tuple[int, str]] = []  # a heap: when a receipt can no longer be read
        self._dropped = 0  # the latest end of a dropped mark

    def take(self, number: str, end: int, now: int) -> bool:
        """Mark a receipt that can be read until `end` as settled; False: it is already."""
        with self._lock:
            if number in self._settled or end <= self._dropped:
                return False
            while self._ends and (self._ends[0][0] < now or len(self._ends) >= self._most):
                ended, first = heapq.heappop(self._ends)
                self._settled.discard(first)
                self._dropped = max(self._dropped, ended)
            self._settled.add(number)
            heapq.heappush(self._ends, (end, number))
            return True


SETTLED_BY_STORE: Final[WeakKeyDictionary[Store, SettledIds]] = (
    WeakKeyDictionary()
)  # whoever settles over a store has to know


class ReservationIds:
    """Writes, reads and settles receipts."""

    def __init__(self, store: Store, keys: SigningKeys, background: BackgroundTasks | None = None) -> None:
        """Sign and verify with these keys; complete settlements of cancelled tasks in the `background`."""
        self._store = store
        self._background = background or BackgroundTasks()
        self._keys = keys
        self._marks = SETTLED_BY_STORE.setdefault(store, SettledIds()) if store.instant else None

    @staticmethod
    def check_ttl(ttl: object) -> float:
        """Take a time to settle within."""
        found = seconds("ttl", ttl)
        if not 0 < found <= MAX_TTL:
            raise ConfigError(f"must be above 0 and at most {MAX_TTL} seconds, not {ttl!r}", field="ttl")
        return found

    async def write(self, slot: str, held: AsyncReservation, ttl: float, number: str = "") -> str:
        """Write the receipt of a reservation. Receipts of the same number are settled once in all."""
        costs = {limit.name: cost for limit, cost in zip(held.policy.limits, held.costs, strict=True)}
        charged = any(at is not None for at in held.ats)  # not where the store was lost and the policy says allow
        number = number or secrets.token_hex(8)
        said = json.dumps([number, slot, held.key, costs, held.decision.at, charged, ttl]).encode()
        return f"{_text(said)}.{_text(_sign(said, (await self._keys.all())[0]))}"

    async def read(self, receipt: str) -> ReservationId:
        """Verify a receipt and read it."""
        if not isinstance(receipt, str) or len(receipt) > MAX_ID_LENGTH:
            raise ResourceUnknown(UNKNOWN_ID)
        try:
            head, _, tail = receipt.partition(".")
            said, signature = urlsafe_b64decode(_padded(head)), urlsafe_b64decode(_padded(tail))
        except (ValueError, binascii.Error):
            raise ResourceUnknown(UNKNOWN_ID) from None
        if not any(hmac.compare_digest(signature, _sign(said, key)) for key in await self._keys.all()):
            raise ResourceUnknown(UNKNOWN_ID)
        found = ReservationId(*json.loads(said))
        if self._store.clock.ns() // 1000 > found.end:
            raise ResourceUnknown("this reservation ended long ago: the estimate stands")
        return found

    async def settle(self, receipt: ReservationId, settle: Callable[[], Awaitable[None]], asker: int = 0) -> bool:
        """Settle once; False: the same asker has done so before. A settlement that was begun is always completed."""
        if self._marks is not None:
            return await self._settle(receipt, settle, asker)
        return await self._background.complete(self._settle(receipt, settle, asker))

    async def _settle(self, receipt: ReservationId, settle: Callable[[], Awaitable[None]], asker: int) -> bool:
        """Mark the receipt as settled, then settle.

        The mark stays, even if settling fails: the store may have been told all the same. Then the estimate stands.
        """
        if await self._mark(receipt, asker):
            await settle()
            return True
        return False

    async def _mark(self, receipt: ReservationId, asker: int) -> bool:
        """Mark a receipt by its number: there are several ways to write the same bytes."""
        if self._marks is not None:
            if not self._marks.take(receipt.number, receipt.end, self._store.clock.ns() // 1000):
                raise AlreadySettledError(SETTLED_ALREADY)
            return True
        policy = mark_policy(SETTLED_POLICY, 2 * receipt.ttl + 1)  # lasts longer than the receipt can be read
        mark = (await self._store.apply_async("acquire", ((policy, receipt.number, (1, asker)),)))[0]
        if isinstance(mark, LocalDecision):
            raise StoreUnavailable("the store cannot be asked whether this reservation is settled already")
        if not is_repeated(mark):
            return True
        if asker and numbers_of(mark) == (asker,):
            return False
        raise AlreadySettledError(SETTLED_ALREADY)


def _sign(said: bytes, key: bytes) -> bytes:
    return blake2b(said, key=key, digest_size=SIGNATURE_BYTES).digest()


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _padded(text: str) -> bytes:
    return text.encode("ascii") + b"=" * (-len(text) % 4)
