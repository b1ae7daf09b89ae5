"""Quotas for aiohttp: `aiohttp.ClientSession(middlewares=[RateLimitMiddleware(providers)])`.

Each hop of a redirect passes through the middleware, so the second host is charged too. `outcome_of(response)` returns
how a request was sent. Close the middleware after the session: `await middleware.close()`, or `async with`.
"""

from __future__ import annotations

import asyncio
import warnings
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakKeyDictionary

from tidegate.errors import ConfigError
from tidegate.outbound._quota.exchange import (
    AddedKey,
    OutboundRequest,
    ProviderResponse,
    RequestOutcome,
    SendResult,
    target_url,
)
from tidegate.outbound._quota.gate import AsyncGate
from tidegate.outbound._quota.refusal_body import RefusalBody

try:
    import aiohttp
    from yarl import URL
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("needs aiohttp: pip install 'tidegate[aiohttp]'") from None

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from typing import Unpack

    from aiohttp.abc import AbstractStreamWriter

    from tidegate._runtime.clock import Clock
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.gate_options import GateOptions
    from tidegate.outbound._quota.settlement import PendingSettlement
    from tidegate.stores import Store

__all__ = ["RateLimitMiddleware"]

MAX_FIELD_LENGTH: Final = 1000  # bytes of a field of a form that are read
UNREACHED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
CHUNK_BYTES: Final = 2**16


class RateLimitMiddleware:
    """Sends requests within the quotas of providers."""

    def __init__(self, providers: Providers, store: str | Store = "memory://", **options: Unpack[GateOptions]) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of AsyncGate."""
        self.gate: AsyncGate = AsyncGate(providers, store, **options)
        self._outcomes: WeakKeyDictionary[aiohttp.ClientResponse, RequestOutcome] = WeakKeyDictionary()
        self._settling: set[asyncio.Task[None]] = set()

    async def __call__(
        self,
        request: aiohttp.ClientRequest,
        handler: Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]],
    ) -> aiohttp.ClientResponse:
        """Wait for a permit, send the request, and learn from the response."""
        call = to_outbound_request(request)

        async def send(
            provider: Provider | None, body: bytes | None = None, written: Callable[[], None] | None = None
        ) -> ProviderResponse:
            async with other_body(request, call.body(), body, written):
                with other_url(request, target_url(provider, call)):
                    response = await send_with_key(request, handler, self.gate.planner.key_for(provider, call))
            headers = tuple(response.headers.items())
            read = partial(read_refusal, response, self.gate.clock)
            return ProviderResponse(response.status, headers, release_of(response), response, read)

        result: SendResult[aiohttp.ClientResponse] = await self.gate.run(self.gate.send_flow(call, send))
        self._outcomes[result.response] = result.outcome
        if result.settlement is not None:
            self._settle_at_end(result.response, result.settlement)
        return result.response

    def outcome_of(self, response: aiohttp.ClientResponse) -> RequestOutcome | None:
        """Return how the request of a response was sent; None for a response of another session."""
        return self._outcomes.get(response)

    def _settle_at_end(self, response: aiohttp.ClientResponse, settlement: PendingSettlement) -> None:
        """Settle when the body has been read or, if its content does not matter, has arrived."""
        if settlement.counts_tokens:
            content = _SettlingContent(response, settlement, self.gate, self._settle)
            response.content = content  # type: ignore[assignment]  # a wrapper with the same methods
            if response.connection is not None:
                response.connection.add_callback(content.lost)
        elif response.connection is None:
            self._settle(settlement)
        else:
            response.connection.add_callback(lambda: self._settle(settlement))

    def _settle(self, settlement: PendingSettlement) -> None:
        task = asyncio.get_running_loop().create_task(self.gate.run(settlement.settle_flow()))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def close(self) -> None:
        """Finish settling and close the gate."""
        await asyncio.gather(*self._settling)
        await self.gate.close()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()


class WatchedPayload(aiohttp.BytesPayload):
    """The body of a request, which reports that it has been written."""

    def __init__(self, value: bytes, written: Callable[[], None]) -> None:
        """Send these bytes, then call `written`."""
        super().__init__(value)
        self._written = written

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the body to a connection."""
        await super().write_with_length(writer, content_length)
        self._written()


