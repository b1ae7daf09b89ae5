"""Quotas for requests: `session.mount("https://", RateLimitAdapter(providers))`, and the same for "http://".

Each hop of a redirect passes through the adapter, so the second host is charged too. `response.tidegate` is the
RequestOutcome. urllib3's own retries would be sent without being counted, so only connection retries are allowed; use a
provider's `retries` setting to retry refused requests.
"""

from __future__ import annotations

import logging
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from tidegate.errors import ConfigError
from tidegate.outbound._quota.exchange import (
    AddedKey,
    OutboundRequest,
    ProviderResponse,
    SendResult,
    is_rate_limit_name,
    target_url,
)
from tidegate.outbound._quota.gate import Gate
from tidegate.outbound._quota.refusal_body import RefusalBody

try:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import Retry
    from urllib3.exceptions import MaxRetryError, NewConnectionError
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("needs requests: pip install 'tidegate[requests]'") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Unpack

    from tidegate._runtime.clock import Clock
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.gate_options import GateOptions
    from tidegate.outbound._quota.settlement import PendingSettlement
    from tidegate.stores import Store

__all__ = ["RateLimitAdapter"]

HIDDEN_TEXT: Final = "…"
REFUSAL_CHUNK: Final = 4096  # bytes of a refusal that are read, and decoded, at a time
POOL_LOG: Final = "urllib3.connectionpool"


class RateLimitAdapter(HTTPAdapter):
    """Sends requests within the quotas of providers; mount it for both "https://" and "http://"."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        *,
        max_retries: int = 0,
        pool_connections: int = 10,
        pool_maxsize: int = 10,
        pool_block: bool = False,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`.

        `max_retries` is how often a failed connection attempt is retried.
        """
        if not isinstance(max_retries, int):
            message = (
                "must be an integer: retries by urllib3 are not counted; use the 'retries' setting of the provider"
            )
            raise ConfigError(message, field="max_retries")
        self.gate: Gate = Gate(providers, store, **options)
        self._secret_filter = SecretFilter()
        retry = Retry(total=max_retries, connect=max_retries, read=False, status=0, other=0, redirect=0)
        super().__init__(pool_connections, pool_maxsize, retry, pool_block)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 - as requests has it
        timeout: float | tuple[float, float] | tuple[float, None] | None = None,
        verify: bool | str = True,  # noqa: FBT001, FBT002 - as requests has it
        cert: str | bytes | tuple[str | bytes, str | bytes] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Wait for a permit, send the request, and learn from the response."""
        call = to_outbound_request(request)
        keys: list[str] = []

        def send(
            provider: Provider | None, body: bytes | None = None, written: Callable[[], None] | None = None
        ) -> ProviderResponse:
            sent = request
            if body is not None or (provider is not None and provider.changes_requests):
                sent = with_url(with_body(request, body), target_url(provider, call))
                sent = self._with_key(sent, self.gate.planner.key_for(provider, call), keys)
            if written is not None and (whole := call.body() if body is None else body):
                sent = copy(sent)
                sent.body = _WatchedBody(whole, written)  # type: ignore[assignment]  # urllib3 also accepts an iterable
            response = super(RateLimitAdapter, self).send(sent, stream, timeout, verify, cert, proxies)
            response.request, response.url = request, request.url or ""
            names = response.raw.headers  # iterating over its items is slow
            headers = tuple(names.items()) if any(map(is_rate_limit_name, names)) else ()
            read = partial(read_refusal, response, self.gate.clock)
            return ProviderResponse(response.status_code, headers, response.close, response, read)

        try:
            result: SendResult[requests.Response] = self.gate.run(self.gate.send_flow(call, send))
        except requests.RequestException as error:
            error.request = request
            raise without_keys(error, keys, request) from None
        response = result.response
        response.tidegate = result.outcome  # type: ignore[attr-defined]  # a new attribute
        if result.settlement is not None:
            response.raw = _SettlingRaw(response.raw, result.settlement, self.gate)
        return response

    def _with_key(
        self, request: requests.PreparedRequest, added: AddedKey | None, keys: list[str]
    ) -> requests.PreparedRequest:
        """Return a copy of the request with the provider's key; redirects are built from the original, without key."""
        if added is None:
            return request
        location, key, replaced = added
        request = request.copy()
        for name in replaced:
            request.headers.pop(name, None)
        if location.kind == "header":
            request.headers[location.name] = key
        else:
            request.prepare_url(request.url, {location.name: key})
            keys.append(key)
            self._secret_filter.hide(key)
        return request

    def close(self) -> None:
        """Close the connections and the gate."""
        super().close()
        self.gate.close()
        self._secret_filter.close()


