"""Reservations by id, without keeping any: the id is a signed receipt that says what was charged, where and when.

So nothing has to be bounded or forgotten, a restart loses no reservation, and any process that shares the secret (and
the store) can settle it. That each is settled once only is counted by the store itself: the first to take the single
permit of the receipt's own key settles, everybody after is told that it is settled already.
"""

from __future__ import annotations

import binascii
import hmac
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core import Limit
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.limiter import seconds
from tidegate.policy import Policy, normal_key
from tidegate.reservation import AsyncReservation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.limiter import AsyncLimiter
    from tidegate.stores import Store

SETTLED: Final = "tidegate.settled"
SIZE: Final = 16  # bytes of a signature
LONGEST_TTL: Final = 86_400
LONGEST: Final = 16_384  # characters of a receipt
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

    def again(self, limiter: AsyncLimiter, policy: Policy) -> AsyncReservation:
        """Make the reservation again; limits that came or went meanwhile are not corrected."""
        costs = tuple(self.costs.get(limit.name, 0) for limit in policy.limits)
        decision = Decision((self.charged, self.at, policy.limits, (), None))
        left = self.ttl - max(0, limiter.clock.ns() // 1000 - self.at) / SECOND
        settle = limiter._settle  # noqa: SLF001 - what `reserve` itself hands to a reservation
        return AsyncReservation(settle, limiter.clock, policy, normal_key(self.key), costs, decision, left)


class Receipts:
    """Writes and reads receipts."""

    def __init__(self, store: Store, secret: bytes) -> None:
        """Sign with the secret, or, without one, with a new one that only this process has."""
        self._store = store
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
        charged = bool(held.decision[0])
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
        if self._store.clock.ns() // 1000 > found.at + 2 * found.ttl * SECOND:
            raise ResourceUnknown("this reservation ended long ago: the estimate stands")
        return found

    async def settle(self, receipt: Receipt, settle: Callable[[], Awaitable[None]]) -> None:
        """Settle once: take the receipt's only permit, then settle; give it back if that was not possible."""
        key = receipt.number  # not the text: there are several ways to write the same bytes
        # The window opens now and lasts longer than the receipt will still be read.
        policy = Policy(SETTLED, (Limit(1, 2 * receipt.ttl + 1, "fixed_window", name="once"),))
        mark = (await self._store.apply_async("acquire", ((policy, key, (1,)),)))[0]
        if isinstance(mark, LocalDecision):
            raise StoreUnavailable("the store cannot be asked whether this reservation is settled already")
        if not mark.allowed:
            raise AlreadySettledError("this reservation is settled already")
        try:
            await settle()
        except BaseException:
            await self._store.apply_async("reset", ((policy, key, (0,)),))
            raise


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _padded(text: str) -> bytes:
    return text.encode("ascii") + b"=" * (-len(text) % 4)
