"""The transports of httpx and httpx2, written once: the two libraries have the same interface, but separate classes.

`tidegate.outbound.httpx` and `tidegate.outbound.httpx2` add the base class and the types of their library. Most types
here are `Any`, because a request or response may belong to either library.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tidegate.errors import ConfigError
from tidegate.outbound._quota.decoding import ACCEPT_ENCODING
from tidegate.outbound._quota.exchange import (
    AddedKey,
    OutboundRequest,
    ProviderResponse,
    SendResult,
    has_rate_limit_headers,
    target_url,
)
from tidegate.outbound._quota.refusal_body import RefusalBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from types import ModuleType

    from tidegate._runtime.clock import Clock
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.gate import AsyncGate, Gate
    from tidegate.outbound._quota.settlement import PendingSettlement

EXTENSION: Final = "tidegate"
FIRST_ERROR_STATUS: Final = 400
ENCODING_LENGTH: Final = len("content-encoding")

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class HttpxLibrary:
    """The classes of httpx or httpx2 that the transports use, and what depends on them."""

    def __init__(self, module: ModuleType) -> None:
        """Take the classes of a module that has the interface of httpx."""
        self._module: Any = module
        self._unreached = (
            self._module.ConnectError,
            self._module.ConnectTimeout,
            self._module.PoolTimeout,
            self._module.UnsupportedProtocol,
        )
        # The clients of each library check that a stream is an instance of their own classes.
        bases = self._module.SyncByteStream, self._module.AsyncByteStream
        self.stream_class: type[SettlingStream] = type("SettlingStream", (SettlingStream, *bases), {})
        self.resumed_class: type[ResumedStream] = type("ResumedStream", (ResumedStream, *bases), {})
        self.watched_class: type[WatchedBody] = type("WatchedBody", (WatchedBody, *bases), {})

    def to_outbound_request(self, request: Any) -> OutboundRequest:  # noqa: ANN401 - of either library
        """Describe a request as an OutboundRequest."""
        if not isinstance(request, self._module.Request):
            own, other = self._module.__name__, type(request).__module__.partition(".")[0]
            raise ConfigError(
                f"this transport is for {own}, and the client is of {other}: import RateLimitTransport or "
                f"AsyncRateLimitTransport from tidegate.outbound.{other}"
            )
        replayable = isinstance(request.stream, self._module.ByteStream)

        def body() -> bytes | None:
            return b"".join(request.stream) if isinstance(request.stream, self._module.ByteStream) else None

        def form() -> bytes | None:
            fields = getattr(request.stream, "fields", None)  # of a MultipartStream
            if fields is None:
                return None
            in_memory = (field for field in fields if isinstance(getattr(field, "file", b""), (str, bytes)))
            return b"".join(b"--form\r\n" + b"".join(field.render()) + b"\r\n" for field in in_memory) + b"--form--"

        def header(name: str) -> str | None:
            value: str | None = request.headers.get(name)
            if value is None or value.isascii():
                return value
            # httpx may decode different bytes to the same string, as UTF-8 or as Latin-1.
            lines = (raw for field, raw in request.headers.raw if field.lower() == name.encode())
            return b", ".join(lines).decode("latin-1")

        return OutboundRequest(
            request.method,
            str(request.url),
            header,
            body,
            replayable,
            self._is_unreached,
            replayable,
            reports_write=True,
            form=form,
        )

    def for_provider(
        self,
        request: Any,  # noqa: ANN401 - of either library
        call: OutboundRequest,
        provider: Provider | None,
        body: bytes | None,
        gate: Gate | AsyncGate,
    ) -> Any:  # noqa: ANN401 - of either library
        """Return the request as it is sent: with the URL and the key of the provider, and `body` if it is given."""
        if body is not None or (provider is not None and provider.changes_requests):
            request = self.with_url(self.with_body(request, body), target_url(provider, call))
            request = self.with_key(request, gate.planner.key_for(provider, call))
        if provider is not None and provider.reads_requests:
            request = self.with_readable_coding(request)
        return request

    def _copy(self, request: Any, url: Any, headers: Any, stream: Any = None) -> Any:  # noqa: ANN401 - of either library
        """Return a copy of a request with another URL, header fields, and perhaps body."""
        return self._module.Request(
            request.method, url, headers=headers, stream=stream or request.stream, extensions=request.extensions
        )

    def with_key(self, request: Any, added: AddedKey | None) -> Any:  # noqa: ANN401 - of either library
        """Return a copy of the request with the provider's key; redirects are built from the original, without key."""
        if added is None:
            return request
        location, key, replaced = added
        headers, url = request.headers.copy(), request.url
        for name in replaced:
            headers.pop(name, None)
        if location.kind == "header":
            headers[location.name] = key
        else:
            url = url.copy_merge_params({location.name: key})
        return self._copy(request, url, headers)

    def with_url(self, request: Any, url: str | None) -> Any:  # noqa: ANN401 - of either library
        """Return a copy of the request to another URL, if one is given: that of a member of a pool."""
        if url is None:
            return request
        headers = request.headers.copy()
        headers["host"] = self._module.URL(url).netloc.decode("ascii")
        return self._copy(request, url, headers)

    def with_body(self, request: Any, body: bytes | None) -> Any:  # noqa: ANN401 - of either library
        """Return a copy of the request with another body, if one is given."""
        if body is None:
            return request
        headers = request.headers.copy()
        headers["content-length"] = str(len(body))
        return self._copy(request, request.url, headers, self._module.ByteStream(body))

    def with_readable_coding(self, request: Any) -> Any:  # noqa: ANN401 - of either library
        """Return a copy of the request that accepts only codings whose usage can be read, unless it does already."""
        accepted = next((value for name, value in request.headers.raw if name.lower() == b"accept-encoding"), b"")
        if b"br" not in accepted and b"zstd" not in accepted:
            return request
        headers = request.headers.copy()
        headers["accept-encoding"] = ACCEPT_ENCODING
        return self._copy(request, request.url, headers)

    def read_refusal(self, response: Any, clock: Clock) -> bytes:  # noqa: ANN401 - of either library
        """Read the start of the body of a refusal; the client can still read all of it."""
        body = RefusalBody(clock, content_encoding(response.headers.raw))
        rest = iter(response.stream)
        if all(map(body.add, rest)):
            response.stream.close()
            response.stream = self._module.ByteStream(b"".join(body.pieces))
        else:
            response.stream = self.resumed_class(body.pieces, rest, response.stream)
        return body.content

    async def read_refusal_async(self, response: Any, clock: Clock) -> bytes:  # noqa: ANN401 - of either library
        """Read the start of the body of a refusal; the client can still read all of it."""
        body = RefusalBody(clock, content_encoding(response.headers.raw))
        rest = aiter(response.stream)
        async for piece in rest:
            if not body.add(piece):
                response.stream = self.resumed_class(body.pieces, rest, response.stream)
                return body.content
        await response.stream.aclose()
        response.stream = self._module.ByteStream(b"".join(body.pieces))
        return body.content

    def to_response(self, result: SendResult[Any], gate: Gate | AsyncGate) -> Any:  # noqa: ANN401 - of either library
        """Return the response of a sent request, with its outcome; the end of its body settles the charge."""
        response = result.response
        response.extensions[EXTENSION] = result.outcome
        if result.settlement is None:
            return response
        stream = self.stream_class(response.stream, result.settlement, gate, content_encoding(response.headers.raw))
        if not response.is_stream_consumed:
            response.stream = stream
            return response
        # A response that was already read, such as one of a mock, would not read another stream.
        return self._module.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )

    def _is_unreached(self, error: BaseException) -> bool:
        """Return whether an error means that the request was never sent."""
        return isinstance(error, self._unreached)


