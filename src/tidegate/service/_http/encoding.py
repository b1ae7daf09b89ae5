"""Writes responses as HTTP/1."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from tidegate.service._api.problems import JSON_CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.service._api.problems import HTTPReply

    Fields = Iterable[tuple[bytes, bytes]]

SECURITY_HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
CONNECTION_CLOSE: Final = b"connection: close\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def write_fields(fields: Fields) -> bytes:
    """Write header fields."""
    return b"".join([b"%s: %s\r\n" % field for field in fields])


SECURITY_FIELDS: Final = write_fields(SECURITY_HEADERS)


class HttpWriter:
    """Writes the responses of one server, with a Date that is set once a second."""

    def __init__(self) -> None:
        """Start without a Date."""
        self.set_date(b"")

    def set_date(self, date: bytes) -> None:
        """Send this Date from now on."""
        self._fields = (b"date: %s\r\n" % date if date else b"") + SECURITY_FIELDS
        # The beginning of a response with the status 200 and JSON: the length, an empty line and the body follow.
        self.json_start: bytes = b"HTTP/1.1 200 OK\r\n%scontent-type: %s\r\ncontent-length: " % (
            self._fields,
            JSON_CONTENT_TYPE,
        )

    def write(self, reply: HTTPReply, *, head: bool = False, last: bool = False) -> bytes:
        """Write a response: to a HEAD request without its body, and the `last` one with `Connection: close`."""
        status, body, content_type, more = reply
        start = b"HTTP/1.1 %d %s\r\n%scontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
            status,
            HTTPStatus(status).phrase.encode(),
            self._fields,
            content_type,
            len(body),
            write_fields(more),
            CONNECTION_CLOSE if last else b"",
        )
        return start if head else start + body
