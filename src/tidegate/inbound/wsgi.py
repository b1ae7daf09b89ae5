"""RateLimitMiddleware for WSGI: Flask, Django, or any other application.

    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, config="config.yaml")          # Flask
    application = RateLimitMiddleware(get_wsgi_application(), config="config.yaml") # Django

It reads the request, adds header fields when the application calls `start_response`, and returns the body of the
application unchanged. A denied request never reaches the application.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.flow import run
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import (
    MAX_METHOD_LENGTH,
    METHOD_OVERRIDES,
    EnvironHeaders,
    decode_text,
    wsgi_header,
)
from tidegate.inbound._limiting.charges import ALLOWED, perform
from tidegate.inbound._limiting.find_routes import AppRoutes
from tidegate.inbound._limiting.native_requests import wsgi_request
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound._limiting.request_targets import MISSING
from tidegate.inbound._responses import admin
from tidegate.inbound._responses.response import fit_to_status
from tidegate.inbound._rules.path_readings import wsgi_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Unpack

    from tidegate._runtime.clock import Clock
    from tidegate.headers import Style
    from tidegate.inbound._client.address import TrustedProxies
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._limiting.charges import ChargeResult
    from tidegate.inbound._limiting.options import Options
    from tidegate.inbound._limiting.request_targets import RequestTarget
    from tidegate.inbound._responses.response import Response
    from tidegate.stores import Store

    Environ = dict[str, Any]
    Fields = list[tuple[str, str]]
    Start = Callable[..., object]
    App = Callable[..., Iterable[bytes]]  # frameworks have different types for the environ

__all__ = ["RateLimitMiddleware"]

MAX_LENGTH_DIGITS: Final = 10  # more digits than any valid Content-Length


class RateLimitMiddleware:
    """Limits the requests of a WSGI application."""

    def __init__(
        self,
        app: App,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style | Mapping[str, str] = "x",
        clock: Clock | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Read `config`: the path of a file, a mapping, or None for the defaults of the API limiting spec."""
        self.app = app
        if "on_message" in options:
            raise ConfigError("needs the ASGI middleware: WSGI has no WebSockets", field="on_message")
        # Public name: docs/reference/inbound.md uses `middleware.request_limiter.store`.
        self.request_limiter: RequestLimiter = RequestLimiter(config, store, trusted_proxies, headers, clock, **options)
        self._routes = self.request_limiter.routes = AppRoutes(app, self.request_limiter.has_default_limits)

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:  # noqa: C901 - as in `asgi`
        """Pass a request to the application, or deny it."""
        request_limiter, target = self.request_limiter, MISSING
        method, path = environ.get("REQUEST_METHOD", "GET"), environ.get("PATH_INFO") or "/"
        if path.isascii() and not environ.get("SCRIPT_NAME"):  # the keys are decoded paths
            target = request_limiter.targets.plain.get((method, path), MISSING)
        else:
            path = decode_text(path)
        if target is MISSING:
            target = self._find_target(environ, method, path)
        if target is None and request_limiter.idle:
            request_limiter.run_idle_maintenance()
        client = request = None
        result = ALLOWED
        if target is not None or request_limiter.needs_request:
            client = self._find_client(environ)
            if request_limiter.needs_request or (target is not None and target.needs_request):
                request = wsgi_request(environ, client.address)
                client = request_limiter.exempt_client(request, client)
            if target is not None:
                decided = request_limiter.decide_now(target, client, method, path, request)
                if decided is None:
                    flow = request_limiter.check_flow(request or wsgi_request(environ, client.address), target, client)
                    decided = run(flow, perform)
                result = decided
                if not result.allowed and not result.by_route:
                    return self._deny(environ, start_response, client, result)
            elif client.key is not None:
                client = None  # the limits of the view identify it
        request_state = RequestState()
        request_state.request_limiter, request_state.client = request_limiter, client
        if STATE_KEY in environ:
            request_state.nest(environ[STATE_KEY])
        request_state.start(result, target)
        environ[STATE_KEY] = request_state
        app = self._admin if target is not None and target.admin else self.app
        return self._call_app(app, environ, start_response, request_state)

    def _find_client(self, environ: Environ) -> RequestClient:
        """Identify the client of a request."""
        peer, identifier = environ.get("REMOTE_ADDR"), self.request_limiter.client_identifier
        if "HTTP_X_FORWARDED_FOR" not in environ and "HTTP_FORWARDED" not in environ:
            client = identifier.by_peer.get(peer)  # type: ignore[arg-type]  # a string or None
            if client is not None:
                return client
        return identifier.find(peer, EnvironHeaders(environ))

    def _call_app(self, app: App, environ: Environ, start: Start, request_state: RequestState) -> Iterable[bytes]:
        """Call the application; what depends on the response is settled when its body is closed."""
        try:
            body = app(environ, add_fields(request_state, environ, start))
        except BaseException:
            finish(environ, request_state)
            raise
        if request_state.started and request_state.denial is None and not request_state.is_open:
            return body
        return _SettlingBody(environ, request_state, body)

    def _find_target(self, environ: Environ, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        request_limiter = self.request_limiter
        overrides = read_method_overrides(environ) if request_limiter.by_method else ()
        root = decode_text(environ.get("SCRIPT_NAME", ""))
        cache_key = (method, path) if not root and not overrides else (method, path, root, *overrides)
        target: RequestTarget | None = request_limiter.targets.cached.get(cache_key, MISSING)
        if target is MISSING:
            if self._routes.update():
                request_limiter.targets.clear()
            route = self._routes.find(method, path, environ) if self._routes.limited else None
            readings = wsgi_routes(path, root, request_limiter.root_path)
            target = request_limiter.targets.find(cache_key, (method, *overrides), readings, None, route)
        return target

    def _deny(self, environ: Environ, start: Start, client: RequestClient, result: ChargeResult) -> Iterable[bytes]:
        """Send the response to a denied request."""
        writer, decision = self.request_limiter.response_writer, result.decision
        assert decision is not None  # noqa: S101 - a denial has a decision
        decision = decision.with_views()  # a denial reads them several times
        response = writer.write_denial(wsgi_request(environ, client.address), decision, result.denials[0].charge.policy)
        outer: RequestState | None = environ.get(STATE_KEY)
        if outer is not None:  # it adds the headers
            run(outer.deny_flow(decision), perform)
            return respond(environ, start, response, [])
        return respond(environ, start, response, fit_to_status(writer.fields(decision), response.status))

    def _admin(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Serve the admin endpoint."""
        request = wsgi_request(environ, environ[STATE_KEY].address)
        response = admin.check_access(self.request_limiter, request, environ.get("REMOTE_ADDR"))
        if response is None:
            length = str(environ.get("CONTENT_LENGTH") or "")
            size = int(length) if length.isdecimal() and len(length) < MAX_LENGTH_DIGITS else 0
            body = environ["wsgi.input"].read(min(size, admin.MAX_BODY_BYTES + 1)) if size else b""
            response = run(
                admin.handle_flow(self.request_limiter, request, environ.get("QUERY_STRING", ""), body), perform
            )
        return respond(environ, start, response, [])

    def close(self) -> None:
        """Close the store, if this middleware opened it."""
        self.request_limiter.flush()
        self.request_limiter.opened_store.close()


def add_fields(request_state: RequestState, environ: Environ, start: Start) -> Start:
    """Return a `start_response` for the application that adds the header fields.

    It first settles what depends on the response, so that the client sees the corrected limits.
    The environ must not refer to it: the server's `start_response` may refer to the environ, and every request would
    leave a reference cycle to the garbage collector.
    """

    def start_with_fields(status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        request_state.started = True
        if request_state.is_open or request_state.denied is not None or request_state.raised is not None:
            prepare_start(request_state, environ, status)
            denial = request_state.denial
            if denial is not None:
                start(denial.line, [*denial.headers, *request_state.fields(denial.status)])
                return lambda _: None  # a body that the application writes itself
        headers = [*headers, *request_state.fields(int(status[:3]))]
        return start(status, headers) if exc_info is None else start(status, headers, exc_info)

    return start_with_fields


def prepare_start(request_state: RequestState, environ: Environ, status: str) -> None:
    """Settle what depends on the response, so that the client sees the corrected limits.

    If the request was denied and its view was not reached, the denial replaces the response.
    """
    request = wsgi_request(environ, request_state.address)
    request_state.denial = run(request_state.replacement_flow(int(status[:3]), request), perform)
    if request_state.denial is None and request_state.is_open:
        run(request_state.settle_start_flow(request, int(status[:3])), perform)


def finish(environ: Environ, request_state: RequestState) -> None:
    """Settle what depends on the response, at its end; without a response, the application has failed."""
    if request_state.is_open:
        run(request_state.settle_flow(wsgi_request(environ, request_state.address)), perform)


def replace_body(environ: Environ, request_state: RequestState, body: Iterable[bytes]) -> Iterable[bytes]:
    """Return the body of the application, or of the denial."""
    denial = request_state.denial
    if denial is None:
        return body
    if hasattr(body, "close"):
        body.close()
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [denial.body]


class _SettlingBody:
    """The body of a response that is not started yet, or whose request is settled when it is closed."""

    def __init__(self, environ: Environ, request_state: RequestState, body: Iterable[bytes]) -> None:
        self._environ = environ
        self._request_state = request_state
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the body of the application; of a denial, if the application starts its response only now."""
        if not self._request_state.started:
            for chunk in self._body:
                if self._request_state.denial is not None:
                    break
                yield chunk
            if self._request_state.denial is None:
                return
        yield from replace_body(self._environ, self._request_state, self._body)

    def close(self) -> None:
        """Close the body and correct the charge; called by the server."""
        try:
            if hasattr(self._body, "close"):
                self._body.close()
        finally:
            finish(self._environ, self._request_state)


def respond(environ: Environ, start: Start, response: Response, fields: Fields) -> Iterable[bytes]:
    """Start a complete response and return its body."""
    start(response.line, [*response.headers, *fields])
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [response.body]


def read_method_overrides(environ: Environ) -> tuple[str, ...]:
    """Return the methods of method-override headers, which some applications use instead of the request's method."""
    values = [wsgi_header(environ, name) for name in METHOD_OVERRIDES]
    return tuple(value.strip()[:MAX_METHOD_LENGTH] for value in values if value)