class SyncTransport(Generic[RequestT, ResponseT]):
    """Sends through another transport, within the quotas of a gate."""

    def __init__(self, library: HttpxLibrary, gate: Gate, transport: object) -> None:
        """Use the classes of `library`, and send through `transport`."""
        self.gate: Gate = gate
        self._library = library
        self._inner: Any = transport

    def handle_request(self, request: RequestT) -> ResponseT:
        """Wait for a permit, send the request, and learn from the response."""
        call = self._library.to_outbound_request(request)

        def send(
            provider: Provider | None, body: bytes | None = None, written: Callable[[], None] | None = None
        ) -> ProviderResponse:
            changed = self._library.for_provider(request, call, provider, body, self.gate)
            own_body = changed.stream
            if written is not None:
                changed.stream = self._library.watched_class(own_body, written)
            try:
                response = self._inner.handle_request(changed)
            finally:
                changed.stream = own_body
            status, read = response.status_code, None
            if status >= FIRST_ERROR_STATUS:
                read = partial(self._library.read_refusal, response, self.gate.clock)
            return ProviderResponse(status, rate_limit_headers(response), response.close, response, read)

        result: SendResult[Any] = self.gate.run(self.gate.send_flow(call, send))
        response: ResponseT = self._library.to_response(result, self.gate)
        return response

    def close(self) -> None:
        """Close the underlying transport and the gate."""
        self._inner.close()
        self.gate.close()


