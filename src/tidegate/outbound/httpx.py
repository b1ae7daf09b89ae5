"""Quotas for httpx: `httpx.Client(transport=RateLimitTransport(providers))`, and the same for AsyncClient.

The transport wraps another one (by default httpx's own), so it sees everything a client sends: each hop of a redirect,
each retry, HTTP/2, streams. `response.extensions["tidegate"]` is the RequestOutcome of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError
from tidegate.outbound._adapters.httpx_common import AsyncTransport, HttpxLibrary, SyncTransport
from tidegate.outbound._quota.gate import AsyncGate, Gate

try:
    import httpx
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("needs httpx: pip install 'tidegate[httpx]'") from None

if TYPE_CHECKING:
    from typing import Unpack

    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.gate_options import GateOptions
    from tidegate.stores import Store

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]

LIBRARY: Final = HttpxLibrary(httpx)


class RateLimitTransport(SyncTransport[httpx.Request, httpx.Response], httpx.BaseTransport):
    """Sends through another transport, within the quotas of providers; for `httpx.Client`."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        transport: httpx.BaseTransport | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`."""
        super().__init__(LIBRARY, Gate(providers, store, **options), transport or httpx.HTTPTransport())


class AsyncRateLimitTransport(AsyncTransport[httpx.Request, httpx.Response], httpx.AsyncBaseTransport):
    """Sends through another transport, within the quotas of providers; for `httpx.AsyncClient`."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`."""
        super().__init__(LIBRARY, AsyncGate(providers, store, **options), transport or httpx.AsyncHTTPTransport())
