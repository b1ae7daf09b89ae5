"""Retained messages as a server gives them: whoever may write to it may have put anything there.

An entry that is no message of ours is skipped and counted; no entry is an error. What is read is bounded in number and
size, so that nobody can fill the memory of those who join.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tidegate.core.bounds import MAX_INTEGER

MAX_RETAINED_BYTES: Final = 65_536  # of one retained message
MAX_KEY_BYTES: Final = 512
MAX_VERSION: Final = MAX_INTEGER
MAX_RECALLED: Final = 10_000  # retained messages of one subject that are read
MAX_RECALLED_BYTES: Final = 16 * 2**20
VERSION_DIGITS: Final = len(str(MAX_VERSION))


class RetainedMessage(NamedTuple):
    """A retained message as the server gave it."""

    key: str
    version: int
    payload: bytes


class RecalledMessages:
    """Collects the retained messages of a subject; `skipped` counts entries that are malformed or too many."""

    def __init__(self) -> None:
        """Start with none."""
        self.kept: list[RetainedMessage] = []
        self.skipped = 0
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether no more will be taken."""
        return len(self.kept) >= MAX_RECALLED or self._bytes >= MAX_RECALLED_BYTES

    def add(self, key: bytes, version: bytes, payload: bytes) -> None:
        """Take an entry, or count it."""
        number = read_version(version)
        try:
            name = key.decode()
        except UnicodeDecodeError:
            name = ""
        good = number and name and len(key) <= MAX_KEY_BYTES and len(payload) <= MAX_RETAINED_BYTES
        if not good or self.full:
            self.skipped += 1
            return
        self.kept.append(RetainedMessage(name, number, payload))
        self._bytes += len(key) + len(payload)


def read_version(text: bytes) -> int:
    """Read a version; 0 for what is none, which every other version is above."""
    if not text.isdigit() or len(text) > VERSION_DIGITS:
        return 0
    number = int(text)
    return number if number <= MAX_VERSION else 0