class AsyncTransport(Generic[RequestT, ResponseT]):
    """Sends through another transport, within the quotas of a gate; for asyncio."""

    def __init__(self, library: HttpxLibrary, gate: AsyncGate, transport: object) -> None:
        """Use the classes of `library`, and send through `transport`."""
        self.gate: AsyncGate = gate
        self._library = library
        self._inner: Any = transport

    async def handle_async_request(self, request: RequestT) -> ResponseT:
        """Wait for a permit, send the request, and learn from the response."""
        call = self._library.to_outbound_request(request)

        async def send(
            provider: Provider | None, body: bytes | None = None, written: Callable[[], None] | None = None
        ) -> ProviderResponse:
            changed = self._library.for_provider(request, call, provider, body, self.gate)
            own_body = changed.stream
            if written is not None:
                changed.stream = self._library.watched_class(own_body, written)
            try:
                response = await self._inner.handle_async_request(changed)
            finally:
                changed.stream = own_body
            status, read = response.status_code, None
            if status >= FIRST_ERROR_STATUS:
                read = partial(self._library.read_refusal_async, response, self.gate.clock)
            return ProviderResponse(status, rate_limit_headers(response), response.aclose, response, read)

        result: SendResult[Any] = await self.gate.run(self.gate.send_flow(call, send))
        response: ResponseT = self._library.to_response(result, self.gate)
        return response

    async def aclose(self) -> None:
        """Close the underlying transport and the gate."""
        await self._inner.aclose()
        await self.gate.close()


class SettlingStream:
    """The body of a response, for threads and tasks; settles the charge when the body has ended."""

    def __init__(self, stream: Any, settlement: PendingSettlement, gate: Gate | AsyncGate, encoding: str) -> None:  # noqa: ANN401 - of either library
        """Wrap the stream of a response with this content encoding."""
        self._stream = stream
        self._settlement: PendingSettlement | None = settlement
        self._gate: Any = gate
        settlement.open(encoding)

    def __iter__(self) -> Iterator[bytes]:
        settlement = self._settlement
        for piece in self._stream:
            if settlement is not None and settlement.feed(piece):
                self._gate.run(settlement.renew_flow())
            yield piece
        if settlement is not None:
            settlement.end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        settlement = self._settlement
        async for piece in self._stream:
            if settlement is not None and settlement.feed(piece):
                await self._gate.run(settlement.renew_flow())
            yield piece
        if settlement is not None:
            settlement.end()

    def close(self) -> None:
        """Close the underlying stream, and settle the charge."""
        # The response refers to itself through this stream, so what is left here stays until a collection.
        settlement, self._settlement = self._settlement, None
        try:
            self._stream.close()
        finally:
            if settlement is not None:
                self._gate.run(settlement.settle_flow())

    async def aclose(self) -> None:
        """Close the underlying stream, and settle the charge."""
        settlement, self._settlement = self._settlement, None  # as above
        try:
            await self._stream.aclose()
        finally:
            if settlement is not None:
                await self._gate.run(settlement.settle_flow())


class WatchedBody:
    """The body of a request, for threads and tasks, which reports that it has been written."""

    def __init__(self, stream: Any, written: Callable[[], None]) -> None:  # noqa: ANN401 - of either library
        """Wrap the stream of a request; `written` is called at its end."""
        self._stream = stream
        self._written = written

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream
        self._written()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece
        self._written()


class ResumedStream:
    """A body whose first pieces were already read, for threads and tasks."""

    def __init__(self, first: list[bytes], rest: Any, stream: Any) -> None:  # noqa: ANN401 - of either library
        """Yield the first pieces, then the rest of the stream."""
        self._first = first
        self._rest = rest
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from self._first
        yield from self._rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._first:
            yield piece
        async for piece in self._rest:
            yield piece

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()


def content_encoding(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the Content-Encoding of raw headers: decoding all headers is slow."""
    for name, value in headers:
        if len(name) == ENCODING_LENGTH and name.lower() == b"content-encoding":
            return value.decode("latin-1")
    return ""


def rate_limit_headers(response: Any) -> Sequence[tuple[str, str]]:  # noqa: ANN401 - of either library
    """Return the headers of a response if any of them are about limits: decoding headers is slow."""
    return response.headers.multi_items() if has_rate_limit_headers(response.headers.raw) else ()
