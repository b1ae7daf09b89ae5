"""Fetching one source: the second of the document's two checks, and where the body goes."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError, Denied, StoreUnavailable
from tidegate.outbound.calls import asking
from tidegate.outbound.learning import REFUSED

try:
    import httpx
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("sources need httpx: pip install 'tidegate[sources]'") from None

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tidegate.outbound.sources.source import Source, Target

BAD: Final = 400
SUFFIXES: Final = {"application/json": ".json", "text/csv": ".csv", "text/html": ".html", "text/plain": ".txt",
                   "application/xml": ".xml", "text/xml": ".xml"}  # fmt: skip
WEBHOOK_WAIT: Final = 60.0
PERMITTED: Final = "tidegate.permitted"
TABLE: Final = """
CREATE TABLE IF NOT EXISTS bodies (
    source TEXT NOT NULL, fetched_at INTEGER NOT NULL, status INTEGER NOT NULL, content_type TEXT, body BLOB NOT NULL
)
"""


class Status(Enum):
    """What came of fetching a source."""

    OK = "ok"
    FAILED = "failed"
    RATE_LIMIT_EXCEEDED = "RateLimitExceeded"  # the document's name: queue again, not a failure


class Outcome(NamedTuple):
    """A status, a line about it, and after how many seconds to ask again where that is known."""

    status: Status
    result: str
    wait: float | None = None


async def fetch(
    client: httpx.AsyncClient, source: Source, folder: Path, now: int, permitted: Callable[[], None]
) -> Outcome:
    """Ask for a permit, fetch, and put the body where it belongs; `permitted` is called with the permit in hand.

    The client's transport asks, without waiting. A permit denied here, or a 429 of the provider, is no failure; a 429
    of a host without a provider is one, so that it backs off.
    """
    try:
        with asking(timeout=0):
            answer = await client.request(
                source.method,
                source.url,
                headers=source.headers,
                content=source.body,
                timeout=source.timeout,
                extensions={PERMITTED: permitted},
            )
        if answer.status_code == REFUSED and answer.extensions["tidegate"].limited:
            return Outcome(Status.RATE_LIMIT_EXCEEDED, "429 by the provider")
        if answer.status_code >= BAD:
            return Outcome(Status.FAILED, f"status {answer.status_code}")
    except Denied as denied:
        violated = ", ".join(denied.decision.violated)
        return Outcome(Status.RATE_LIMIT_EXCEEDED, f"denied by {violated}", denied.decision.retry_after)
    except httpx.HTTPError as error:
        return Outcome(Status.FAILED, type(error).__name__)  # its text may quote the URL
    except StoreUnavailable:
        return Outcome(Status.RATE_LIMIT_EXCEEDED, "the store could not be asked")
    return await deliver(client, source, folder, now, answer)


class Noting(httpx.AsyncBaseTransport):
    """Tells when a request has its permit: it stands behind the transport that asks for one."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        """Stand in front of `inner`."""
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Tell, and send."""
        permitted = request.extensions.get(PERMITTED)
        if permitted is not None:
            permitted()
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the other transport."""
        await self._inner.aclose()


async def deliver(client: httpx.AsyncClient, source: Source, folder: Path, now: int, answer: httpx.Response) -> Outcome:
    """Put a body where it belongs; relative places lie in the data folder."""
    target = source.target
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if target.kind == "files":
            await asyncio.to_thread(write_file, folder / target.place / source.name, now, kind, answer.content)
        elif target.kind == "sqlite":
            row = source.name, now, answer.status_code, kind, answer.content
            await asyncio.to_thread(write_row, folder / target.place, row)
        else:
            await post(client, source, target, answer)
    except (OSError, sqlite3.Error, httpx.HTTPError, Denied) as error:
        return Outcome(Status.FAILED, f"status {answer.status_code}, but its body was not kept: {type(error).__name__}")
    return Outcome(Status.OK, f"status {answer.status_code}, {len(answer.content)} bytes")


def write_file(folder: Path, now: int, kind: str, body: bytes) -> None:
    """Write a file that is either whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now}{SUFFIXES.get(kind, '.bin')}"
    part = path.with_suffix(".part")
    part.write_bytes(body)
    part.replace(path)


def write_row(path: Path, row: tuple[object, ...]) -> None:
    """Append a row to the table `bodies`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=10)) as db, db:
        db.execute(TABLE)
        db.execute("INSERT INTO bodies VALUES (?, ?, ?, ?, ?)", row)


async def post(client: httpx.AsyncClient, source: Source, target: Target, answer: httpx.Response) -> None:
    """Send the body on; the webhook's own provider, if it has one, limits that too."""
    headers = {"content-type": answer.headers.get("content-type", "application/octet-stream"),
               "x-tidegate-source": source.name}  # fmt: skip
    with asking(timeout=WEBHOOK_WAIT):
        reply = await client.post(target.place, content=answer.content, headers=headers, timeout=source.timeout)
    if reply.status_code >= BAD:
        raise OSError(f"the webhook answered {reply.status_code}")
