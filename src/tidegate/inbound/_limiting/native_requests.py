"""What tidegate reads of a framework's own request: its client, its state, and the Request that is the same for all.

The requests of most frameworks have an ASGI scope, a WSGI environ, or Django's META. A framework whose requests have
none of them registers its own with `requests_of.register`.
"""

from __future__ import annotations

from functools import singledispatch
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidegate.inbound._client.address import client_address
from tidegate.inbound._client.request import (
    EnvironHeaders,
    FrameworkRequest,
    Request,
    asgi_header,
    asgi_path,
    decode_text,
    wsgi_header,
)
from tidegate.inbound._limiting.request_state import STATE_KEY

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tidegate.core._decision import LimitDecision
    from tidegate.inbound._limiting.request_state import RequestState


class NativeRequests(Protocol):
    """Reads the requests of one kind of framework."""

    def mapping(self, native: Any) -> MutableMapping[str, Any]:  # noqa: ANN401 - a framework's
        """Return the mapping that holds the state: the ASGI scope or WSGI environ of a request, or one like them."""

    def sender(self, native: Any, mapping: Any) -> tuple[str | None, Any]:  # noqa: ANN401 - as above
        """Return the address of the peer, and the headers that name clients."""

    def common(self, native: Any, mapping: Any, address: str | None) -> Request:  # noqa: ANN401 - as above
        """Return the Request that is the same for all frameworks, of a client with this address."""

    def is_websocket(self, native: Any) -> bool:  # noqa: ANN401 - as above
        """Return whether the request opens a WebSocket."""


class ScopeRequests:
    """Requests with an ASGI scope: of Starlette, FastAPI and Quart."""

    mapping: Final = attrgetter("scope")

    def sender(self, native: object, mapping: Any) -> tuple[str | None, Any]:  # noqa: ANN401 - a scope
        """Return the address of the peer, and the headers."""
        del native
        peer = mapping.get("client")
        return peer[0] if peer else None, mapping.get("headers", ())

    def common(self, native: object, mapping: Any, address: str | None) -> Request:  # noqa: ANN401 - a scope
        """Return the Request that is the same for all frameworks."""
        del native
        return asgi_request(mapping, address)

    def is_websocket(self, native: Any) -> bool:  # noqa: ANN401 - any request
        """Return whether the request opens a WebSocket."""
        return native.scope["type"] == "websocket"  # type: ignore[no-any-return]  # a string


class EnvironRequests:
    """Requests with a WSGI environ: of Flask."""

    mapping: Any = attrgetter("environ")

    def sender(self, native: object, mapping: Any) -> tuple[str | None, Any]:  # noqa: ANN401 - an environ
        """Return the address of the peer, and the headers that name clients."""
        del native
        return mapping.get("REMOTE_ADDR"), EnvironHeaders(mapping)

    def common(self, native: Any, mapping: Any, address: str | None) -> Request:  # noqa: ANN401 - an environ
        """Return the Request that is the same for all frameworks."""
        del native
        return wsgi_request(mapping, address)

    def is_websocket(self, native: object) -> bool:
        """Return False: WSGI has no WebSockets."""
        del native
        return False


class MetaRequests(EnvironRequests):
    """Requests of Django and REST Framework, under WSGI and ASGI."""

    def mapping(self, native: Any) -> Any:  # noqa: ANN401 - Django has no types
        """Return the scope behind an ASGI middleware, otherwise META."""
        scope = getattr(native, "scope", None)
        return scope if scope is not None and STATE_KEY in scope else native.META

    def sender(self, native: object, mapping: Any) -> tuple[str | None, Any]:  # noqa: ANN401 - as above
        """Return the address of the peer, and the headers that name clients."""
        return SCOPE_REQUESTS.sender(native, mapping) if "headers" in mapping else super().sender(native, mapping)

    def common(self, native: Any, mapping: Any, address: str | None) -> Request:  # noqa: ANN401 - as above
        """Return the Request that is the same for all frameworks."""
        del mapping
        meta = native.META  # Django has decoded the path, in META too
        return Request(native.method, native.path_info, address, meta, lambda name: wsgi_header(meta, name))


SCOPE_REQUESTS: Final = ScopeRequests()
ENVIRON_REQUESTS: Final = EnvironRequests()
META_REQUESTS: Final = MetaRequests()


@singledispatch
def requests_of(native: Any) -> NativeRequests:  # noqa: ANN401 - any request
    """Return what reads requests of this kind."""
    if hasattr(native, "META"):
        return META_REQUESTS
    return ENVIRON_REQUESTS if hasattr(native, "environ") else SCOPE_REQUESTS


def asgi_request(scope: Any, address: str | None) -> Request:  # noqa: ANN401 - a scope is any mapping
    """Return the Request of an ASGI scope."""
    return Request(scope.get("method", "GET"), asgi_path(scope), address, scope, lambda name: asgi_header(scope, name))


def wsgi_request(environ: Any, address: str | None) -> Request:  # noqa: ANN401 - an environ is any mapping
    """Return the Request of a WSGI environ."""
    path = decode_text(environ.get("PATH_INFO") or "/")
    method = environ.get("REQUEST_METHOD", "GET")
    return Request(method, path, address, environ, lambda name: wsgi_header(environ, name))


def common_request(request: FrameworkRequest) -> Request:
    """Return the Request that is the same for all frameworks: with the client's `address`, `path` and `header(name)`.

    Takes a request of each framework that has limits here.
    """
    if isinstance(request, Request):
        return request
    requests = requests_of(request)
    mapping = requests.mapping(request)
    return requests.common(request, mapping, find_address(requests, request, mapping))


def find_address(requests: NativeRequests, native: Any, mapping: Any) -> str | None:  # noqa: ANN401 - any request
    """Return the address of the client: as the middleware identifies it, otherwise the address of the peer."""
    state: RequestState | None = mapping.get(STATE_KEY)
    if state is not None and state.client is not None:
        return state.client.address
    peer, headers = requests.sender(native, mapping)
    return (
        client_address(peer) if state is None else state.request_limiter.client_identifier.find(peer, headers).address
    )


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
    mapping = request.mapping if isinstance(request, Request) else requests_of(request).mapping(request)
    return mapping.get(STATE_KEY)
