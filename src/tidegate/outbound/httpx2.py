"""Quotas for httpx2: `httpx2.Client(transport=RateLimitTransport(providers))`, and the same for AsyncClient.

httpx2 is the HTTP library of the current SDKs of OpenAI, Anthropic, Google and Mistral.

The transport wraps another one (by default httpx2's own), so it sees everything a client sends: each hop of a redirect,
each retry, HTTP/2, streams. `response.extensions["tidegate"]` is the RequestOutcome of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError
from tidegate.outbound._adapters.httpx_common import AsyncTransport, HttpxLibrary, SyncTransport
from tidegate.outbound._quota.gate import AsyncGate, Gate

try:
    import httpx2
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("needs httpx2: pip install 'tidegate[httpx2]'") from None

if TYPE_CHECKING:
    from typing import Unpack

    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.gate_options import GateOptions
    from tidegate.stores import Store

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]

LIBRARY: Final = HttpxLibrary(httpx2)


class RateLimitTransport(SyncTransport[httpx2.Request, httpx2.Response], httpx2.BaseTransport):
    """Sends through another transport, within the quotas of providers; for `httpx2.Client`."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        transport: httpx2.BaseTransport | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`."""
        super().__init__(LIBRARY, Gate(providers, store, **options), transport or httpx2.HTTPTransport())


class AsyncRateLimitTransport(AsyncTransport[httpx2.Request, httpx2.Response], httpx2.AsyncBaseTransport):
    """Sends through another transport, within the quotas of providers; for `httpx2.AsyncClient`."""

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        transport: httpx2.AsyncBaseTransport | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        """Enforce the quotas of `providers`, counted in `store`; `options` are those of `tidegate.outbound.Gate`."""
        super().__init__(LIBRARY, AsyncGate(providers, store, **options), transport or httpx2.AsyncHTTPTransport())
