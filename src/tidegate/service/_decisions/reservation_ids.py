"""Reservation ids: signed strings that contain what was charged, where and when, so that no reservation is stored.

A restart loses no reservation, and any process on the same store can settle it. `signing` finds the keys that sign ids.
Each id is settled once: the first caller writes a value for it in the step that corrects the charge, and later callers
get AlreadySettledError. For a store in memory, which is not shared, and for one without values, `SettledIds` remembers
the settled ids.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from tidegate._limiter.limiter import seconds
from tidegate._limiter.reservation import AsyncReservation, ReservedCharge
from tidegate._policy import normal_key
from tidegate._runtime.fork import fork_safe
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision
from tidegate.errors import ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable, ValueConflict
from tidegate.service._decisions.shared_store import is_shared
from tidegate.stores._cancellation import BackgroundTasks
from tidegate.stores._values import Collection, Write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tidegate._limiter.base_limiter import BaseLimiter
    from tidegate._limiter.limiter import AsyncLimiter
    from tidegate._limiter.reservation import BaseReservation
    from tidegate._policy import Policy
    from tidegate._runtime.clock import Clock
    from tidegate.outbound._quota.pending_charge import AsyncPendingCharge
    from tidegate.service._decisions.signing import SigningKeys
    from tidegate.stores import Store

SETTLED: Final = "tidegate.settled"
PROVIDER_SLOT: Final = "provider:"  # starts the slots of providers; those of policies start with "("
SIGNATURE_BYTES: Final = 16  # bytes of a signature
MAX_TTL: Final = 86_400
MAX_ID_LENGTH: Final = 16_384  # characters of an id
MAX_SETTLED: Final = 200_000  # settled ids that are remembered by this process
UNKNOWN_ID: Final = "unknown reservation: the id is invalid, or was signed with another secret"
SETTLED_ALREADY: Final = "this reservation is already settled"


class UnknownReservationError(ResourceUnknown):
    """The id is invalid or has expired, or the policy of the reservation no longer exists."""


class AlreadySettledError(RateLimitError):
    """This reservation was committed or cancelled before."""


class ReservationId(NamedTuple):
    """The content of a reservation id.

    `others` were charged in the same step: the name of each policy, key, costs, time, and whether it was charged.
    `label` is what the cost of a call is recorded under.
    """

    number: str
    slot: str
    key: str | list[str]
    costs: dict[str, int]
    at: int
    charged: bool
    ttl: float
    others: Sequence[Any] = ()
    label: Sequence[Any] = ()

    @property
    def end(self) -> int:
        """When the id expires, in microseconds since 1970."""
        return self.at + round(2 * self.ttl * SECOND)

    def time_left(self, clock: Clock) -> float:
        """Return for how many more seconds the estimate can be corrected downwards."""
        return self.ttl - max(0, clock.ns() // 1000 - self.at) / SECOND

    def restore(self, limiter: AsyncLimiter, policy: Policy) -> AsyncReservation:
        """Build the reservation."""
        return AsyncReservation([self.restore_charge(limiter, policy)], limiter.clock, self.time_left(limiter.clock))

    def restore_charge(self, limiter: BaseLimiter, policy: Policy) -> ReservedCharge:
        """Build what was charged; limits that were added or removed since are not corrected."""
        costs = tuple(self.costs.get(limit.name, 0) for limit in policy.limits)
        decision = Decision.of_views(self.at, policy.limits, (), within_limits=self.charged)
        return ReservedCharge(limiter, policy, normal_key(self.key), costs, decision)


class SettledIds:
    """Remembers the ids that were settled, until they expire.

    Bounded: if there are too many, the ids that expire first are dropped. From then on, every id that expires no later
    than they did counts as settled. So no id can be settled twice.
    """

    def __init__(self, max_ids: int = MAX_SETTLED) -> None:
        """Remember at most `max_ids` ids."""
        self._max_ids = max_ids
        self._lock = fork_safe(threading.Lock())
        self._settled: dict[str, bytes] = {}  # by number: the caller that settled it
        self._ends: list[tuple[int, str]] = []  # a heap, by the time at which an id expires
        self._dropped = 0  # the latest expiry of a dropped id

    def add(self, number: str, end: int, now: int, caller: bytes = b"") -> bool:
        """Remember an id that expires at `end` as settled; False if it is already."""
        with self._lock:
            if number in self._settled or end <= self._dropped:
                return False
            while self._ends and (self._ends[0][0] < now or len(self._ends) >= self._max_ids):
                ended, first = heapq.heappop(self._ends)
                self._settled.pop(first, None)
                self._dropped = max(self._dropped, ended)
            self._settled[number] = caller
            heapq.heappush(self._ends, (end, number))
            return True

    def remove(self, number: str) -> None:
        """Forget an id whose settlement was not made."""
        with self._lock:
            self._settled.pop(number, None)

    def settled_by(self, number: str) -> bytes | None:
        """Return the caller that settled an id; None if that is unknown."""
        return self._settled.get(number)


# By store: all that settle reservations of one store in this process share one set.
SETTLED_BY_STORE: Final[WeakKeyDictionary[Store, SettledIds]] = WeakKeyDictionary()


class ReservationIds:
    """Writes, reads and settles reservation ids."""

    def __init__(self, store: Store, keys: SigningKeys, background: BackgroundTasks | None = None) -> None:
        """Sign and verify with these keys; complete settlements of cancelled tasks in the `background`."""
        self._store = store
        self._background = background or BackgroundTasks()
        self._keys = keys
        self._settled = SETTLED_BY_STORE.setdefault(store, SettledIds())

    @staticmethod
    def check_ttl(ttl: object) -> float:
        """Check the time within which a reservation has to be settled."""
        found = seconds("ttl", ttl)
        if not 0 < found <= MAX_TTL:
            raise ConfigError(f"must be above 0 and at most {MAX_TTL} seconds, not {ttl!r}", field="ttl")
        return found

    async def write(
        self,
        slot: str,
        reservation: BaseReservation,
        ttl: float,
        number: str = "",
        label: Sequence[Any] = (),
    ) -> str:
        """Write the id of a reservation. Of all ids with the same number, only one can be settled.

        `label` is kept with it: see `ReservationId`.
        """
        first, *others = reservation.charges
        number = number or secrets.token_hex(8)
        fields: list[Any] = [number, slot, *_describe(first), ttl]
        if others or label:
            fields += [[(each.policy.name, *_describe(each)) for each in others], label]
        payload = json.dumps(fields).encode()
        return f"{_encode(payload)}.{_encode(_sign(payload, (await self._keys.all())[0]))}"

    async def read(self, reservation_id: str) -> ReservationId:
        """Verify an id and read its content."""
        if not isinstance(reservation_id, str) or len(reservation_id) > MAX_ID_LENGTH:
            raise UnknownReservationError(UNKNOWN_ID)
        try:
            head, _, tail = reservation_id.partition(".")
            payload, signature = urlsafe_b64decode(_padded(head)), urlsafe_b64decode(_padded(tail))
        except (ValueError, binascii.Error):
            raise UnknownReservationError(UNKNOWN_ID) from None
        if not any(hmac.compare_digest(signature, _sign(payload, key)) for key in await self._keys.all()):
            raise UnknownReservationError(UNKNOWN_ID)
        content = ReservationId(*json.loads(payload))
        if self._store.clock.ns() // 1000 > content.end:
            raise UnknownReservationError("this reservation has expired: its estimate stays charged")
        return content

    async def settle(
        self,
        content: ReservationId,
        reservation: AsyncReservation | AsyncPendingCharge,
        settle: Callable[[], Awaitable[None]],
        caller: bytes = b"",
    ) -> bool:
        """Settle a reservation once; False if the same `caller` did so before.

        If the store is unavailable, whether it is settled is unknown: the same `caller` may repeat its call.
        """
        if not isinstance(reservation, AsyncReservation):
            return await self._background.complete(self._settle_provider(content, reservation, settle, caller))
        return await self._settle_charge(content, reservation, settle, caller)

    async def _settle_charge(
        self,
        content: ReservationId,
        charge: BaseReservation,
        settle: Callable[[], Awaitable[None]],
        caller: bytes,
    ) -> bool:
        """Settle a charge in the same step as its id is marked as settled."""
        if not is_shared(charge.charges[0].limiter.store):
            return await self._settle_locally(content, settle, caller)
        collection = Collection(SETTLED, (charge.policy.name, charge.key), listed=False)
        charge.writes = (mark_of(collection, content, caller),)
        return await _settle_once(settle, caller)

    async def _settle_locally(
        self, content: ReservationId, settle: Callable[[], Awaitable[None]], caller: bytes
    ) -> bool:
        """Settle an id that only this process can settle."""
        if not self._settled.add(content.number, content.end, self._store.clock.ns() // 1000, caller):
            if caller and self._settled.settled_by(content.number) == caller:
                return False
            raise AlreadySettledError(SETTLED_ALREADY)
        try:
            await settle()
        except StoreUnavailable:
            self._settled.remove(content.number)
            raise
        return True

    async def _settle_provider(
        self,
        content: ReservationId,
        pending: AsyncPendingCharge,
        settle: Callable[[], Awaitable[None]],
        caller: bytes,
    ) -> bool:
        """Settle the permit of a provider; one that this process knows as settled is only looked up."""
        charge = pending.charge
        if charge is None:
            raise UnknownReservationError(UNKNOWN_ID)
        if not pending.settled:
            return await self._settle_charge(content, charge, settle, caller)
        return await self._settle_charge(content, charge, lambda: self._mark(charge), caller)

    async def _mark(self, charge: BaseReservation) -> None:
        store = charge.charges[0].limiter.store.unleased
        await store.apply_async("acquire", (), None, None, charge.writes)


def mark_of(collection: Collection, content: ReservationId, caller: bytes) -> Write:
    """Return the value that marks an id as settled, by its number: base64 has several spellings of the same bytes."""
    return Write(collection, content.number, caller, round((2 * content.ttl + 1) * SECOND), None)  # outlives the id


async def _settle_once(settle: Callable[[], Awaitable[object]], caller: bytes) -> bool:
    """Make a step that writes the mark of an id; False if the same `caller` did so before."""
    try:
        await settle()
    except ValueConflict as conflict:
        if caller and conflict.found is not None and conflict.found.data == caller:
            return False
        raise AlreadySettledError(SETTLED_ALREADY) from None
    return True


def _describe(made: ReservedCharge) -> tuple[Any, ...]:
    """Return the key of a charge, the costs by limit, the time, and whether it was charged."""
    costs = {limit.name: cost for limit, cost in zip(made.policy.limits, made.costs, strict=True)}
    charged = any(at is not None for at in made.ats)  # False: store unavailable, and on_store_error is allow
    return made.key, costs, made.decision.at, charged


def _sign(payload: bytes, key: bytes) -> bytes:
    return blake2b(payload, key=key, digest_size=SIGNATURE_BYTES).digest()


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _padded(text: str) -> bytes:
    return text.encode("ascii") + b"=" * (-len(text) % 4)
