"""Circuit breakers: whether the store, or a part of it, is unavailable, and when to probe it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

FIRST_PAUSE: Final = 50_000  # microseconds between the first two probes; each further pause is twice as long
MAX_PAUSE: Final = 2_000_000
MAX_SHARD_PAUSE: Final = 500_000  # for a part of a store: the other parts tell when another server has taken over


class CircuitBreaker:
    """Open from the first failure until a probe succeeds, so that an outage costs one deadline, not one per call.

    The first probe is due at once: most outages are a dropped connection and short. A store that fails again soon after
    an outage is probed with exponential back-off.
    """

    def __init__(self, max_pause: int = MAX_PAUSE) -> None:
        """Start closed."""
        self.is_open: bool = False
        self.probe_due: int = 0  # when the next probe is due, in steady time
        self.since: int = 0
        self.number: int = 0  # of the latest outage
        self._max_pause = max_pause
        self._recovered = False
        self._pause = FIRST_PAUSE
        self._probing = False
        self._recovered_at = 0

    def open(self, now: int, number: int) -> None:
        """Start an outage."""
        repeated = self._recovered and now - self._recovered_at < 2 * MAX_PAUSE
        self.is_open, self.since, self.probe_due, self.number = True, now, now, number
        if repeated:
            self._back_off(now)
        else:
            self._pause = FIRST_PAUSE

    def start_probe(self) -> None:
        """Record that a probe starts."""
        self._probing = True

    def retry_after(self, now: int) -> int:
        """Return after how many microseconds a call may find the store available.

        While a probe is running, this is unknown: then it is the time until a failed probe would be repeated.
        """
        return self._pause if self._probing else max(0, self.probe_due - now)

    def record_probe(self, now: int, *, answered: bool) -> None:
        """Record the result of a probe."""
        self._probing = False
        if answered:
            self.is_open = False
            self._recovered, self._recovered_at = True, now
        else:
            self._back_off(now)

    def _back_off(self, now: int) -> None:
        self.probe_due = now + self._pause
        self._pause = min(2 * self._pause, self._max_pause)


class ShardBreakers:
    """A circuit breaker for each part of a store that fails separately (`Store.shard`); None is the whole store."""

    def __init__(self) -> None:
        """Start closed."""
        self.lost: dict[Hashable, CircuitBreaker] = {}  # those that are open; usually none
        self.outages: int = 0
        self.recoveries: int = 0
        self.probes: int = 0
        self._breakers: dict[Hashable, CircuitBreaker] = {}

    @property
    def is_open(self) -> bool:
        """Whether any part is unavailable."""
        return bool(self.lost)

    @property
    def probe_due(self) -> int:
        """When the next probe is due, in steady time."""
        return min((breaker.probe_due for breaker in tuple(self.lost.values())), default=0)

    def retry_after(self, now: int) -> int:
        """Return after how many microseconds a call may find what is lost available."""
        return min((breaker.retry_after(now) for breaker in tuple(self.lost.values())), default=0)

    def record_failure(self, shard: Hashable, now: int, outages: int) -> bool:
        """Record the failure of a call that started after `outages` outages; return whether it starts a new one."""
        breaker = self._breakers.get(shard)
        if breaker is None:
            breaker = self._breakers[shard] = CircuitBreaker(MAX_PAUSE if shard is None else MAX_SHARD_PAUSE)
        if breaker.is_open or outages < breaker.number:
            return False
        self.outages += 1
        breaker.open(now, self.outages)
        self.lost[shard] = breaker
        return True

    def record_probe(self, shard: Hashable, now: int, *, answered: bool) -> None:
        """Record the result of a probe."""
        self.probes += 1
        self._breakers[shard].record_probe(now, answered=answered)
        if answered:
            self.recoveries += 1
            del self.lost[shard]
