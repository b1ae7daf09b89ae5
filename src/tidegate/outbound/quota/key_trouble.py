"""What is known about a key that the provider has rejected. Time is an argument.

A 401 or 403 may be about the call: a header of the caller, a model that the account may not use. So it is evidence
against the key only if another member of the pool could send the same call.

    accepted      a response without error                                               the start
    doubted       a call was rejected: for DOUBT, other members are preferred            the key is still used
    suspended     another member could send the same call: the key is not used for a pause that doubles each time

A pause ends by itself, then the key is tried again. A changed file ends both, and a response without error too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from tidegate.outbound.providers.provider import Provider

DOUBT: Final = 60 * SECOND
FIRST_SUSPENSION: Final = 60 * SECOND
MAX_SUSPENSION: Final = 3600 * SECOND


class KeyTrouble:
    """Whether the key of one account is doubted or suspended; `version` is its provider, as its file says."""

    __slots__ = ("_doubted_until", "_pause", "_suspended_until", "_version")

    def __init__(self) -> None:
        """Start with an accepted key."""
        self._version: Provider | None = None
        self._doubted_until = 0
        self._suspended_until = 0
        self._pause = 0

    def is_suspended(self, version: Provider, now: int) -> bool:
        """Return whether the key is not used."""
        return self._version is version and now < self._suspended_until

    def is_doubted(self, version: Provider, now: int) -> bool:
        """Return whether other keys are preferred."""
        return self._version is version and now < self._doubted_until

    def doubt(self, version: Provider, now: int) -> None:
        """Record that a call was rejected."""
        if self._version is not version:
            self.clear()
        self._version, self._doubted_until = version, now + DOUBT

    def suspend(self, version: Provider, now: int) -> int:
        """Record that another key could send a rejected call; returns the pause, 0 if it has begun already."""
        if self.is_suspended(version, now):
            return 0
        self.doubt(version, now)
        self._pause = min(2 * self._pause or FIRST_SUSPENSION, MAX_SUSPENSION)
        self._suspended_until = now + self._pause
        return self._pause

    def clear(self) -> None:
        """Record that the key was accepted, or has changed."""
        if self._version is not None:
            self._version, self._doubted_until, self._suspended_until, self._pause = None, 0, 0, 0
