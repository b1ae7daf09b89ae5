"""One call to a provider: waits for its permit at the gate, is sent with the provider's key, and is retried if safe.

The gate retries, as the provider's file says: what the provider has refused, a connection that could not be opened, and
one that was lost before the response began, if the method is idempotent. Each attempt needs a permit; that of a request
that was not sent is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote_plus

import aiohttp
from yarl import URL

from tidegate.egress._addresses import ForbiddenAddressError
from tidegate.egress._messages import TOO_MANY_REQUESTS, EgressError
from tidegate.outbound._quota.decoding import BodyDecoder, DecodingError
from tidegate.outbound._quota.exchange import OutboundRequest, ProviderResponse, target_url
from tidegate.outbound.aiohttp import unreached

if TYPE_CHECKING:
    from collections.abc import Callable

    from multidict import CIMultiDict

    from tidegate.egress._bodies import RequestBody
    from tidegate.egress._routes import Target
    from tidegate.egress._upstream import UpstreamClient
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.exchange import SendResult
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.outbound._quota.request_tokens import RequestTokens

MAX_REFUSAL_BYTES: Final = 65_536  # of a refusal that are read before it is passed on
LOST: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


class UpstreamResponse:
    """A response of a provider whose body has not been read, except for the part that the gate has read."""

    __slots__ = ("key", "looked_at", "native", "problem")

    def __init__(self, native: aiohttp.ClientResponse, key: str | None) -> None:
        """Wrap a response; `key` is the provider's key that its request carried."""
        self.native: aiohttp.ClientResponse = native
        self.key: str | None = key
        self.looked_at: bytes = b""
        self.problem: str = ""  # why it did not reach the client as a whole

    async def look_at_body(self) -> bytes:
        """Read and decode the beginning of the body, which is still forwarded later."""
        pieces = bytearray()
        while len(pieces) < MAX_REFUSAL_BYTES and (piece := await self.native.content.readany()):
            pieces += piece
        self.looked_at = bytes(pieces)
        try:
            decoder = BodyDecoder(self.native.headers.get("Content-Encoding", ""))
            return b"".join(part for part, _ in zip(decoder.feed(self.looked_at), range(16), strict=False))
        except DecodingError:
            return b""

    async def release(self) -> None:
        """Release the response: its request is sent again."""
        self.native.close()


class ProviderCall:
    """One call: what is sent, and how."""

    def __init__(
        self,
        gate: AsyncGate,
        client: UpstreamClient,
        target: Target,
        method: str,
        headers: CIMultiDict[str],
        body: RequestBody,
        on_sending: Callable[[], object],
    ) -> None:
        """Prepare a call; `on_sending` is called when it has its permit."""
        self._gate = gate
        self._client = client
        self.target = target
        self._method = method
        self._headers = headers
        self._body = body
        self._on_sending = on_sending
        self.request: RequestTokens | None = None  # what it asks for, if the limits of its caller count that
        self._bounded: bytes | None = None
        self.attempts: int = 0
        self.arrived: bool = False  # whether the provider may have received it, and did not refuse it with a 429
        in_memory = body.whole is not None
        rewrites = in_memory and not body.encoded
        # The call as the gate sees it.
        self.outbound: OutboundRequest = OutboundRequest(
            method,
            target.quota_url,
            headers.get,
            body.content,
            in_memory,
            unreached,
            rewrites,
            reports_write=True,
            retries=self._may_retry,
        )

    def bound_output(self, body: bytes) -> None:
        """Send this body, with a bound that the limits of the caller allow, unless the gate lowers it further."""
        self._bounded = body
        self.outbound = self.outbound._replace(body=lambda: body)

    async def run(self) -> SendResult[UpstreamResponse]:
        """Wait for a permit and send, with all retries; raises Denied, or EgressError if no response arrives."""
        try:
            return await self._gate.run(self._gate.send_flow(self.outbound, self._send))
        except (*LOST, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._body.problem or describe_failure(error, self.target.provider.name) from None

    async def _send(
        self, provider: Provider | None, changed: bytes | None = None, written: Callable[[], None] | None = None
    ) -> ProviderResponse:
        self._on_sending()
        self.attempts += 1
        url, headers, key = self._with_key(provider)
        try:
            body = self._bounded if changed is None else changed
            native = await self._client.send(self._method, url, headers, self._body, body, written)
        except BaseException as error:
            self.arrived |= not unreached(error)
            raise
        self.arrived |= native.status != TOO_MANY_REQUESTS
        upstream = UpstreamResponse(native, key)
        fields = tuple(native.headers.items())
        return ProviderResponse(native.status, fields, upstream.release, upstream, upstream.look_at_body)

    def _may_retry(self, error: BaseException) -> bool:
        """Return whether the request may be sent again: the connection was lost, or could not be opened."""
        failed = isinstance(error, LOST) or (unreached(error) and not is_forbidden(error))
        return failed and self._body.replays and self._body.problem is None

    def _with_key(self, provider: Provider | None) -> tuple[URL, CIMultiDict[str], str | None]:
        """Return the URL and the header fields with the provider's key, which is only sent confidentially."""
        url, headers = self.target.url, self._headers
        if provider is not None and provider.url:
            url = URL(target_url(provider, self.outbound) or "", encoded=True)
        if provider is None or provider.api_key is None:
            return url, headers, None
        added = self._gate.planner.key_for(provider, self.outbound._replace(url=str(url)))
        if added is None:
            return url, headers, None
        headers = headers.copy()
        if added.location.kind == "header":
            headers[added.location.name] = added.text
        else:
            mark = "&" if url.raw_query_string else "?"
            query = f"{quote_plus(added.location.name)}={quote_plus(added.text)}"
            url = URL(f"{url}{mark}{query}", encoded=True)
        return url, headers, provider.api_key.reveal()


def is_forbidden(error: BaseException | None) -> bool:
    """Return whether an error means that an address may not be connected to."""
    while error is not None:
        if isinstance(error, ForbiddenAddressError):
            return True
        if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ForbiddenAddressError):
            return True
        error = error.__cause__
    return False


def describe_failure(error: BaseException, provider: str) -> EgressError:
    """Return the answer to a call that got no response; it quotes nothing of the error, which may contain a key."""
    if is_forbidden(error):
        message = f"the address of provider {provider} is not public: name its host in allow_private to allow it"
        return EgressError(403, "address-not-allowed", message)
    if isinstance(error, TimeoutError):
        return EgressError(504, "upstream-timeout", f"provider {provider} did not respond in time")
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return EgressError(502, "upstream-tls", f"the TLS connection to provider {provider} failed")
    if unreached(error):
        return EgressError(502, "upstream-unreachable", f"cannot connect to provider {provider}")
    return EgressError(
        502, "upstream-failed", f"provider {provider} closed the connection or sent a malformed response"
    )
