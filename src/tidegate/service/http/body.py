"""Reads the body of a request, bounded in size. The connection bounds the time: see protocol.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.service.http.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_DIGITS: Final = 20  # digits of a Content-Length


async def read_body(headers: dict[bytes, bytes], receive: Receive, max_body: int) -> bytes:
    """Read the whole body; refuse one that is larger than `max_body`."""
    length = headers.get(b"content-length", b"0")
    if len(length) > MAX_DIGITS or not length.isdigit() or int(length) > max_body:
        raise _too_large(max_body)
    message = await receive()
    body: bytes = message.get("body", b"")
    # A server may end a body with an empty chunk; a body of the announced length is complete without it.
    if message["type"] == "http.request" and (not message.get("more_body") or b"%d" % len(body) == length):
        if len(body) > max_body:
            raise _too_large(max_body)
        return body
    return await _read_chunks(message, receive, max_body)


async def _read_chunks(message: MutableMapping[str, Any], receive: Receive, max_body: int) -> bytes:
    """Read a body that arrives in several messages."""
    body = bytearray()
    while True:
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        body += message.get("body", b"")
        if len(body) > max_body:
            raise _too_large(max_body)
        if not message.get("more_body"):
            return bytes(body)
        message = await receive()


def _too_large(max_body: int) -> ProblemError:
    return ProblemError("too-large", f"the body of a request must not exceed {max_body} bytes")
