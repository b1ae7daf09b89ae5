"""Retained messages as read from a server, which other clients may have written.

An invalid entry is skipped and counted; it is not an error. The number and size of messages read are bounded, so that
other clients cannot fill the memory of a subscriber.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tidegate.core._bounds import MAX_INTEGER

MAX_RETAINED_BYTES: Final = 65_536  # per message
MAX_KEY_BYTES: Final = 512
MAX_VERSION: Final = MAX_INTEGER
MAX_RECALLED: Final = 10_000  # messages read per subject
MAX_RECALLED_BYTES: Final = 16 * 2**20
VERSION_DIGITS: Final = len(str(MAX_VERSION))


class RetainedMessage(NamedTuple):
    """A retained message as read from the server."""

    key: str
    version: int
    payload: bytes


class RecalledMessages:
    """Collects the retained messages of a subject; `skipped` counts malformed and excess entries."""

    def __init__(self) -> None:
        """Start without messages."""
        self.messages: list[RetainedMessage] = []
        self.skipped: int = 0
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether further messages are skipped."""
        return len(self.messages) >= MAX_RECALLED or self._bytes >= MAX_RECALLED_BYTES

    def add(self, key: bytes, version: bytes, payload: bytes) -> None:
        """Add an entry, or count it as skipped."""
        number = read_version(version)
        try:
            name = key.decode()
        except UnicodeDecodeError:
            name = ""
        good = number and name and len(key) <= MAX_KEY_BYTES and len(payload) <= MAX_RETAINED_BYTES
        if not good or self.full:
            self.skipped += 1
            return
        self.messages.append(RetainedMessage(name, number, payload))
        self._bytes += len(key) + len(payload)


def read_version(text: bytes) -> int:
    """Parse a version; 0 if invalid, which is lower than every valid version."""
    if not text.isdigit() or len(text) > VERSION_DIGITS:
        return 0
    number = int(text)
    return number if number <= MAX_VERSION else 0
