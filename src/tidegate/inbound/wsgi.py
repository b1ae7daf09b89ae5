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
from tidegate.inbound.limiting.charges import make_charge
from tidegate.inbound.limiting.denials import write_result
from tidegate.inbound.limiting.request_limiter import MISSING, LimitOutcome, RequestLimiter
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound.limiting.route_gates import wrapped_apps
from tidegate.inbound.responses import admin
from tidegate.inbound.responses.response import fit_to_status
from tidegate.inbound.rules.path_readings import wsgi_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.charges import RequestCharge
    from tidegate.inbound.limiting.options import Options
    from tidegate.inbound.limiting.request_limiter import RequestTarget
    from tidegate.inbound.responses.response import Response
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store

    Environ = dict[str, Any]
    Fields = list[tuple[str, str]]
    Start = Callable[..., object]
    TextWriter = Callable[[Decision], Fields]
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
        # Public name: docs/inbound.md uses `middleware.request_limiter.store`.
        self.request_limiter: RequestLimiter = RequestLimiter(config, store, trusted_proxies, headers, clock, **options)
        self._gates: list[Any] | None = None

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:  # noqa: C901, PLR0911, PLR0912 - extra function calls would slow down every request
        """Pass a request to the application, or deny it."""
        request_limiter = self.request_limiter
        method, path = environ.get("REQUEST_METHOD", "GET"), environ.get("PATH_INFO") or "/"
        if not path.isascii():
            path = decode_text(path)
        target = MISSING
        if not environ.get("SCRIPT_NAME") and not request_limiter.by_method:
            target = request_limiter.targets.get((method, path), MISSING)
        if target is MISSING:
            target = self._find_target(environ, method, path)
        if target is None:
            if request_limiter.idle:
                request_limiter.run_idle_maintenance()
            return self._pass(environ, start_response)
        peer = environ.get("REMOTE_ADDR")
        client = request_limiter.known_clients.get(peer)
        if client is None:
            client = request_limiter.client_identifier.find(peer, forwarding_headers(environ))
        category_limiter, cost, special, _, _ = target
        key = client[0]
        if special or client[2] or request_limiter.special or category_limiter is None or key is None:
            return self._handle_special(environ, start_response, target, client)
        gated = self._has_limits()
        if gated or (STATE_KEY in environ and environ[STATE_KEY].pending):
            last = category_limiter.last_decisions.get(key)
            if last is None or last[0] or self._may_pass(category_limiter, key, cost, method, path):
                charge = make_charge(
                    (request_limiter, category_limiter.limiter, key, cost, category_limiter, None, False, None)
                )
                return self._defer(environ, start_response, client, (charge,), gated=gated)
            decision = category_limiter.last_decisions[key]
            return self._deny(environ, start_response, category_limiter, client, decision)
        try:
            decision = category_limiter.decide(key, cost)
        except RateLimitError as error:
            return self._apply_outcome(
                request_limiter.handle_store_error(category_limiter, error), environ, start_response, target, client
            )
        # By position: a fast path.
        if decision[0] and decision[1] < request_limiter.fast_path_until and key in category_limiter.last_decisions:
            category_limiter.last_decisions[key] = decision  # fast path: a known client is allowed again
            category_limiter.allowed += 1
        elif not request_limiter.record_decision(category_limiter, key, cost, decision, method, path):
            return self._deny(environ, start_response, category_limiter, client, decision)
        outer = environ.get(STATE_KEY)
        request_state = environ[STATE_KEY] = RequestState(request_limiter, client, decision, outer, target)
        try:
            body = self.app(environ, add_headers(request_state, start_response, category_limiter.text_fields))
        except BaseException:
            settle(request_state)
            raise
        if request_state.response_charge is None:
            return body
        return _DeferredBody(body, request_state, environ, _DeferredStart(start_response, request_state, environ))

    # ---- slow paths --------------------------------------------------------------------------------------------------

    def _find_target(self, environ: Environ, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        request_limiter = self.request_limiter
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
        request = make_request(environ, client)
        client = self.request_limiter.exempt_client(request, client)
        if target.category_limiter is not None and client.key is not None:
            if not target.admin and self._has_limits():
                prepared = run(self.request_limiter.prepare_flow(request, target, client), call)
                if not isinstance(prepared, LimitOutcome):
                    return self._defer(environ, start, client, prepared)
                outcome = prepared
            else:
                outcome = run(self.request_limiter.check_flow(request, target, client), call)
        return self._apply_outcome(outcome, environ, start, target, client)

    def _has_limits(self) -> bool:
        """Return whether the application has limits on routes; then they are decided together with the categories."""
        if self._gates is None:
            self._gates = find_gates(self.app, self.request_limiter)
        for gate in self._gates:  # noqa: SIM110 - a generator costs more
            if gate.has_limits():
                return True
        return False

    def _may_pass(self, category_limiter: CategoryLimiter, key: Key, cost: Cost, method: str, path: str) -> bool:
        """Check whether a client whose last request was denied is still over the limit, before the application runs."""
        try:
            decision: Any = category_limiter.limiter.peek(key, cost)
        except RateLimitError:
            return True  # the decision itself handles store errors
        return bool(decision) or self.request_limiter.record_decision(
            category_limiter, key, cost, decision, method, path
        )

    def _pass(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Pass on a request that no category limits; limits of routes may apply."""
        client = None
        if self.request_limiter.special:
            found = self.request_limiter.client_identifier.find(environ.get("REMOTE_ADDR"), forwarding_headers(environ))
            found = self.request_limiter.exempt_client(make_request(environ, found), found)
            client = found if found.key is None else None
        request_state = RequestState(self.request_limiter, client, None, environ.get(STATE_KEY))
        environ[STATE_KEY] = request_state
        return self._call_deferred(self.app, environ, start, request_state)

    def _defer(
        self,
        environ: Environ,
        start: Start,
        client: RequestClient,
        charges: Sequence[RequestCharge],
        *,
        gated: bool = True,
    ) -> Iterable[bytes]:
        """Pass a request to the application; its charges are decided together with the limits of its route.

        `gated`: whether the application has limits on routes.
        """
        request_state = RequestState(self.request_limiter, client, None, environ.get(STATE_KEY), None, charges)
        environ[STATE_KEY] = request_state
        if not gated:  # nothing inside would decide
            denial = decide_pending(environ)
            if denial is not None:
                return respond(environ, add_headers(request_state, start), denial, [])
        return self._call_deferred(self.app, environ, start, request_state)

    def _call_deferred(self, app: App, environ: Environ, start: Start, request_state: RequestState) -> Iterable[bytes]:
        """Call the application; what is pending is decided at the latest when its response starts."""
        deferring = _DeferredStart(start, request_state, environ)
        try:
            body = app(environ, deferring)
        except BaseException as error:
            if isinstance(error, Exception):
                charge_pending(environ, request_state)
            settle(request_state)
            raise
        if not deferring.started or request_state.response_charge is not None:
            return _DeferredBody(body, request_state, environ, deferring)
        return deferring.replace_body(body)

    def _apply_outcome(
        self, outcome: LimitOutcome, environ: Environ, start: Start, target: RequestTarget, client: RequestClient
    ) -> Iterable[bytes]:
        """Pass the request on or deny it, as decided."""
        decision, response_charge = outcome.decision, outcome.response_charge
        if not outcome.allowed and outcome.category_limiter is not None and decision is not None:
            return self._deny(environ, start, outcome.category_limiter, client, decision, outcome.kind)
        outer = environ.get(STATE_KEY)
        request_state = environ[STATE_KEY] = RequestState(
            self.request_limiter, client, None if outcome.made else decision, outer
        )
        request_state.made, request_state.response_charge = outcome.made, response_charge
        return self._call_deferred(self._admin if target.admin else self.app, environ, start, request_state)

    def _deny(
        self,
        environ: Environ,
        start: Start,
        category_limiter: CategoryLimiter,
        client: RequestClient,
        decision: Decision,
        kind: Kind = "quota-exceeded",
    ) -> Iterable[bytes]:
        writer = self.request_limiter.response_writer
        decision = decision.with_views()  # a denial reads them several times
        response = writer.write_denial(make_request(environ, client), decision, category_limiter.category.policy, kind)
        outer: RequestState | None = environ.get(STATE_KEY)
        if outer is not None:
            run(outer.deny_flow(decision, tasks=False), call)
        fields = [] if outer is not None else fit_to_status(writer.fields(decision), response.status)
        return respond(environ, start, response, fields)

    def _admin(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Serve the admin endpoint."""
        request = make_request(environ, environ[STATE_KEY].client)
        response = admin.check_access(self.request_limiter, request, environ.get("REMOTE_ADDR"))
        if response is None:
            length = str(environ.get("CONTENT_LENGTH") or "")
            size = int(length) if length.isdecimal() and len(length) < MAX_LENGTH_DIGITS else 0
            body = environ["wsgi.input"].read(min(size, admin.MAX_BODY_BYTES + 1)) if size else b""
            response = run(
                admin.handle_flow(self.request_limiter, request, environ.get("QUERY_STRING", ""), body), call
            )
        return respond(environ, start, response, [])

    def close(self) -> None:
        """Close the store, if this middleware opened it."""
        self.request_limiter.flush()
        self.request_limiter.opened_store.close()


def add_headers(request_state: RequestState, start: Start, write: TextWriter | None = None) -> Start:
    """Return a `start_response` for the application that adds the header fields.

    It first settles what depends on the response, so that the client sees the corrected limits.
    The environ must not refer to it: the server's `start_response` may refer to the environ, and every request would
    leave a reference cycle to the garbage collector.
    """

    def start_with_headers(status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        if request_state.response_charge is not None:
            settle_at_start(request_state, status)
        headers = with_fields(request_state, status, headers, write)
        return start(status, headers) if exc_info is None else start(status, headers, exc_info)

    return start_with_headers


class _DeferredStart:
    """The `start_response` that decides what is pending, and settles what depends on the response, if it is known.

    The client sees the corrected limits. A response to a request that is denied only now is replaced by the denial.
    """

    __slots__ = ("_environ", "_request_state", "_start", "denial", "started")

    def __init__(self, start: Start, request_state: RequestState, environ: Environ) -> None:
        self._start = start
        self._request_state = request_state
        self._environ = environ
        self.started = False
        self.denial: Response | None = None

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Start the response."""
        self.started = True
        request_state = self._request_state
        if request_state.pending or request_state.response_charge is not None:
            self._decide(status)
            if self.denial is not None:
                self._start(self.denial.line, with_fields(request_state, self.denial.line, list(self.denial.headers)))
                return lambda _: None  # a body that the application writes itself
        fields = None if request_state.nested else request_state.prepared_fields(raw=False)
        headers = with_fields(request_state, status, headers) if fields is None else [*headers, *fields]
        return self._start(status, headers) if exc_info is None else self._start(status, headers, exc_info)

    def _decide(self, status: str) -> None:
        """Decide what is pending; settle what depends on the status, unless the request is denied."""
        request_state = self._request_state
        if request_state.pending:
            self.denial = decide_pending(self._environ)
        if self.denial is None:
            settle_at_start(request_state, status)

    def replace_body(self, body: Iterable[bytes]) -> Iterable[bytes]:
        """Return the body of the application, or of the denial."""
        if self.denial is None:
            return body
        if hasattr(body, "close"):
            body.close()
        return [] if self._environ.get("REQUEST_METHOD") == "HEAD" else [self.denial.body]


class _DeferredBody:
    """The body of a response that is not started yet, or whose request is settled when it is closed."""

    def __init__(
        self, body: Iterable[bytes], request_state: RequestState, environ: Environ, start: _DeferredStart
    ) -> None:
        self._body = body
        self._request_state = request_state
        self._environ = environ
        self._start = start

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the body of the application; of a denial, if the application starts its response only now."""
        if self._start.started:
            yield from self._start.replace_body(self._body)
            return
        for chunk in self._body:
            if self._start.denial is not None:
                yield self._start.denial.body
                return
            yield chunk

    def close(self) -> None:
        """Close the body and correct the charge; called by the server."""
        try:
            if hasattr(self._body, "close"):
                self._body.close()
        finally:
            charge_pending(self._environ, self._request_state)
            settle(self._request_state)


def with_fields(request_state: RequestState, status: str, headers: Fields, write: TextWriter | None = None) -> Fields:
    """Return the headers of a response with the rate limit fields; nested: the outer middleware adds them."""
    decision = None if request_state.nested else request_state.shown_decision
    if decision is None:
        return headers
    fields = (write or request_state.request_limiter.response_writer.fields)(decision)
    return [*headers, *(fields if decision else fit_to_status(fields, int(status[:3])))]


def settle_at_start(request_state: RequestState, status: str) -> None:
    """Settle what depends on the status of the response, unless it is held until the response is complete."""
    response_charge = request_state.response_charge
    if response_charge is not None:
        response_charge.status = int(status[:3])
        if response_charge.settles_at_start:
            request_state.replace_decisions(run(response_charge.settle_at_start_flow(), call))


def settle(request_state: RequestState) -> None:
    """Settle at the end of a response, or if there is none."""
    if request_state.response_charge is not None:
        run(request_state.response_charge.settle_flow(), call)


def decide_pending(environ: Environ) -> Response | None:
    """Decide the pending charges of a request; returns the response to a denied one."""
    request_state: RequestState = environ[STATE_KEY]
    if not request_state.pending:
        return None
    request = make_request(environ, request_state.client)
    result = run(request_state.charge_flow((), request, tasks=False), call)
    return None if result.allowed else write_result(result, request, request)


def charge_pending(environ: Environ, request_state: RequestState) -> None:
    """Charge what is still pending: the application has failed, or sent no response."""
    if request_state.pending:
        request = make_request(environ, request_state.client)
        run(request_state.charge_flow((), request, tasks=False), call)


def find_gates(app: App, request_limiter: RequestLimiter) -> list[Any]:
    """Return the object that decides pending charges at the routes of a Flask or Django application."""
    for wrapped in wrapped_apps(app):
        if hasattr(wrapped, "view_functions") and hasattr(wrapped, "before_request_funcs"):
            from tidegate.inbound import flask  # noqa: PLC0415 - only a Flask application needs it

            return [flask.FlaskGate(wrapped, request_limiter)]
        if hasattr(wrapped, "_view_middleware"):
            from tidegate.inbound import django  # noqa: PLC0415 - only a Django application needs it

            return [django.DjangoGate(wrapped)]
    return []


def respond(environ: Environ, start: Start, response: Response, fields: Fields) -> Iterable[bytes]:
    """Start a complete response and return its body."""
    start(response.line, [*response.headers, *fields])
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [response.body]


def make_request(environ: Environ, client: RequestClient | None) -> Request:
    """Build the Request that key, count and denial functions receive."""
    method = environ.get("REQUEST_METHOD", "GET")
    address = None if client is None else client.address
    return Request(method, read_path(environ), address, environ, lambda name: wsgi_header(environ, name))


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
