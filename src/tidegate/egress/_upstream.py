"""The connections to providers: aiohttp's client, which sends the header fields that it is given and adds none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from multidict import CIMultiDict

from tidegate.egress._deadlines import CallDeadline, CallDeadlines
from tidegate.outbound.aiohttp import WatchedPayload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from yarl import URL

    from tidegate.egress._addresses import AddressCheck
    from tidegate.egress._bodies import RequestBody
    from tidegate.egress._settings import EgressSettings

DNS_TTL: Final = 10  # seconds
LARGE_BODY: Final = 2**19  # bytes
SLICE: Final = 2**16
ADDED_BY_AIOHTTP: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


async def slices(body: bytes) -> AsyncIterator[bytes]:
    """Yield a large body in pieces: written at once, it would block the event loop."""
    for start in range(0, len(body), SLICE):
        yield body[start : start + SLICE]


async def watched(pieces: AsyncIterator[bytes], written: Callable[[], None] | None) -> AsyncIterator[bytes]:
    """Yield the pieces of a body, and report that it has been written."""
    async for piece in pieces:
        yield piece
    if written is not None:
        written()


class ForwardedRequest(aiohttp.ClientRequest):
    """A request with the header fields of the caller: those of aiohttp are not added."""

    _skip_auto_headers = CIMultiDict((name, None) for name in ADDED_BY_AIOHTTP)

    def update_headers(self, headers: Any) -> None:  # noqa: ANN401 - aiohttp's own type is private
        """Use these header fields, after the Host."""
        self.headers = CIMultiDict([("Host", self.url.host_port_subcomponent or ""), *headers.items()])

    def update_auto_headers(self, skip_auto_headers: object) -> None:
        """Add nothing."""


class UpstreamConnector(aiohttp.TCPConnector):
    """A connection pool that can retire all its connections: each is closed when its request has ended."""

    def retire_connections(self) -> None:
        """Use no open connection for another request, and resolve all names again."""
        self.clear_dns_cache()
        for protocols in self._conns.values():
            for protocol, _ in protocols:
                protocol.close()
        for protocol in self._acquired:
            protocol.force_close()


class UpstreamClient:
    """Sends requests to providers. An async context manager."""

    def __init__(self, settings: EgressSettings, addresses: AddressCheck) -> None:
        """Connect to addresses that are allowed only."""
        self._addresses = addresses
        self._connector = UpstreamConnector(
            limit=0, resolver=addresses, socket_factory=addresses.make_socket, ttl_dns_cache=DNS_TTL
        )
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            request_class=ForwardedRequest,
            # Responses have a deadline of their own (`use`), and so have their chunks (`relay`).
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout),
            max_field_size=settings.max_header,
            max_line_size=settings.max_header,
        )
        self._session._retry_connection = False  # noqa: SLF001 - a repeated request needs a permit of its own
        self._allowed = settings.allow_private
        self.use(settings)

    def use(self, settings: EgressSettings) -> None:
        """Send the next requests with these deadlines, and to these private hosts only."""
        if settings.allow_private != self._allowed:
            self._allowed = settings.allow_private
            self._addresses.use(settings.allow_private)
            self._connector.retire_connections()
        read = settings.first_byte_timeout
        self._deadlines = CallDeadlines(read)
        # The time without a byte from the provider, after a body of unknown duration was sent.
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout, sock_read=read)

    async def send(
        self,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: RequestBody,
        changed: bytes | None,
        written: Callable[[], None] | None,
    ) -> aiohttp.ClientResponse:
        """Send a request with its body, or with a changed one, and wait until its response begins.

        `written` is called when it was written, or before it is sent if it has no body.
        """
        whole = body.whole if changed is None else changed
        request = self._session.request
        if whole is None:
            if body.length is not None:
                headers["Content-Length"] = str(body.length)
            data, timeout = watched(body.stream(), written), self._stream_timeout
            async with asyncio.timeout(None) as deadline:
                body.deadline = deadline  # for a provider that does not read the body
                try:
                    return await request(
                        method, url, headers=headers, data=data, timeout=timeout, allow_redirects=False
                    )
                finally:
                    body.deadline = None
        data_in_memory: bytes | WatchedPayload | AsyncIterator[bytes] | None = whole or None
        if len(whole) > LARGE_BODY:
            headers, data_in_memory = headers.copy(), watched(slices(whole), written)
            headers["Content-Length"] = str(len(whole))
        elif whole and written is not None:
            data_in_memory = WatchedPayload(whole, written)
        elif written is not None:
            written()
        with CallDeadline(self._deadlines):
            return await request(method, url, headers=headers, data=data_in_memory, allow_redirects=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