class _SettlingContent:
    """The body of a response; reads token usage from it and settles the charge at its end."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        settlement: PendingSettlement,
        gate: AsyncGate,
        settle: Callable[[PendingSettlement], None],
    ) -> None:
        self._content: Any = response.content
        self._settlement = settlement
        self._gate = gate
        self._settle = settle
        self._ended = False
        settlement.open()

    async def _read(self, piece: bytes) -> bytes:
        settlement = self._settlement
        if not self._ended:
            if settlement.feed(piece):
                await self._gate.run(settlement.renew_flow())
            if self._content.at_eof():
                settlement.end()
                self._end()
        return piece

    def _end(self) -> None:
        """Settle with the usage that was found, once."""
        if not self._ended:
            self._ended = True
            self._settle(self._settlement)

    def set_exception(self, *error: Any) -> None:  # noqa: ANN401 - as aiohttp has it
        """Settle: the response was released before its body was read completely."""
        self._content.set_exception(*error)
        self._end()

    def lost(self) -> None:
        """Settle if the connection was lost before the whole body arrived: no more will be read."""
        if not self._content.is_eof():
            self._end()

    async def read(self, n: int = -1) -> bytes:
        return await self._read(await self._content.read(n))

    async def readany(self) -> bytes:
        return await self._read(await self._content.readany())

    async def readexactly(self, n: int) -> bytes:
        return await self._read(await self._content.readexactly(n))

    async def readline(self, **limits: Any) -> bytes:  # noqa: ANN401 - as aiohttp has them
        return await self._read(await self._content.readline(**limits))

    async def readuntil(self, separator: bytes = b"\n", **limits: Any) -> bytes:  # noqa: ANN401 - as aiohttp has them
        return await self._read(await self._content.readuntil(separator, **limits))

    async def readchunk(self) -> tuple[bytes, bool]:
        piece, ends = await self._content.readchunk()
        return await self._read(piece), ends

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while line := await self.readline():
            yield line

    async def iter_any(self) -> AsyncIterator[bytes]:
        while piece := await self.readany():
            yield piece

    async def iter_chunked(self, n: int) -> AsyncIterator[bytes]:
        while piece := await self.read(n):
            yield piece

    async def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        while (pair := await self.readchunk()) != (b"", False):
            yield pair

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the body
        return getattr(self._content, name)


async def read_refusal(response: aiohttp.ClientResponse, clock: Clock) -> bytes:
    """Read the start of the body of a refusal; the client can still read all of it."""
    body = RefusalBody(clock)
    while piece := await response.content.readany():
        if not body.add(piece):
            break
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        response.content.unread_data(b"".join(body.pieces))  # deprecated, but there is no other way
    return body.content


@asynccontextmanager
async def other_body(
    request: aiohttp.ClientRequest, own: bytes | None, body: bytes | None, written: Callable[[], None] | None
) -> AsyncIterator[None]:
    """Send a request with another `body`, if one is given, and report when it is written; then restore its `own`.

    The other body belongs to one attempt: another member of a pool may allow a longer output.
    """
    whole = own if body is None and written is not None else body
    if not whole:
        if written is not None:  # no body, or one that is written in pieces
            written()
        yield
        return
    await request.update_body(whole if written is None else WatchedPayload(whole, written))
    try:
        yield
    finally:
        await request.update_body(own)


@contextmanager
def other_url(request: aiohttp.ClientRequest, url: str | None) -> Iterator[None]:
    """Send a request to another URL, if one is given: that of a member of a pool."""
    if url is None:
        yield
        return
    before, host = request.url, request.headers.get("Host")
    request.url = URL(url, encoded=True)
    request.headers["Host"] = request.url.host_port_subcomponent or ""
    try:
        yield
    finally:
        request.url = before
        request.headers["Host"] = host or before.host_port_subcomponent or ""


async def send_with_key(
    request: aiohttp.ClientRequest,
    handler: Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]],
    added: AddedKey | None,
) -> aiohttp.ClientResponse:
    """Send with the provider's key, then remove it: responses and errors show the original request."""
    if added is None:
        return await handler(request)
    location, key, replaced = added
    own = request.headers.copy()
    for name in replaced:
        request.headers.popall(name, None)
    url_without_key = request.url
    if location.kind == "header":
        request.headers[location.name] = key
    else:
        request.url = url_without_key.update_query({location.name: key})
    try:
        response = await handler(request)
    finally:
        request.url = url_without_key
        for name in {location.name, *replaced} if location.kind == "header" else replaced:
            request.headers.popall(name, None)
            request.headers.extend((name, value) for value in own.getall(name, ()))
    if location.kind != "header":
        response._request_info = response._request_info._replace(url=url_without_key)  # noqa: SLF001 - aiohttp has no other way to change it
    return response


def to_outbound_request(request: aiohttp.ClientRequest) -> OutboundRequest:
    """Describe a request as an OutboundRequest."""

    def body() -> bytes | None:
        value = getattr(request.body, "_value", request.body)
        return bytes(value) if isinstance(value, (bytes, bytearray)) else None

    replayable = not request.body or body() is not None
    return OutboundRequest(
        request.method,
        str(request.url),
        request.headers.get,
        body,
        replayable,
        unreached,
        replayable,
        reports_write=True,
        form=partial(form_of, request.body),
    )


def form_of(body: object) -> bytes | None:
    """Return the text fields of a form; None: the body is not a form."""
    if not isinstance(body, aiohttp.MultipartWriter):
        return None
    found = []
    for part, _, _ in body:
        if isinstance(part, aiohttp.BytesPayload) and (part.size or 0) <= MAX_FIELD_LENGTH:
            disposition = part.headers.get("Content-Disposition", "")
            text = part.decode(errors="replace")
            found.append(f"--form\r\nContent-Disposition: {disposition}\r\n\r\n{text}\r\n")
    return ("".join(found) + "--form--").encode()


def unreached(error: BaseException) -> bool:
    """Return whether an error means that the request was never sent."""
    return isinstance(error, UNREACHED)


def release_of(response: aiohttp.ClientResponse) -> Callable[[], Awaitable[None]]:
    """Return a function that releases a response whose request is retried."""

    async def close() -> None:
        response.release()

    return close
