"""Fetch one source: the second check of capacity, then the request, within a maximum size and time."""

from __future__ import annotations

import asyncio
import sqlite3
from enum import Enum
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import httpx

from tidegate._policy.durations import format_exact_duration
from tidegate.core._decision import LocalDecision
from tidegate.errors import Denied, StoreUnavailable
from tidegate.outbound._capacity.learning import TOO_MANY_REQUESTS
from tidegate.outbound._quota.decoding import ACCEPT_ENCODING, DecodingError
from tidegate.outbound._quota.exchange import request_options
from tidegate.outbound.sources._delivery import FetchedBody, deliver, download_file
from tidegate.outbound.sources._download import RedirectError, TooLargeError, open_response, save_body
from tidegate.outbound.sources._failures import explain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tidegate.outbound.sources._source import Source

FIRST_ERROR_STATUS: Final = 400
PERMIT_EXTENSION: Final = "tidegate.permitted"
NO_STORE: Final = "the store of the permits is unavailable"


class FetchStatus(Enum):
    """The result of fetching a source."""

    OK = "ok"
    FAILED = "failed"
    RATE_LIMIT_EXCEEDED = "RateLimitExceeded"  # requeue; not a failure


class FetchResult(NamedTuple):
    """A status, a short description, and after how many seconds to retry if that is known."""

    status: FetchStatus
    result: str
    wait: float | None = None


async def fetch(
    transport: httpx.AsyncBaseTransport, source: Source, folder: Path, now: int, permitted: Callable[[], None]
) -> FetchResult:
    """Get a permit, download, and deliver the body; `permitted` is called once the permit is granted.

    The transport requests the permit without waiting. A permit denied here, or a 429 of the provider, is not a failure;
    a 429 of a host without a provider is one, so that it backs off. The client, with its cookies, is used for one
    fetch.
    """
    client = httpx.AsyncClient(transport=transport)
    try:
        with download_file(source, folder, now) as file:
            body = await _download(client, source, permitted, file)
            if isinstance(body, FetchResult):
                return body
            await deliver(client, source, folder, now, body)
    except (OSError, sqlite3.Error, httpx.HTTPError, Denied, StoreUnavailable) as error:
        return FetchResult(FetchStatus.FAILED, f"the body was not stored: {explain(error)}")
    return FetchResult(FetchStatus.OK, f"status {body.status}, {body.size} bytes")


async def _download(
    client: httpx.AsyncClient, source: Source, permitted: Callable[[], None], file: IO[bytes]
) -> FetchedBody | FetchResult:
    """Download a body into a file within the source's size and time, or return why there is none."""
    try:
        async with asyncio.timeout(source.timeout):
            with request_options(timeout=0):
                response = await open_response(client, _request(client, source, permitted))
            try:
                if (refused := _refusal_or_failure(response)) is not None:
                    return refused
                size = await save_body(response, source.max_bytes, file)
            finally:
                await response.aclose()
    except Denied as denied:
        lost = isinstance(denied.decision, LocalDecision)
        why = NO_STORE if lost else f"denied by {', '.join(denied.decision.violated)}"
        return rate_limit_exceeded(why, denied.decision.retry_after)
    except StoreUnavailable:
        return rate_limit_exceeded(NO_STORE)
    except (TimeoutError, TooLargeError, RedirectError, DecodingError, httpx.HTTPError) as error:
        return FetchResult(FetchStatus.FAILED, _explain(source, error))
    return FetchedBody(file, size, response.status_code, response.headers.get("content-type", ""))


def _explain(source: Source, error: Exception) -> str:
    """Describe briefly why a download failed, without quoting the URL."""
    if isinstance(error, (TimeoutError, httpx.TimeoutException)):
        return f"too slow: not within {format_exact_duration(source.timeout)}"
    if isinstance(error, TooLargeError):
        return f"too large: more than {source.max_bytes} bytes"
    return explain(error) if isinstance(error, httpx.HTTPError) else str(error)


def rate_limit_exceeded(why: str, wait: float | None = None) -> FetchResult:
    """Return the result of a fetch that is requeued: the log and the ledger show its name."""
    return FetchResult(FetchStatus.RATE_LIMIT_EXCEEDED, f"{FetchStatus.RATE_LIMIT_EXCEEDED.value} ({why})", wait)


def _request(client: httpx.AsyncClient, source: Source, permitted: Callable[[], None]) -> httpx.Request:
    headers = httpx.Headers(source.headers)
    headers.setdefault("accept-encoding", ACCEPT_ENCODING)
    return client.build_request(
        source.method,
        source.url,
        headers=headers,
        content=source.body,
        timeout=None,  # the whole fetch has a deadline
        extensions={PERMIT_EXTENSION: permitted},
    )


def _refusal_or_failure(response: httpx.Response) -> FetchResult | None:
    """Return the result of a refusal or failure; None: there is a body."""
    if response.status_code == TOO_MANY_REQUESTS and response.extensions["tidegate"].limited:
        return rate_limit_exceeded("the provider responded with status 429")
    return (
        FetchResult(FetchStatus.FAILED, f"status {response.status_code}")
        if response.status_code >= FIRST_ERROR_STATUS
        else None
    )


class PermitObserver(httpx.AsyncBaseTransport):
    """Calls a function when a request has its permit; wrapped by the transport that requests the permit."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        """Wrap `inner`."""
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Call the function, and send."""
        permitted = request.extensions.get(PERMIT_EXTENSION)
        if permitted is not None:
            permitted()
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the underlying transport."""
        await self._inner.aclose()
