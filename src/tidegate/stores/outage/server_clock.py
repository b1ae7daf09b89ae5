"""Bounds of the server's time while the server is unavailable."""

from __future__ import annotations

from typing import Final

DRIFT_DIVISOR: Final = 2000  # clocks may drift by one part in this number


class ServerClock:
    """Bounds of the server's time, from its last answer and the time elapsed since.

    The client's clock may be wrong by any amount; it only measures elapsed time.
    """

    def __init__(self) -> None:
        """Start without an answer of the server."""
        self.known: bool = False
        self._at = self._before = self._after = 0

    def record(self, at: int, before: int, after: int) -> None:
        """Record an answer that the server gave at its time `at`, between two instants of local steady time."""
        self._at, self._before, self._after, self.known = at, before, after, True

    def earliest(self, steady: int) -> int:
        """Return an instant that the server's clock has reached."""
        passed = max(0, steady - self._after)
        return self._at + passed - passed // DRIFT_DIVISOR

    def latest(self, steady: int) -> int:
        """Return an instant that the server's clock has not passed."""
        passed = max(0, steady - self._before)
        return self._at + passed + passed // DRIFT_DIVISOR
