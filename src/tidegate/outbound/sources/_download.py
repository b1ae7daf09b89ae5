"""Download a body within bounds: redirects are limited, and no response is read further than needed.

A server decides how many bytes it sends and how slowly. So bodies are decoded and written to a file in chunks, up to a
maximum size; bodies of redirects and failures are not read. (The caller limits the time.)

A redirect to another origin (scheme, host or port) loses the configured headers of a source: they may contain secrets.
Only an upgrade of the same host from http to https keeps them.
"""

from __future__ import annotations

import asyncio
from typing import IO, TYPE_CHECKING, Final

import httpx

from tidegate._runtime.urls import split_url
from tidegate.errors import ConfigError
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._quota.decoding import BodyDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_REDIRECTS: Final = 10
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# Headers that another origin may receive; a cookie here was set by this origin in an earlier redirect.
KEPT_HEADERS: Final = ("accept", "accept-encoding", "accept-language", "connection", "cookie", "host", "user-agent")


class RedirectError(Exception):
    """A redirect that must not be followed."""


class TooLargeError(Exception):
    """A body larger than allowed."""


async def open_response(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Send a request, follow redirects, and return the response with its body unread; the caller closes it."""
    for _ in range(MAX_REDIRECTS + 1):
        response = await client.send(request, stream=True, follow_redirects=False)
        next_request = response.next_request
        if next_request is None:
            return response
        await response.aclose()
        request = _redirected(request, next_request)
    raise RedirectError(f"more than {MAX_REDIRECTS} redirects")


def _redirected(request: httpx.Request, next_request: httpx.Request) -> httpx.Request:
    """Remove from the next request of a redirect what only the previous origin may receive."""
    _check(next_request.url)
    if _origin(request.url) == _origin(next_request.url) or _is_upgrade(request.url, next_request.url):
        return next_request
    if next_request.method not in ("GET", "HEAD"):
        raise RedirectError(f"redirected to another origin with method {next_request.method}: not followed")
    headers = [(name, value) for name, value in next_request.headers.items() if name.lower() in KEPT_HEADERS]
    return httpx.Request(next_request.method, next_request.url, headers=headers, extensions=next_request.extensions)


def _check(url: httpx.URL) -> None:
    """Refuse URLs that cannot be requested."""
    try:
        split_url(str(url), "url")
        host_of(url)
    except ConfigError:
        raise RedirectError("redirected to a URL that cannot be used") from None
    if url.scheme not in DEFAULT_PORTS:
        raise RedirectError("redirected to a URL that cannot be used")


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or DEFAULT_PORTS.get(url.scheme)


def _is_upgrade(before: httpx.URL, after: httpx.URL) -> bool:
    return before.host == after.host and _origin(before)[::2] == ("http", 80) and _origin(after)[::2] == ("https", 443)


async def save_body(response: httpx.Response, max_bytes: int, file: IO[bytes]) -> int:
    """Write the decoded body of a response to a file; returns its size, or raises TooLargeError."""
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > len(str(max_bytes)) or int(declared) > max_bytes):
        raise TooLargeError
    whole = response.is_stream_consumed  # the transport returned a complete response, already decoded
    writer = _BoundedWriter(file, BodyDecoder("" if whole else response.headers.get("content-encoding", "")), max_bytes)
    async for piece in _single_chunk(response.content) if whole else response.aiter_raw():
        await asyncio.to_thread(writer.write, piece)
    writer.decoder.finish()
    return writer.size


async def _single_chunk(content: bytes) -> AsyncIterator[bytes]:
    yield content


class _BoundedWriter:
    """Decodes chunks into a file, up to a maximum size."""

    def __init__(self, file: IO[bytes], decoder: BodyDecoder, max_bytes: int) -> None:
        self.decoder = decoder
        self.size = 0
        self._received = 0
        self._file = file
        self._max_bytes = max_bytes

    def write(self, piece: bytes) -> None:
        self._received += len(piece)
        if self._received > self._max_bytes:
            raise TooLargeError
        for part in self.decoder.feed(piece):
            self.size += len(part)
            if self.size > self._max_bytes:
                raise TooLargeError
            self._file.write(part)
