"""The clock of a replay: it shows the time of the request that is decided."""

from __future__ import annotations

from tidegate._runtime.clock import ManualClock


class ReplayClock(ManualClock):
    """A ManualClock that is set to an instant. A replay has one thread, and never waits."""

    def set(self, now: int) -> None:
        """Set the time, in microseconds since 1970; it may step back, as the clock of a server may."""
        self._now = now
