"""Remembers the heads of common requests, so that a head that was parsed and checked once is not parsed again.

A client sends the same head with almost every request, byte for byte. What the parser and the checks of a head return
depends on nothing but these bytes: the settings of a running service do not change. A head is remembered only if it is
followed by exactly its body in one piece of input, and the request was answered at once. The next request with these
bytes, and a body of the same length, is the same except for its body.

Heads contain tokens. They are found by a keyed hash, so the time of a look-up says nothing about them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.service.http.encoding import SECURITY_FIELDS, write_fields

if TYPE_CHECKING:
    from tidegate.service.http.app import ImmediateVerb
    from tidegate.service.http.encoding import Fields

MAX_KNOWN_HEADS: Final = 1024  # heads with different lengths of the body count separately
MAX_KNOWN_HEAD: Final = 1024  # bytes
END_OF_HEAD: Final = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """A head: the verb of its path, and the lengths of the head and the body in bytes."""

    verb: ImmediateVerb
    size: int
    body_size: int


class KnownHeads:
    """The heads that one server remembers, and the beginning of its responses to them."""

    def __init__(self) -> None:
        """Start without heads."""
        self._heads: dict[bytes, KnownHead] = {}
        self.response_start: bytes = b""
        self.set_default_fields(())

    def set_default_fields(self, fields: Fields) -> None:
        """Begin responses with these header fields."""
        self.response_start = b"HTTP/1.1 200 OK\r\n%s%scontent-type: application/json\r\ncontent-length: " % (
            write_fields(fields),
            SECURITY_FIELDS,
        )

    def clear(self) -> None:
        """Forget all heads."""
        self._heads.clear()

    def find(self, data: bytes) -> KnownHead | None:
        """Return the head of a complete request, if it is known; None if `data` is anything else."""
        size = data.find(END_OF_HEAD) + len(END_OF_HEAD)
        known = self._heads.get(data[:size])
        return known if known is not None and len(data) == size + known.body_size else None

    def remember(self, data: bytes, verb: ImmediateVerb, body_size: int) -> None:
        """Remember the head of a request that was answered at once, unless `data` is not just that request."""
        size = data.find(END_OF_HEAD) + len(END_OF_HEAD)
        if size + body_size != len(data) or size > MAX_KNOWN_HEAD:
            return
        if len(self._heads) >= MAX_KNOWN_HEADS:
            self._heads.clear()
        self._heads[data[:size]] = KnownHead(verb, size, body_size)
