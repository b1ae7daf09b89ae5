"""Circuit breaker: whether the store is unavailable, and when to probe it."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE: Final = 50_000  # microseconds between the first two probes; each further pause is twice as long
MAX_PAUSE: Final = 2_000_000


class CircuitBreaker:
    """Open from the first failure until a probe succeeds, so that an outage costs one deadline, not one per call.

    The first probe is due at once: most outages are a dropped connection and short. A store that fails again soon after
    an outage is probed with exponential back-off.
    """

    def __init__(self) -> None:
        """Start closed."""
        self.is_open: bool = False
        self.probe_due: int = 0  # when the next probe is due, in steady time
        self.since: int = 0
        self.outages: int = 0
        self.recoveries: int = 0
        self.probes: int = 0
        self._pause = FIRST_PAUSE
        self._probing = False
        self._recovered_at = 0

    def record_failure(self, now: int, outages: int) -> bool:
        """Record the failure of a call that started after `outages` outages; return whether it starts a new outage."""
        if self.is_open or outages != self.outages:
            return False
        repeated = self.recoveries and now - self._recovered_at < 2 * MAX_PAUSE
        self.is_open, self.since, self.probe_due = True, now, now
        self.outages += 1
        if repeated:
            self._back_off(now)
        else:
            self._pause = FIRST_PAUSE
        return True

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
        self.probes += 1
        if answered:
            self.is_open = False
            self.recoveries += 1
            self._recovered_at = now
        else:
            self._back_off(now)

    def _back_off(self, now: int) -> None:
        self.probe_due = now + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
