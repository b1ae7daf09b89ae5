"""RateLimitMiddleware for WSGI: Flask, Django, or any other application.

    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, config="config.yaml")          # Flask
    application = RateLimitMiddleware(get_wsgi_application(), config="config.yaml") # Django

It reads the request, adds header fields when the application calls `start_response`, and returns the body of the
application unchanged. A denied request never reaches the application.
"""

from __future__ import annotations

from operator import call
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.flow import run
from tidegate.inbound.client.request import MAX_METHOD_LENGTH, METHOD_OVERRIDES, Request, wsgi_header
from tidegate.inbound.limiting.request_limiter import MISSING, LimitOutcome, RequestLimiter
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound.responses import admin
from tidegate.inbound.responses.response import fit_to_status
from tidegate.inbound.rules.path_readings import wsgi_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Unpack

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter, ResponseCharge
    from tidegate.inbound.limiting.options import Options
    from tidegate.inbound.limiting.request_limiter import RequestTarget
    from tidegate.inbound.responses.response import Response
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
        headers: Style = "x",
        clock: Clock | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Read `config`: the path of a file, a mapping, or None for the defaults of the API limiting spec."""
        self.app = app
        # Public name: docs/inbound.md uses `middleware.guard.store`.
        self.guard: RequestLimiter = RequestLimiter(config, store, trusted_proxies, headers, clock, **options)

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:
        """Pass a request to the application, or deny it."""
        request_limiter = self.guard
        method, path = environ.get("REQUEST_METHOD", "GET"), read_path(environ)
        cacheable = not environ.get("SCRIPT_NAME") and not request_limiter.by_method
        target = request_limiter.targets.get((method, path), MISSING) if cacheable else MISSING
        if target is MISSING:
            target = self._find_target(environ, method, path)
        if target is None:
            if request_limiter.idle:
                request_limiter.run_idle_maintenance()
            # Route limits read it.
            request_state = environ[STATE_KEY] = RequestState(request_limiter, None, None, environ.get(STATE_KEY))
            return self.app(environ, _HeaderStart(request_state, start_response))
        peer = environ.get("REMOTE_ADDR")
        client = request_limiter.known_clients.get(peer)
        if client is None:
            client = request_limiter.client_identifier.find(peer, forwarding_headers(environ))
        category_limiter, key = target.category_limiter, client.key
        if target.special or client.special or request_limiter.special or category_limiter is None or key is None:
            return self._handle_special(environ, start_response, target, client)
        try:
            decision = category_limiter.decide(key, target.cost)
        except RateLimitError as error:
            return self._apply_outcome(
                request_limiter.handle_store_error(category_limiter, error), environ, start_response, target, client
            )
        # By position: a fast path.
        if decision[0] and decision[1] < request_limiter.fast_path_until and key in category_limiter.last_decisions:
            category_limiter.last_decisions[key] = decision  # fast path: a known client is allowed again
            category_limiter.allowed += 1
        elif not request_limiter.record_decision(category_limiter, key, target.cost, decision, method, path):
            return self._deny(environ, start_response, category_limiter, client, decision)
        request_state = environ[STATE_KEY] = RequestState(request_limiter, client, decision, environ.get(STATE_KEY))
        return self.app(environ, _HeaderStart(request_state, start_response))

    # ---- slow paths --------------------------------------------------------------------------------------------------

    def _find_target(self, environ: Environ, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        request_limiter = self.guard
        overrides = read_method_overrides(environ) if request_limiter.by_method else ()
        root = decode_text(environ.get("SCRIPT_NAME", ""))
        cache_key = (method, path) if not root and not overrides else (method, path, root, *overrides)
        target: RequestTarget | None = request_limiter.targets.get(cache_key, MISSING)
        if target is MISSING:
            target = request_limiter.find_target(
                cache_key, (method, *overrides), wsgi_routes(path, root, request_limiter.root_path), None
            )
        return target

    def _handle_special(
        self, environ: Environ, start: Start, target: RequestTarget, client: RequestClient
    ) -> Iterable[bytes]:
        """Handle a request that needs more than one plain decision."""
        outcome = LimitOutcome(allowed=True)
        if target.category_limiter is not None and client.key is not None:
            request = make_request(environ, client)
            outcome = run(self.guard.check_flow(request, target, client), call)
        return self._apply_outcome(outcome, environ, start, target, client)

    def _apply_outcome(
        self, outcome: LimitOutcome, environ: Environ, start: Start, target: RequestTarget, client: RequestClient
    ) -> Iterable[bytes]:
        """Pass the request on or deny it, as decided."""
        decision, response_charge = outcome.decision, outcome.response_charge
        if not outcome.allowed and outcome.category_limiter is not None and decision is not None:
            return self._deny(environ, start, outcome.category_limiter, client, decision, outcome.kind)
        request_state = environ[STATE_KEY] = RequestState(self.guard, client, decision, environ.get(STATE_KEY))
        starting = _HeaderStart(request_state, start)
        app = self._admin if target.admin else self.app
        if response_charge is None:
            return app(environ, starting)
        try:
            return _SettlingBody(
                app(environ, _SettlingStart(starting, request_state, response_charge)), response_charge
            )
        except BaseException:
            run(response_charge.settle_flow(), call)
            raise

    def _deny(
        self,
        environ: Environ,
        start: Start,
        category_limiter: CategoryLimiter,
        client: RequestClient,
        decision: Decision,
        kind: Kind = "quota-exceeded",
    ) -> Iterable[bytes]:
        writer = self.guard.response_writer
        decision = decision.with_views()  # a denial reads them several times
        response = writer.write_denial(make_request(environ, client), decision, category_limiter.category.policy, kind)
        outer: RequestState | None = environ.get(STATE_KEY)
        if outer is not None:
            outer.add(decision)
        fields = [] if outer is not None else fit_to_status(writer.fields(decision), response.status)
        return respond(environ, start, response, fields)

    def _admin(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Serve the admin endpoint."""
        request = make_request(environ, environ[STATE_KEY].client)
        response = admin.check_access(self.guard, request, environ.get("REMOTE_ADDR"))
        if response is None:
            length = str(environ.get("CONTENT_LENGTH") or "")
            size = int(length) if length.isdecimal() and len(length) < MAX_LENGTH_DIGITS else 0
            body = environ["wsgi.input"].read(min(size, admin.MAX_BODY_BYTES + 1)) if size else b""
            response = run(admin.handle_flow(self.guard, request, environ.get("QUERY_STRING", ""), body), call)
        return respond(environ, start, response, [])

    def close(self) -> None:
        """Close the store, if this middleware opened it."""
        self.guard.flush()
        self.guard.opened_store.close()


