"""The leases that a client holds: `Client(url, lease="1s")`.

`decisions.leases` defines the terms. Of the n permits of a lease that was taken at a, at most n - decay * (s - a) may
still be used at time s. Permits that were used before s expire first, so a client that stays at the rate of the
limit loses none. Settling a lease must not undo that: for permits that were used late, more than their number has to
stay charged (`to_commit`).

Time is counted from before the request was sent: the service decides later than that, never earlier.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from math import ceil
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from tidegate._runtime.fork import fork_safe
from tidegate.core._bounds import SECOND
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError
from tidegate.service._decisions.leases import MAX_LEASE_PERMITS, MAX_LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Key
    from tidegate.service._api.responses import LeaseResponse

    PolicyKey = tuple[str, Key]  # a policy's name and a key

FIRST_PERMITS: Final = 4  # permits to request for a key that is used for the first time
RETRY_LEASE_AFTER: Final = 60 * SECOND  # how long a key without leases is not tried again
MAX_KEYS: Final = 10_000  # keys that are remembered
MAX_SETTLED_PER_CALL: Final = 4  # expired leases of other keys that one call settles
ROUNDING_GUARD: Final = 1 + 1e-9  # rounding must not keep an expired permit usable


class ClientLease:
    """The permits that one response granted."""

    __slots__ = ("_late", "_left", "decay", "ends_at", "id", "permits", "response", "started_at", "used")

    def __init__(self, response: LeaseResponse, started_at: int) -> None:
        """Read a response; `started_at` is the instant before the request was sent."""
        self.response: LeaseResponse = response
        self.id: str | None = response.id
        self.permits: int = response.permits
        self.decay: float = response.decay
        self.started_at: int = started_at
        self.ends_at: int = started_at + int(response.seconds * SECOND)
        self.used: int = 0
        self._left: int = response.permits  # after the last use
        self._late = 0.0  # permits that have to stay charged in addition to the used ones

    def usable(self, now: int) -> int:
        """Return how many permits may be used now."""
        if now >= self.ends_at:
            return 0
        return max(0, min(self._left, self.permits - ceil(self._expired(now))))

    def _expired(self, now: int) -> float:
        return self.decay * max(0, now - self.started_at) / SECOND * ROUNDING_GUARD

    def use(self, cost: int, now: int) -> None:
        """Use permits: of those that are usable now, so that several uses at one instant do not count one twice."""
        self._left = self.usable(now) - cost
        self._late = max(self._late, self._expired(now) - self.used)
        self.used += cost

    @property
    def to_commit(self) -> int:
        """The number of permits that have to stay charged."""
        return min(self.permits, ceil(self.used + self._late)) if self.used else 0


class LeaseCache:
    """The leases of one client, by policy and key. Thread-safe."""

    def __init__(self, duration: float, steady: Callable[[], int]) -> None:
        """Hold leases of `duration` seconds; `steady` returns the time in microseconds."""
        self.duration = duration
        self._steady = steady
        self._lock = fork_safe(threading.Lock())
        self._leases: OrderedDict[PolicyKey, list[ClientLease]] = OrderedDict()
        self._next_permits: OrderedDict[PolicyKey, int] = OrderedDict()  # how many to request next
        self._no_lease_until: OrderedDict[PolicyKey, int] = OrderedDict()  # keys for which each call sends a request
        self._requesting: set[PolicyKey] = set()  # keys for which a lease is being requested

    def clear(self) -> None:
        """Drop all leases, in a forked process: they belong to its parent."""
        self._leases.clear()
        self._requesting.clear()

    def now(self) -> int:
        """Return the time in microseconds."""
        return self._steady()

    def may_lease(self, policy_key: PolicyKey) -> bool:
        """Return whether permits of a key may be leased, as far as this client knows."""
        with self._lock:
            until = self._no_lease_until.get(policy_key)
            if until is not None and until <= self._steady():
                del self._no_lease_until[policy_key]
            return until is None or until <= self._steady()

    def take(self, policy_key: PolicyKey, cost: int) -> LeaseResponse | None:
        """Use permits of a lease, and return the response to the call; None if there are not enough."""
        with self._lock:
            for lease in self._leases.get(policy_key, ()):
                now = self._steady()
                if lease.usable(now) >= cost:
                    lease.use(cost, now)
                    return local_response(lease)
        return None

    def begin_lease(self, policy_key: PolicyKey) -> bool:
        """Begin to request a lease; False if another call is requesting one: together they would lease too much."""
        with self._lock:
            if policy_key in self._requesting:
                return False
            self._requesting.add(policy_key)
            return True

    def end_lease(self, policy_key: PolicyKey) -> None:
        """Allow other calls to request a lease again."""
        with self._lock:
            self._requesting.discard(policy_key)

    def add(self, policy_key: PolicyKey, cost: int, started_at: int, response: LeaseResponse) -> LeaseResponse:
        """Add the lease of a response, use the permits of the call itself, and return the response to the call."""
        with self._lock:
            if not response.permits:
                if response.allowed and not response.seconds:
                    remember(self._no_lease_until, policy_key, self._steady() + RETRY_LEASE_AFTER)
                return response
            lease = ClientLease(response, started_at)
            lease.use(cost, started_at)  # the service decided on this call itself, at the instant of the charge
            self._leases.setdefault(policy_key, []).append(lease)
            self._leases.move_to_end(policy_key)
            return local_response(lease)

    def permits_to_request(self, policy_key: PolicyKey, cost: int) -> int:
        """Return how many permits to request: more if the last ones were used up early, fewer if they were not."""
        with self._lock:
            return min(MAX_LEASE_PERMITS, max(cost, self._next_permits.get(policy_key, FIRST_PERMITS)))

    def pop_finished(self, policy_key: PolicyKey) -> list[tuple[str, int]]:
        """Remove the leases of a key, and some expired ones of other keys; return (id, permits to commit) of each."""
        with self._lock:
            now = self._steady()
            finished = self._pop(policy_key, now)
            expired = [other for other, leases in self._leases.items() if all(each.ends_at <= now for each in leases)]
            excess = list(self._leases)[: max(0, len(self._leases) - MAX_KEYS)]
            for other in (*expired[:MAX_SETTLED_PER_CALL], *excess):
                finished += self._pop(other, now)
            return finished

    def _pop(self, policy_key: PolicyKey, now: int) -> list[tuple[str, int]]:
        leases = self._leases.pop(policy_key, [])
        if leases:
            used = sum(lease.used for lease in leases)
            early = all(lease.ends_at > now for lease in leases)
            remember(self._next_permits, policy_key, max(1, 2 * used if early else used))
        return [
            (lease.id, lease.to_commit) for lease in leases if lease.id is not None and lease.to_commit < lease.permits
        ]

    def pop_all(self) -> list[tuple[str, int]]:
        """Remove all leases; return (id, permits to commit) of each."""
        with self._lock:
            return [each for policy_key in list(self._leases) for each in self._pop(policy_key, self._steady())]


def local_response(lease: ClientLease) -> LeaseResponse:
    """Build the response to a call that was served from a lease."""
    left, response = lease.permits - lease.used, lease.response
    limits = [replace(limit, remaining=limit.remaining + left) for limit in response.limits]
    remaining = None if response.remaining is None else response.remaining + left
    return replace(response, remaining=remaining, limits=limits, id=None)


def remember(values: OrderedDict[PolicyKey, int], policy_key: PolicyKey, value: int) -> None:
    """Store a value for a key; if there are too many keys, drop the oldest."""
    values[policy_key] = value
    values.move_to_end(policy_key)
    while len(values) > MAX_KEYS:
        values.popitem(last=False)


def read_lease_duration(lease: str | float) -> float:
    """Read the duration of leases, in seconds."""
    try:
        found = parse_period(lease) / SECOND
    except ConfigError:
        found = 0.0
    if not 0 < found <= MAX_LEASE_SECONDS:
        raise ConfigError(
            f"expected a duration of up to {MAX_LEASE_SECONDS:g}s such as '1s', not {lease!r}", field="lease"
        )
    return found
