"""Where a client keeps the permits that it has taken ahead: `Client(url, lease="1s")`.

`leases` says on which terms permits are given. A share is what one answer gave. Of its n permits, taken at a, at time s
at most n - decay * (s - a) may still be used; those that were used before are void first, so who keeps to the pace of a
limit loses none. When a share is settled, what is given back must not undo that: permits used late need more than their
own number to stand (`owed`).

Time is counted from before the question was sent: the service has decided later than that, never earlier.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError
from tidegate.fork import fork_safe
from tidegate.service.decisions.leases import MAX_LEASE_PERMITS, MAX_LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.policy import Key

    Place = tuple[str, Key]

FIRST_SHARE: Final = 4  # permits that are wanted of a key that nothing is known of
RETRY_LEASE_AFTER: Final = 60 * SECOND  # how long a key is not tried again that knows no leases
MAX_KEYS: Final = 10_000  # keys that are remembered
MAX_SETTLED_PER_CALL: Final = 4  # shares of others that are settled in passing
ROUNDING_GUARD: Final = 1 + 1e-9  # rounding must not keep a permit alive


class ClientShare:
    """What one answer gave."""

    __slots__ = ("_late", "began", "decay", "ends", "id", "permits", "said", "used")

    def __init__(self, said: dict[str, Any], began: int) -> None:
        """Take it, as of the instant before it was asked for."""
        self.said = said
        self.id: str | None = said["id"]
        self.permits = int(said["permits"])
        self.decay = float(said["decay"])
        self.began = began
        self.ends = began + int(said["seconds"] * SECOND)
        self.used = 0
        self._late = 0.0  # how many permits more than the used ones have to stand

    def left(self, now: int) -> int:
        """Tell how many may be used now."""
        if now >= self.ends:
            return 0
        return max(0, min(self.permits - self.used, self.permits - ceil(self._void(now))))

    def _void(self, now: int) -> float:
        return self.decay * max(0, now - self.began) / SECOND * ROUNDING_GUARD

    def use(self, cost: int, now: int) -> None:
        """Use some."""
        self._late = max(self._late, self._void(now) - self.used)
        self.used += cost

    @property
    def owed(self) -> int:
        """How many of the permits have to stay charged."""
        return min(self.permits, ceil(self.used + self._late)) if self.used else 0


class LeaseCache:
    """The shares of one client, by policy and key. Safe to use from threads."""

    def __init__(self, lasting: float, steady: Callable[[], int]) -> None:
        """Take permits ahead for so many seconds; `steady` tells the time in microseconds."""
        self.lasting = lasting
        self._steady = steady
        self._lock = fork_safe(threading.Lock())
        self._shares: OrderedDict[Place, list[ClientShare]] = OrderedDict()
        self._wanted: OrderedDict[Place, int] = OrderedDict()
        self._plain: OrderedDict[Place, int] = OrderedDict()  # until when a key is asked for call by call
        self._asking: set[Place] = set()  # keys that permits are being taken for

    def forget(self) -> None:
        """Forget everything, in a child process: the permits are its parent's."""
        self._shares.clear()
        self._asking.clear()

    def now(self) -> int:
        """Tell the time."""
        return self._steady()

    def may_ask(self, place: Place) -> bool:
        """Tell whether a key may know leases."""
        with self._lock:
            until = self._plain.get(place)
            if until is not None and until <= self._steady():
                del self._plain[place]
            return until is None or until <= self._steady()

    def take(self, place: Place, cost: int) -> dict[str, Any] | None:
        """Use permits of a share, and word the answer; None: there are not enough."""
        with self._lock:
            for share in self._shares.get(place, ()):
                now = self._steady()
                if share.left(now) >= cost:
                    share.use(cost, now)
                    return answered(share)
        return None

    def begin(self, place: Place) -> bool:
        """Begin to take permits ahead, unless somebody does: many at once would take all there are, and idle."""
        with self._lock:
            if place in self._asking:
                return False
            self._asking.add(place)
            return True

    def end(self, place: Place) -> None:
        """Let others take permits ahead again."""
        with self._lock:
            self._asking.discard(place)

    def put(self, place: Place, cost: int, began: int, said: dict[str, Any]) -> dict[str, Any]:
        """Keep what the service gave, use what the call needs of it, and word the answer."""
        with self._lock:
            if not said["permits"]:
                if said["allowed"] and not said["seconds"]:
                    remember(self._plain, place, self._steady() + RETRY_LEASE_AFTER)
                return said
            share = ClientShare(said, began)
            share.use(cost, began)  # the service itself has decided on this call, at the instant of the charge
            self._shares.setdefault(place, []).append(share)
            self._shares.move_to_end(place)
            return answered(share)

    def want(self, place: Place, cost: int) -> int:
        """Tell how many permits to ask for: more if the last ones were used up early, fewer if they were not."""
        with self._lock:
            return min(MAX_LEASE_PERMITS, max(cost, self._wanted.get(place, FIRST_SHARE)))

    def spent(self, place: Place) -> list[tuple[str, int]]:
        """Take down the shares of a key, and some of others that are over: their ids, and how much of each was used."""
        with self._lock:
            now = self._steady()
            down = self._down(place, now)
            over = [other for other, shares in self._shares.items() if all(share.ends <= now for share in shares)]
            crowd = list(self._shares)[: max(0, len(self._shares) - MAX_KEYS)]
            for other in (*over[:MAX_SETTLED_PER_CALL], *crowd):
                down += self._down(other, now)
            return down

    def _down(self, place: Place, now: int) -> list[tuple[str, int]]:
        shares = self._shares.pop(place, [])
        if shares:
            used = sum(share.used for share in shares)
            early = all(share.ends > now for share in shares)
            remember(self._wanted, place, max(1, 2 * used if early else used))
        return [(share.id, share.owed) for share in shares if share.id is not None and share.owed < share.permits]

    def all(self) -> list[tuple[str, int]]:
        """Take everything down."""
        with self._lock:
            return [each for place in list(self._shares) for each in self._down(place, self._steady())]


def answered(share: ClientShare) -> dict[str, Any]:
    """Word the answer to a call that was served from a share."""
    left = share.permits - share.used
    remaining = share.said["remaining"]
    limits = [{**limit, "remaining": limit["remaining"] + left} for limit in share.said["limits"]]
    return {**share.said, "remaining": None if remaining is None else remaining + left, "limits": limits, "id": None}


def remember(places: OrderedDict[Place, int], place: Place, value: int) -> None:
    """Note something of a key; the ones noted first go when there are too many."""
    places[place] = value
    places.move_to_end(place)
    while len(places) > MAX_KEYS:
        places.popitem(last=False)


def read_lasting(lease: str | float) -> float:
    """Read how long permits are taken ahead for."""
    try:
        found = parse_period(lease) / SECOND
    except ConfigError:
        found = 0.0
    if not 0 < found <= MAX_LEASE_SECONDS:
        raise ConfigError(f"expected a time up to {MAX_LEASE_SECONDS:g}s such as '1s', not {lease!r}", field="lease")
    return found