class SecretFilter(logging.Filter):
    """Removes keys that are sent in a query from urllib3's debug log."""

    def __init__(self) -> None:
        """Start without keys."""
        super().__init__()
        self._keys: set[str] = set()

    def hide(self, key: str) -> None:
        """Hide a key from now on, also in its URL-encoded form."""
        if key not in self._keys:
            self._keys.update((key, quote(key, safe="")))
            logging.getLogger(POOL_LOG).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Accept every record, with the keys removed."""
        if isinstance(record.args, tuple):
            record.args = tuple(hide_keys(arg, self._keys) if isinstance(arg, str) else arg for arg in record.args)
        return True

    def close(self) -> None:
        """Remove the filter from the log."""
        logging.getLogger(POOL_LOG).removeFilter(self)
        self._keys.clear()


class _WatchedBody:
    """The body of a request, which reports that it has been written."""

    def __init__(self, body: bytes, written: Callable[[], None]) -> None:
        self._body = body
        self._written = written

    def __iter__(self) -> Iterator[bytes]:
        yield self._body
        self._written()


class _SettlingRaw:
    """The raw response; settles the charge when its body has ended."""

    def __init__(self, raw: Any, settlement: PendingSettlement, gate: Gate) -> None:  # noqa: ANN401 - of urllib3
        self._raw = raw
        self._settlement = settlement
        self._gate = gate
        settlement.open()

    def stream(self, amount: int = 2**16, decode_content: bool | None = None) -> Iterator[bytes]:  # noqa: FBT001 - as urllib3 has it
        settlement = self._settlement
        for piece in self._raw.stream(amount, decode_content=decode_content):
            if settlement.feed(piece):
                self._gate.run(settlement.renew_flow())
            yield piece
        settlement.end()
        self._settle()

    def close(self) -> None:
        try:
            self._raw.close()
        finally:
            self._settle()

    def release_conn(self) -> None:
        try:
            self._raw.release_conn()
        finally:
            self._settle()

    def _settle(self) -> None:
        self._gate.run(self._settlement.settle_flow())

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the raw response
        return getattr(self._raw, name)


class _ResumedRaw:
    """The raw response, whose first decoded pieces were already read."""

    def __init__(self, raw: Any, first: list[bytes], rest: Iterator[bytes]) -> None:  # noqa: ANN401 - of urllib3
        self._raw = raw
        self._first = first
        self._rest = rest

    def stream(self, _amount: int = 2**16, decode_content: bool | None = None) -> Iterator[bytes]:  # noqa: ARG002, FBT001 - as urllib3 has it
        yield from self._first
        yield from self._rest

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the raw response
        return getattr(self._raw, name)


def read_refusal(response: requests.Response, clock: Clock) -> bytes:
    """Read the start of the body of a refusal; the client can still read all of it."""
    body = RefusalBody(clock)
    rest = response.raw.stream(REFUSAL_CHUNK, decode_content=True)
    read_all = all(map(body.add, rest))
    response.raw = _ResumedRaw(response.raw, body.pieces, iter(()) if read_all else rest)
    return body.content


def to_outbound_request(request: requests.PreparedRequest) -> OutboundRequest:
    """Describe a request as an OutboundRequest."""
    body = request.body

    def content() -> bytes | None:
        if isinstance(body, str):
            return body.encode()
        return body if isinstance(body, bytes) else None

    def header(name: str) -> str | None:
        value = request.headers.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    replayable = body is None or isinstance(body, (bytes, str))
    method, url = request.method or "GET", request.url or ""
    # Older versions of urllib3 encode other strings in another way.
    watched = isinstance(body, bytes) or (isinstance(body, str) and body.isascii())
    return OutboundRequest(method, url, header, content, replayable, unreached, replayable, reports_write=watched)


def with_url(request: requests.PreparedRequest, url: str | None) -> requests.PreparedRequest:
    """Return a copy of the request to another URL, if one is given: that of a member of a pool."""
    if url is None:
        return request
    changed = request.copy()
    changed.prepare_url(url, None)
    return changed


def with_body(request: requests.PreparedRequest, body: bytes | None) -> requests.PreparedRequest:
    """Return a copy of the request with another body, if one is given."""
    if body is None:
        return request
    request = request.copy()
    request.body = body
    request.headers["Content-Length"] = str(len(body))
    return request


def unreached(error: BaseException) -> bool:
    """Return whether an error means that the request was never sent."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    cause = error.args[0] if isinstance(error, requests.ConnectionError) and error.args else None
    return isinstance(cause, MaxRetryError) and isinstance(cause.reason, NewConnectionError)


def without_keys(
    error: requests.RequestException, keys: list[str], request: requests.PreparedRequest
) -> requests.RequestException:
    """Return an error that does not show keys; urllib3 quotes the whole query."""
    if not keys:
        return error
    text = hide_keys(str(error), {*keys, *(quote(key, safe="") for key in keys)})
    return type(error)(text, request=request, response=error.response)


def hide_keys(text: str, keys: set[str]) -> str:
    """Replace keys in a string."""
    for key in sorted(keys, key=len, reverse=True):
        text = text.replace(key, HIDDEN_TEXT)
    return text
