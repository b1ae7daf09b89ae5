"""The body of a request: read into memory if its tokens must be counted, otherwise forwarded as it arrives."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from aiohttp import web

from tidegate.egress._messages import EgressError
from tidegate.outbound._quota.cost import is_signed
from tidegate.outbound._quota.decoding import IDENTITY_CODINGS, BodyDecoder, DecodingError
from tidegate.outbound._quota.json_body import complexity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tidegate.egress._settings import EgressSettings

# Of a body that is parsed, for at most 50 ms: the slowest body took 47 ms, with msgspec, on a busy machine.
MAX_COMPLEXITY: Final = 20_000
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HeldBodies:
    """The bytes of all bodies that a gateway has in memory at the same time, in all and by caller."""

    def __init__(self) -> None:
        """Start without any."""
        self.size: int = 0
        self._by_caller: Counter[str] = Counter()

    def add(self, caller: str, size: int, settings: EgressSettings) -> None:
        """Count more bytes; raises EgressError (503) if there would be too many.

        If there are several callers, one of them can use half of the bytes, so that it does not lock out the others.
        """
        most = settings.max_held_bodies
        share = most if len(settings.callers) <= 1 else most // 2
        if self.size + size > most or self._by_caller[caller] + size > share:
            owner = "requests" if self.size + size > most else f"requests of caller {caller}"
            message = f"the gateway holds too many bytes of other {owner} (max_held_bodies): try again later"
            raise EgressError(503, "bodies-full", message, {"Retry-After": "1"})
        self.size += size
        self._by_caller[caller] += size

    def remove(self, caller: str, size: int) -> None:
        """Count bytes no longer."""
        self.size -= size
        self._by_caller[caller] -= size
        if not self._by_caller[caller]:
            del self._by_caller[caller]


class RequestBody:
    """The body of one request. `read_whole` reads it into memory; otherwise `stream` passes it on."""

    def __init__(self, request: web.BaseRequest, settings: EgressSettings, held: HeldBodies, caller: str) -> None:
        """Refuse a body that is declared too large; what is read into memory counts in `held` until `release`."""
        self._request = request
        self._caller = caller
        self._held = held
        self._held_size = 0
        self._settings = settings
        self.length: int | None = request.content_length
        self.exists: bool = request.can_read_body
        self.whole: bytes | None = None if self.exists else b""
        self._decoded: bytes | None = None
        self._coding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
        self.problem: EgressError | None = None  # why passing it on has failed
        self.sent: int = 0
        self.deadline: asyncio.Timeout | None = None  # by which the provider must have read a piece
        if self.length is not None and self.length > settings.max_body:
            raise too_large(settings.max_body)

    @property
    def replays(self) -> bool:
        """Whether it can be sent again: it is in memory, or nothing of it was sent."""
        return self.whole is not None or self.sent == 0

    @property
    def fits(self) -> bool:
        """Whether it is known to be small enough to be metered."""
        return self.length is not None and self.length <= self._settings.max_metered_body

    @property
    def expected(self) -> bool:
        """Whether the client waits until it is told to send the body (`Expect: 100-continue`)."""
        return self.exists and self._request.headers.get("Expect", "").lower() == "100-continue"

    async def accept(self) -> None:
        """Tell the client to send the body."""
        writer = self._request.writer
        await writer.write(CONTINUE)
        writer.output_size = 0  # nothing of the response was sent

    async def read_whole(self) -> None:
        """Read the body into memory; refuse one that is too large to be metered."""
        if self.whole is not None:
            return
        most = self._settings.max_metered_body
        if self.length is not None and self.length > most:
            raise too_large(most)
        pieces = bytearray()
        async for piece in self.stream():
            self._hold(len(piece))
            pieces += piece
            if len(pieces) > most:
                raise too_large(most)
        self.whole = bytes(pieces)

    def _hold(self, size: int) -> None:
        self._held.add(self._caller, size, self._settings)
        self._held_size += size

    def release(self) -> None:
        """Count its bytes no longer: the request is over."""
        self._held.remove(self._caller, self._held_size)
        self._held_size = 0

    def check_complexity(self) -> None:
        """Refuse a body that would take long to parse, which stops all other requests meanwhile."""
        content = self.content()
        if content and complexity(content, MAX_COMPLEXITY) > MAX_COMPLEXITY:
            message = "the body has too many values to be counted: send fewer or shorter lists and mappings"
            raise EgressError(413, "too-large", message)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; a client that stops sending, or sends too much, is an error."""
        content, loop = self._request.content, asyncio.get_running_loop()
        try:
            while not content.at_eof():
                async with asyncio.timeout(self._settings.client_timeout):
                    piece = await content.readany()
                if not piece:
                    return
                self.sent += len(piece)
                if self.sent > self._settings.max_body:
                    raise too_large(self._settings.max_body)
                self._reschedule(loop.time() + self._settings.first_byte_timeout)
                yield piece
                self._reschedule(None)
        except TimeoutError:
            self.problem = EgressError(408, "request-timeout", "the body of the request was not received in time")
            raise self.problem from None
        except web.RequestPayloadError:
            self.problem = EgressError(400, "bad-body", "the body of the request is malformed")
            raise self.problem from None
        except EgressError as error:
            self.problem = error
            raise

    def _reschedule(self, when: float | None) -> None:
        """Give the provider until this time to read a piece; None: no deadline while the client sends the next one."""
        if self.deadline is not None:
            self.deadline.reschedule(when)

    def decode(self) -> None:
        """Decode the body that is in memory, and send it decoded: so what is sent is what was counted.

        A signed body is sent as it is. Raises EgressError (415, 413) if it cannot be decoded.
        """
        if self.whole is None or not self.encoded:
            return
        found, most = bytearray(), self._settings.max_metered_body
        try:
            decoder = BodyDecoder(self._coding)
            for piece in decoder.feed(self.whole):
                self._hold(len(piece))
                found += piece
                if len(found) > most:
                    raise too_large(most)
            decoder.finish()
        except DecodingError as error:
            message = f"{error}: tokens or money are limited, so the body must be plain, or gzip or deflate"
            raise EgressError(415, "unreadable-body", message) from None
        self._decoded = bytes(found)
        if not is_signed(self._request.headers.get):
            self.whole, self._coding = self._decoded, ""

    def content(self) -> bytes | None:
        """Return the body as it is counted; None: it is not in memory, or was not decoded."""
        return self._decoded if self.encoded else self.whole

    @property
    def encoded(self) -> bool:
        """Whether it has a Content-Encoding."""
        return self._coding not in IDENTITY_CODINGS


def too_large(most: int) -> EgressError:
    """Return the error for a body of more than this many bytes."""
    return EgressError(413, "too-large", f"the body of this request must not exceed {most} bytes")
