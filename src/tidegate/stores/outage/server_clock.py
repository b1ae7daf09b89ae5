"""What the server's clock shows, while the server cannot be asked."""

from __future__ import annotations

from typing import Final

DRIFT_DIVISOR: Final = 2000  # no two clocks run at quite the same rate: one part in so many is allowed for


class ServerClock:
    """Bounds of the server's time, from its last answer and the time that passed here since.

    A client's own clock may be wrong by any amount; it is only used to tell how much time has passed.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.known = False
        self._at = self._before = self._after = 0

    def note(self, at: int, before: int, after: int) -> None:
        """Take an answer that the server gave at its `at`, between two instants of steady time here."""
        self._at, self._before, self._after, self.known = at, before, after, True

    def earliest(self, steady: int) -> int:
        """Give an instant that the server's clock has reached."""
        passed = max(0, steady - self._after)
        return self._at + passed - passed // DRIFT_DIVISOR

    def latest(self, steady: int) -> int:
        """Give an instant that the server's clock has not passed."""
        passed = max(0, steady - self._before)
        return self._at + passed + passed // DRIFT_DIVISOR
