"""A panel of applications with the inbound middleware, read from their admin endpoints while a page is open.

A middleware counts in its own process. The service asks each application for its statistics, at most once in
`MAX_AGE`. If an application does not respond, the panel shows the reason.
"""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.clock import Clock

MAX_AGE: Final = 3 * SECOND
REQUEST_TIMEOUT: Final = 1.5  # seconds for each step of a request: less than a panel may take
MAX_RESPONSE_BYTES: Final = 2**20
MAX_ROWS: Final = 100  # of one application
MAX_NAME_LENGTH: Final = 200  # characters
OK: Final = 200


class ApplicationsPanel:
    """The categories and the denied routes of applications."""

    def __init__(self, urls: tuple[str, ...], token: str | None, clock: Clock) -> None:
        """Show the applications with these admin endpoints."""
        self._urls = urls
        self._token = token
        self._clock = clock
        self._read_at: int | None = None
        self._rows: list[dict[str, Any]] = []

    async def __call__(self) -> list[dict[str, Any]]:
        """Return a row for each category and each limit that denied a request, those with most denials first."""
        now = self._clock.steady()
        if self._read_at is None or now - self._read_at >= MAX_AGE:
            self._read_at = now
            found = await asyncio.gather(*(asyncio.to_thread(read_application, url, self._token) for url in self._urls))
            self._rows = [row for rows in found for row in rows]
        return self._rows


def read_application(url: str, token: str | None) -> list[dict[str, Any]]:
    """Read the statistics of one application; if that fails, return a row with the reason."""
    name = urlsplit(url).netloc.rpartition("@")[2]
    try:
        rows = describe_statistics(_request(url, token))
    except (OSError, HTTPException, ValueError, TypeError, AttributeError) as error:
        return [{"application": name, "error": f"{error}"[:MAX_NAME_LENGTH] or type(error).__name__}]
    return [{"application": name, **row} for row in rows]


def describe_statistics(statistics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe the response of an admin endpoint: its categories, then the routes that denied requests."""
    clients, decisions = statistics["by_category"], statistics.get("decisions", {})
    rows: list[dict[str, Any]] = [
        {
            "name": str(name)[:MAX_NAME_LENGTH],
            "clients": int(clients.get(name, 0)),
            "allowed": int(counts["allowed"]),
            "denied": int(counts["denied"]),
        }
        for name, counts in decisions.items()
    ]
    routes: list[dict[str, Any]] = [
        {"name": str(name)[:MAX_NAME_LENGTH], "clients": None, "allowed": None, "denied": int(denied)}
        for name, denied in statistics.get("denied_by_limit", {}).items()
        if name not in decisions
    ]
    return sorted([*rows, *routes], key=lambda row: -row["denied"])[:MAX_ROWS]


def _request(url: str, token: str | None) -> Any:  # noqa: ANN401 - JSON
    """Request the statistics; redirects are errors, so the token goes only to the configured address."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request("GET", f"{parts.path or '/'}?top=0", headers=headers)
        response = connection.getresponse()
        body = response.read(MAX_RESPONSE_BYTES)
    finally:
        connection.close()
    if response.status != OK:
        raise ValueError(f"its admin endpoint responded with status {response.status}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("its admin endpoint did not respond with JSON") from None
