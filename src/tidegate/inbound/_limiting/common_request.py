"""Finds what tidegate knows about a framework's request: the common Request, and the limits decided for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.inbound._client.address import client_address
from tidegate.inbound._client.request import (
    EnvironHeaders,
    FrameworkRequest,
    Request,
    aiohttp_header,
    asgi_header,
    asgi_path,
    wsgi_header,
)
from tidegate.inbound._limiting.request_state import STATE_KEY

if TYPE_CHECKING:
    from tidegate.core._decision import LimitDecision
    from tidegate.inbound._limiting.request_state import RequestState


def common_request(request: FrameworkRequest) -> Request:
    """Return the Request that is the same for all frameworks: with the client's `address`, `path` and `header(name)`.

    Takes a request of Starlette, FastAPI, Flask, Quart, Django or aiohttp.
    """
    if isinstance(request, Request):
        return request
    address = find_address(request)
    meta = getattr(request, "META", None)
    if meta is not None:  # Django has decoded the path
        return Request(request.method, request.path_info, address, meta, lambda name: wsgi_header(meta, name))
    environ = getattr(request, "environ", None)
    if environ is not None:
        return Request(request.method, request.path, address, environ, lambda name: wsgi_header(environ, name))
    if is_aiohttp(request):
        return Request(request.method, request.path, address, request, lambda name: aiohttp_header(request, name))
    scope = request.scope
    method = scope.get("method", "GET")
    return Request(method, asgi_path(scope), address, scope, lambda name: asgi_header(scope, name))


def find_address(request: FrameworkRequest) -> str | None:
    """Return the address of the client: as the middleware identifies it, otherwise the address of the peer."""
    state = find_state(request)
    if state is not None and state.client is not None:
        return state.client.address
    environ = getattr(request, "META", None) or getattr(request, "environ", None)
    if environ is not None:
        peer: str | None = environ.get("REMOTE_ADDR")
        headers: Any = EnvironHeaders(environ)
    elif is_aiohttp(request):
        peer, headers = request.remote, list(request.headers.items())
    else:
        client, headers = request.scope.get("client"), request.scope.get("headers", ())
        peer = client[0] if client else None
    if state is None:
        return client_address(peer)
    return state.request_limiter.client_identifier.find(peer, headers).address


def current_limits(request: FrameworkRequest) -> tuple[LimitDecision, ...]:
    """Return the limits that were decided for a request so far, with what is left of each; the tightest may come last.

    A request that no limit applies to has none.
    """
    state = find_state(request)
    decision = None if state is None else state.combined_decision
    return () if decision is None else decision.limits


def limited(request: FrameworkRequest) -> bool:
    """Return whether a limit in shadow mode is exceeded, of those that were decided for a request so far."""
    state = find_state(request)
    return state is not None and state.limited


def find_state(request: FrameworkRequest) -> RequestState | None:
    """Return the state that a middleware or a route limit has left in a request."""
    raw: Any = request.raw if isinstance(request, Request) else request
    if is_aiohttp(raw):
        from tidegate.inbound import aiohttp  # noqa: PLC0415 - only an application with aiohttp needs it

        return aiohttp.FRAMEWORK.mapping(raw).get(STATE_KEY)
    if isinstance(request, Request):
        return raw.get(STATE_KEY)  # type: ignore[no-any-return]  # as stored
    for name in ("scope", "META", "environ"):
        mapping = getattr(request, name, None)
        if mapping is not None and STATE_KEY in mapping:
            return mapping[STATE_KEY]  # type: ignore[no-any-return]  # as above
    return None


def is_aiohttp(request: object) -> bool:
    """Return whether this is a request of aiohttp.web."""
    return hasattr(request, "match_info")
