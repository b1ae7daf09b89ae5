"""Quotas for httpx: `httpx.Client(transport=RateLimitTransport(providers))`, and the same for AsyncClient.

The transport wraps another one (by default httpx's own), so it sees everything a client sends: each hop of a redirect,
each retry, HTTP/2, streams. `response.extensions["tidegate"]` is the RequestOutcome of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError
from tidegate.outbound.quota.exchange import (
    AddedKey,
    OutboundRequest,
    PendingSettlement,
    ProviderResponse,
    SendResult,
    has_rate_limit_headers,
)
from tidegate.outbound.quota.gate import AsyncGate, Gate
from tidegate.outbound.quota.tokens import UsageReader

try:
    import httpx
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("needs httpx: pip install 'tidegate[httpx]'") from None

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from typing import Unpack

    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.providers.registry import Providers
    from tidegate.outbound.quota.gate_options import GateOptions
    from tidegate.stores import Store

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]

UNREACHED: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
EXTENSION: Final = "tidegate"


class RateLimitTransport(httpx.BaseTransport):
    """Sends through another transport, within the quotas of providers; for `httpx.Client`."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        transport: httpx.BaseTransport | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`."""
        self.gate: Gate = Gate(providers, store, **options)
        self._inner = transport or httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Wait for a permit, send the request, and learn from the response."""
        call = to_outbound_request(request)

        def send(provider: Provider | None) -> ProviderResponse:
            response = self._inner.handle_request(with_key(request, self.gate.key_for(provider, call)))
            return ProviderResponse(response.status_code, rate_limit_headers(response), response.close, response)

        result: SendResult[httpx.Response] = self.gate.run(self.gate.send_flow(call, send))
        response = result.response
        response.extensions[EXTENSION] = result.outcome
        if result.settlement is not None:
            response = with_stream(
                response, _SettlingStream(response.stream, result.settlement, self.gate, content_encoding(response))
            )
        return response

    def close(self) -> None:
        """Close the underlying transport and the gate."""
        self._inner.close()
        self.gate.close()


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """Sends through another transport, within the quotas of providers; for `httpx.AsyncClient`."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`."""
        self.gate: AsyncGate = AsyncGate(providers, store, **options)
        self._inner = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Wait for a permit, send the request, and learn from the response."""
        call = to_outbound_request(request)

        async def send(provider: Provider | None) -> ProviderResponse:
            response = await self._inner.handle_async_request(with_key(request, self.gate.key_for(provider, call)))
            return ProviderResponse(response.status_code, rate_limit_headers(response), response.aclose, response)

        result: SendResult[httpx.Response] = await self.gate.run(self.gate.send_flow(call, send))
        response = result.response
        response.extensions[EXTENSION] = result.outcome
        if result.settlement is not None:
            response = with_stream(
                response,
                _AsyncSettlingStream(response.stream, result.settlement, self.gate, content_encoding(response)),
            )
        return response

    async def aclose(self) -> None:
        """Close the underlying transport and the gate."""
        await self._inner.aclose()
        await self.gate.close()


class _SettlingStream(httpx.SyncByteStream):
    """The body of a response; settles the charge when the body has ended."""

    def __init__(self, stream: Any, settlement: PendingSettlement, gate: Gate, coding: str) -> None:  # noqa: ANN401 - a stream of httpx
        self._stream = stream
        self._settlement = settlement
        self._gate = gate
        self._reader = UsageReader(coding) if settlement.counts_tokens else None

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            if self._reader is not None:
                self._reader.feed(piece)
            yield piece

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._gate.run(self._settlement.settle_flow(self._reader.result() if self._reader else None))


class _AsyncSettlingStream(httpx.AsyncByteStream):
    """The body of a response; settles the charge when the body has ended."""

    def __init__(self, stream: Any, settlement: PendingSettlement, gate: AsyncGate, coding: str) -> None:  # noqa: ANN401 - of httpx
        self._stream = stream
        self._settlement = settlement
        self._gate = gate
        self._reader = UsageReader(coding) if settlement.counts_tokens else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            if self._reader is not None:
                self._reader.feed(piece)
            yield piece

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._gate.run(self._settlement.settle_flow(self._reader.result() if self._reader else None))


def to_outbound_request(request: httpx.Request) -> OutboundRequest:
    """Describe a request as an OutboundRequest."""
    replayable = isinstance(request.stream, httpx.ByteStream)

    def body() -> bytes | None:
        return b"".join(request.stream) if isinstance(request.stream, httpx.ByteStream) else None

    def header(name: str) -> str | None:
        value: str | None = request.headers.get(name)
        if value is None or value.isascii():
            return value
        # httpx may decode different bytes to the same string, as UTF-8 or as Latin-1.
        return b", ".join(raw for field, raw in request.headers.raw if field.lower() == name.encode()).decode("latin-1")

    return OutboundRequest(request.method, str(request.url), header, body, replayable, unreached)


def rate_limit_headers(response: httpx.Response) -> Sequence[tuple[str, str]]:
    """Return the headers of a response if any of them are about limits: decoding headers is slow."""
    return response.headers.multi_items() if has_rate_limit_headers(response.headers.raw) else ()


def unreached(error: BaseException) -> bool:
    """Return whether an error means that the request was never sent."""
    return isinstance(error, UNREACHED)


def with_key(request: httpx.Request, added: AddedKey | None) -> httpx.Request:
    """Return a copy of the request with the provider's key; redirects are built from the original, without key."""
    if added is None:
        return request
    location, key = added
    headers, url = request.headers.copy(), request.url
    if location.kind == "header":
        headers[location.name] = key
    else:
        url = url.copy_merge_params({location.name: key})
    return httpx.Request(request.method, url, headers=headers, stream=request.stream, extensions=request.extensions)


def content_encoding(response: httpx.Response) -> str:
    """Return the Content-Encoding of a response."""
    return str(response.headers.get("content-encoding", ""))


def with_stream(response: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> httpx.Response:
    """Return the same response with another stream."""
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)
