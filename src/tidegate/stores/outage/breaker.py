"""Whether the store is lost, and when to look again."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE: Final = 50_000  # microseconds between the first two probes; each further pause is twice as long
MAX_PAUSE: Final = 2_000_000


class CircuitBreaker:
    """Open from the first failure until a probe is answered, so that a lost store costs one deadline, not one per call.

    The first probe is due at once: most losses are a dropped connection, and over in a moment. A store that is lost
    again as soon as it is back is looked for ever more rarely.
    """

    def __init__(self) -> None:
        """Start with the store not lost."""
        self.lost = False
        self.due = 0  # when to probe next, in steady time
        self.since = 0
        self.losses = 0
        self.returns = 0
        self.probes = 0
        self._pause = FIRST_PAUSE
        self._probing = False
        self._back = 0

    def fail(self, now: int, losses: int) -> bool:
        """Note a failure of a call that began after so many losses; tell whether the store is lost by it."""
        if self.lost or losses != self.losses:
            return False
        again = self.returns and now - self._back < 2 * MAX_PAUSE
        self.lost, self.since, self.due = True, now, now
        self.losses += 1
        if again:
            self._wait(now)
        else:
            self._pause = FIRST_PAUSE
        return True

    def probe(self) -> None:
        """Note that a probe begins."""
        self._probing = True

    def retry(self, now: int) -> int:
        """Return after how many microseconds a call may find the store back.

        While a probe is under way nobody knows, and it may take long: so no sooner than a failed probe is repeated.
        """
        return self._pause if self._probing else max(0, self.due - now)

    def probed(self, now: int, *, answered: bool) -> None:
        """Note what came of a probe."""
        self._probing = False
        self.probes += 1
        if answered:
            self.lost = False
            self.returns += 1
            self._back = now
        else:
            self._wait(now)

    def _wait(self, now: int) -> None:
        self.due = now + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