class _HeaderStart:
    """The `start_response` that the application calls: adds the header fields.

    The environ must not refer to it: the server's `start_response` may refer to the environ, and every request would
    leave a reference cycle to the garbage collector.
    """

    __slots__ = ("_request_state", "_start")

    def __init__(self, request_state: RequestState, start: Start) -> None:
        self._request_state = request_state
        self._start = start

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Start the response."""
        decision = (
            None if self._request_state.nested else self._request_state.combined_decision
        )  # nested: the outer middleware adds them
        if decision is not None:
            fields = self._request_state.request_limiter.response_writer.fields(decision)
            headers = [*headers, *(fields if decision else fit_to_status(fields, int(status[:3])))]
        return self._start(status, headers) if exc_info is None else self._start(status, headers, exc_info)


class _SettlingStart:
    """Corrects the charge of a request before its response starts, so the client sees the corrected limits."""

    __slots__ = ("_request_state", "_response_charge", "_start")

    def __init__(self, start: _HeaderStart, request_state: RequestState, response_charge: ResponseCharge) -> None:
        self._start = start
        self._request_state = request_state
        self._response_charge = response_charge

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Start the response."""
        self._response_charge.status = int(status[:3])
        if self._response_charge.settles_at_start:
            self._request_state.replace_decision(run(self._response_charge.settle_at_start_flow(), call))
        return self._start(status, headers, exc_info)


class _SettlingBody:
    """A response body that corrects the charge of its request when it is closed."""

    def __init__(self, body: Iterable[bytes], response_charge: ResponseCharge) -> None:
        self._body = body
        self._response_charge = response_charge

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the body of the application."""
        return iter(self._body)

    def close(self) -> None:
        """Close the body and correct the charge; called by the server."""
        try:
            if hasattr(self._body, "close"):
                self._body.close()
        finally:
            run(self._response_charge.settle_flow(), call)


def respond(environ: Environ, start: Start, response: Response, fields: Fields) -> Iterable[bytes]:
    """Start a complete response and return its body."""
    start(response.line, [*response.headers, *fields])
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [response.body]


def make_request(environ: Environ, client: RequestClient) -> Request:
    """Build the Request that key, count and denial functions receive."""
    method = environ.get("REQUEST_METHOD", "GET")
    return Request(method, read_path(environ), client.address, environ, lambda name: wsgi_header(environ, name))


def read_path(environ: Environ) -> str:
    """Return the decoded path below the application's root."""
    return decode_text(environ.get("PATH_INFO") or "/")


def read_method_overrides(environ: Environ) -> tuple[str, ...]:
    """Return the methods of method-override headers, which some applications use instead of the request's method."""
    values = [wsgi_header(environ, name) for name in METHOD_OVERRIDES]
    return tuple(value.strip()[:MAX_METHOD_LENGTH] for value in values if value)


def decode_text(value: str) -> str:
    """Decode a WSGI string, whose bytes are written as Latin-1. Bytes that are not UTF-8 become lone surrogates."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value  # an outer middleware has decoded it already


def forwarding_headers(environ: Environ) -> list[tuple[str, str]]:
    """Return the headers that proxies write client addresses into."""
    found = [(name, environ.get(field)) for name, field in FORWARDING_VARIABLES]
    return [(name, value) for name, value in found if value]


FORWARDING_VARIABLES = (("x-forwarded-for", "HTTP_X_FORWARDED_FOR"), ("forwarded", "HTTP_FORWARDED"))
