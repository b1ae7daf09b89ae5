"""RateLimitMiddleware for WSGI: Flask, Django, or any other application.

    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, config="config.yaml")          # Flask
    application = RateLimitMiddleware(get_wsgi_application(), config="config.yaml") # Django

It reads the request, adds header fields when the application calls `start_response`, and returns the body of the
application unchanged. A denied request never reaches the application.
"""

from __future__ import annotations

from operator import call
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.decision import Decision
from tidegate.errors import RateLimitError
from tidegate.flow import run
from tidegate.inbound.client.request import (
    MAX_METHOD_LENGTH,
    METHOD_OVERRIDES,
    Request,
    forwarding_headers,
    wsgi_header,
)
from tidegate.inbound.limiting.denials import write_result
from tidegate.inbound.limiting.fast_decision import decide_deferred
from tidegate.inbound.limiting.request_limiter import LimitOutcome, RequestLimiter
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState, make_state
from tidegate.inbound.limiting.request_targets import MISSING
from tidegate.inbound.limiting.route_hooks import RouteHooks, wrapped_apps
from tidegate.inbound.responses import admin
from tidegate.inbound.responses.response import fit_to_status
from tidegate.inbound.rules.path_readings import wsgi_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    from tidegate.clock import Clock
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.charges import RequestCharge
    from tidegate.inbound.limiting.options import Options
    from tidegate.inbound.limiting.request_targets import RequestTarget
    from tidegate.inbound.responses.response import Response
    from tidegate.policy import Cost, Key
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
        # Public name: docs/inbound.md uses `middleware.request_limiter.store`.
        self.request_limiter: RequestLimiter = RequestLimiter(config, store, trusted_proxies, headers, clock, **options)
        self._route_hooks: RouteHooks = AppRouteHooks(app, self.request_limiter)
        self.request_limiter.route_hooks = self._route_hooks

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:  # noqa: C901, PLR0911, PLR0912, PLR0915 - extra function calls would slow down every request
        """Pass a request to the application, or deny it."""
        request_limiter, peer = self.request_limiter, environ.get("REMOTE_ADDR")
        method, path = environ.get("REQUEST_METHOD", "GET"), environ.get("PATH_INFO") or "/"
        target = None
        if path.isascii() and not environ.get("SCRIPT_NAME"):  # the keys are decoded paths
            target = request_limiter.plain_targets.get((method, path))
        client = request_limiter.plain_clients.get(peer) if peer else None
        if target is None or client is None:
            path = decode_text(path)
            target = target or self._find_target(environ, method, path)
            if target is None:
                return self._pass(environ, start_response)
            client = request_limiter.client_identifier.find(peer, forwarding_headers(environ))
            if target.special or client.special or request_limiter.special:
                return self._handle_special(environ, start_response, target, client)
            self._route_hooks.update()
        elif "HTTP_X_FORWARDED_FOR" in environ or "HTTP_FORWARDED" in environ:
            request_limiter.client_identifier.find(peer, forwarding_headers(environ))  # warns once
        cost = target.cost
        category_limiter: CategoryLimiter = target.category_limiter  # type: ignore[assignment]  # None is special
        key: Key = client.key  # type: ignore[assignment]  # as above
        request_state = RequestState()
        request_state.request_limiter = request_limiter
        request_state.client = client
        outer = environ.get(STATE_KEY)
        last_decisions = category_limiter.last_decisions
        has_route_limits = self._route_hooks.limited
        if has_route_limits or (outer is not None and outer.is_pending):
            # This limit is decided together with those of the route; a client that is still over it is denied now.
            last = last_decisions.get(key)
            if last is not None and not last[0]:
                still_denied = self._find_denial(category_limiter, key, cost, method, path)
                if still_denied is not None:
                    return self._deny(environ, start_response, category_limiter, client, still_denied)
            if cost == 1:
                request_state.deferred, request_state.key = category_limiter, key
            else:
                request_state.pending = request_limiter.make_charges(target, key)
        else:
            last = last_decisions.get(key)
            known = last is not None and last[0] and cost == 1
            charged = category_limiter.acquire((key,)) if known else None
            if charged is not None:
                now, views = charged
                decision = Decision((True, now, category_limiter.limits, views, None))
                if now < request_limiter.fast_path_until:
                    last_decisions[key] = decision  # `record_decision`, inlined
                    category_limiter.allowed += 1
                else:
                    request_limiter.record_decision(category_limiter, key, cost, decision, method, path)
                request_state.write, request_state.written = category_limiter.write, charged
            else:
                try:
                    decision = category_limiter.decide(key, cost)
                except RateLimitError as error:
                    outcome = request_limiter.handle_store_error(category_limiter, error)
                    return self._apply_outcome(outcome, environ, start_response, target, client)
                if not request_limiter.record_decision(category_limiter, key, cost, decision, method, path):
                    return self._deny(environ, start_response, category_limiter, client, decision)
                if decision[0]:
                    request_state.write, request_state.written = request_limiter.write, decision
                request_state.cost = cost
            request_state.decision, request_state.charged, request_state.key = decision, category_limiter, key
        environ[STATE_KEY] = request_state
        starting = add_fields(request_state, environ, start_response)
        if outer is not None:
            request_state.nest(outer)
            if not has_route_limits:
                denial = decide_pending(environ)
                if denial is not None:
                    return respond(environ, starting, denial, [])
        try:
            body = self.app(environ, starting)
        except BaseException as error:
            finish(environ, request_state, cancelled=not isinstance(error, Exception))
            raise
        if request_state.write is not None and request_state.started:
            return body
        return finish_body(environ, request_state, body)

    # ---- slow paths --------------------------------------------------------------------------------------------------

    def _find_target(self, environ: Environ, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        request_limiter = self.request_limiter
        overrides = read_method_overrides(environ) if request_limiter.by_method else ()
        root = decode_text(environ.get("SCRIPT_NAME", ""))
        cache_key = (method, path) if not root and not overrides else (method, path, root, *overrides)
        target: RequestTarget | None = request_limiter.targets.cached.get(cache_key, MISSING)
        if target is MISSING:
            target = request_limiter.targets.find(
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
            if not target.admin and self._route_hooks.update():
                prepared = run(self.request_limiter.prepare_flow(request, target, client), call)
                if not isinstance(prepared, LimitOutcome):
                    return self._defer(environ, start, client, prepared)
                outcome = prepared
            else:
                outcome = run(self.request_limiter.check_flow(request, target, client), call)
        return self._apply_outcome(outcome, environ, start, target, client)

    def _find_denial(
        self, category_limiter: CategoryLimiter, key: Key, cost: Cost, method: str, path: str
    ) -> Decision | None:
        """Return the denial of a client that was denied before and is still over the limit; None: it may pass."""
        if self._route_hooks.may_be_exempt(method, path):
            return None  # the route decides
        try:
            decision: Any = category_limiter.limiter.peek(key, cost)
        except RateLimitError:
            return None  # the decision itself handles store errors
        passes = bool(decision) or self.request_limiter.record_decision(
            category_limiter, key, cost, decision, method, path
        )
        return None if passes else decision

    def _pass(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Pass on a request that no category limits; limits of routes may apply."""
        if self.request_limiter.idle:
            self.request_limiter.run_idle_maintenance()
        client = None
        if self.request_limiter.special:
            found = self.request_limiter.client_identifier.find(environ.get("REMOTE_ADDR"), forwarding_headers(environ))
            found = self.request_limiter.exempt_client(make_request(environ, found), found)
            client = found if found.key is None else None
        request_state = make_state(self.request_limiter, client, None, environ.get(STATE_KEY))
        return self._call_app(self.app, environ, start, request_state)

    def _defer(
        self, environ: Environ, start: Start, client: RequestClient, charges: Sequence[RequestCharge]
    ) -> Iterable[bytes]:
        """Pass a request to the application; its charges are decided together with the limits of its route."""
        request_state = make_state(self.request_limiter, client, None, environ.get(STATE_KEY), charges)
        return self._call_app(self.app, environ, start, request_state)

    def _call_app(self, app: App, environ: Environ, start: Start, request_state: RequestState) -> Iterable[bytes]:
        """Call the application; what is pending is decided at the latest when its response starts."""
        environ[STATE_KEY] = request_state
        try:
            body = app(environ, add_fields(request_state, environ, start))
        except BaseException as error:
            finish(environ, request_state, cancelled=not isinstance(error, Exception))
            raise
        return finish_body(environ, request_state, body)

    def _apply_outcome(
        self, outcome: LimitOutcome, environ: Environ, start: Start, target: RequestTarget, client: RequestClient
    ) -> Iterable[bytes]:
        """Pass the request on or deny it, as decided."""
        decision, response_charge = outcome.decision, outcome.response_charge
        if not outcome.allowed and outcome.category_limiter is not None and decision is not None:
            return self._deny(environ, start, outcome.category_limiter, client, decision, outcome.kind)
        outer = environ.get(STATE_KEY)
        request_state = make_state(self.request_limiter, client, None if outcome.made else decision, outer)
        request_state.made, request_state.response_charge = outcome.made, response_charge
        return self._call_app(self._admin if target.admin else self.app, environ, start, request_state)

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


def add_fields(request_state: RequestState, environ: Environ, start: Start) -> Start:
    """Return a `start_response` for the application that adds the header fields.

    It first settles what depends on the response, so that the client sees the corrected limits.
    The environ must not refer to it: the server's `start_response` may refer to the environ, and every request would
    leave a reference cycle to the garbage collector.
    """

    def start_with_fields(status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        request_state.started = True
        write = request_state.write
        if write is not None:
            headers = [*headers, *write(request_state.written)]
        else:
            prepare_start(request_state, environ, status)
            denial = request_state.denial
            if denial is not None:
                start(denial.line, with_fields(request_state, denial.line, list(denial.headers)))
                return lambda _: None  # a body that the application writes itself
            headers = with_fields(request_state, status, headers)
        return start(status, headers) if exc_info is None else start(status, headers, exc_info)

    return start_with_fields


def prepare_start(request_state: RequestState, environ: Environ, status: str) -> None:
    """Decide what is pending, and settle what depends on the response, if it is known.

    The client sees the corrected limits. A response to a request that is denied only now is replaced by the denial.
    """
    if request_state.is_pending:
        request_state.denial = decide_pending(environ)
    response_charge = request_state.response_charge
    if request_state.denial is None and response_charge is not None:
        response_charge.status = int(status[:3])
        if response_charge.settles_at_start:
            request_state.replace_decisions(run(response_charge.settle_at_start_flow(), call))


def finish(environ: Environ, request_state: RequestState, *, cancelled: bool = False) -> None:
    """Settle what depends on the response; before, charge what is pending, unless the application was interrupted."""
    try:
        if request_state.is_pending and not cancelled:
            request = make_request(environ, request_state.client)
            run(request_state.charge_flow((), request, tasks=False), call)
    finally:
        if request_state.response_charge is not None:
            run(request_state.response_charge.settle_flow(), call)


def finish_body(environ: Environ, request_state: RequestState, body: Iterable[bytes]) -> Iterable[bytes]:
    """Return the body for the server: of the application, or of the denial; if necessary, one that settles at its end.

    A middleware that has decided at once has nothing left to do, even if the response is not started yet.
    """
    decided = request_state.started or request_state.decision is not None
    if not decided or request_state.response_charge is not None:
        return _SettlingBody(environ, request_state, body)
    return replace_body(environ, request_state, body)


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


def with_fields(request_state: RequestState, status: str, headers: Fields) -> Fields:
    """Return the headers of a response with the rate limit fields; nested: the outer middleware adds them."""
    decision = None if request_state.nested else request_state.shown_decision
    if decision is None:
        return headers
    fields = request_state.request_limiter.response_writer.fields(decision)
    return [*headers, *(fields if decision else fit_to_status(fields, int(status[:3])))]


def decide_pending(environ: Environ) -> Response | None:
    """Decide the pending charges of a request; returns the response to a denied one."""
    request_state: RequestState = environ[STATE_KEY]
    if not request_state.is_pending or decide_deferred(request_state):
        return None
    request = make_request(environ, request_state.client)
    result = run(request_state.charge_flow((), request, tasks=False), call)
    return None if result.allowed else write_result(result, request, request)


class AppRouteHooks(RouteHooks):
    """The hooks of a Flask or Django application; the first request finds out which of the two it is."""

    def __init__(self, app: App, request_limiter: RequestLimiter) -> None:
        """Look for limits in this application."""
        super().__init__(request_limiter)
        self._app = app
        self._route_hooks: RouteHooks | None = None

    def find_limits(self) -> bool:
        """Return whether the application has limits on routes; they are decided together with the categories."""
        if self._route_hooks is None:
            self._route_hooks = find_route_hooks(self._app, self.request_limiter)
            self.watched.extend(self._route_hooks.watched)
        limited = self._route_hooks.inspect()
        self.exempts = self._route_hooks.exempts
        return limited


def find_route_hooks(app: App, request_limiter: RequestLimiter) -> RouteHooks:
    """Return the hooks of a Flask or Django application."""
    for wrapped in wrapped_apps(app):
        if hasattr(wrapped, "view_functions") and hasattr(wrapped, "before_request_funcs"):
            from tidegate.inbound import flask  # noqa: PLC0415 - only a Flask application needs it

            return flask.FlaskViewHook(wrapped, request_limiter)
        if hasattr(wrapped, "_view_middleware"):
            from tidegate.inbound import django  # noqa: PLC0415 - only a Django application needs it

            return django.DjangoViewHook(wrapped, request_limiter)
    return RouteHooks(request_limiter)


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
