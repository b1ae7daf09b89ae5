"""Writes responses as HTTP/1."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from tidegate.service.http.app import SECURITY_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.service.http.problems import HTTPReply

    Fields = Iterable[tuple[bytes, bytes]]


def encode(reply: HTTPReply, more: Fields = ()) -> bytes:
    """Write a response."""
    status, body, kind, headers = reply
    fields: tuple[tuple[bytes, bytes], ...] = (
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        *SECURITY_HEADERS,
        *headers,
        *more,
    )
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, HTTPStatus(status).phrase.encode(), write_fields(fields), body)


def write_fields(fields: Fields) -> bytes:
    """Write header fields."""
    return b"".join([b"%s: %s\r\n" % field for field in fields])


SECURITY_FIELDS: Final = write_fields(SECURITY_HEADERS)
