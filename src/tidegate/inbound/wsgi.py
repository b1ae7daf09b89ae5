"""RateLimitMiddleware for WSGI: Flask, Django, or any other application.

    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, config="config.yaml")          # Flask
    application = RateLimitMiddleware(get_wsgi_application(), config="config.yaml") # Django

It reads the request, adds header fields when the application calls `start_response`, and returns the body of the
application unchanged. A denied request never reaches the application.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.inbound.client.request import LONGEST_METHOD, METHOD_OVERRIDES, Request, wsgi_header
from tidegate.inbound.limiting.flow import drive
from tidegate.inbound.limiting.request_limiter import MISSING, LimitOutcome, RequestLimiter
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound.responses import admin
from tidegate.inbound.responses.response import worked_out
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
    Start = Callable[..., Any]
    App = Callable[[Any, Any], Iterable[bytes]]

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
        self.guard = RequestLimiter(config, store, trusted_proxies, headers, clock, **options)

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:
        """Pass a request to the application, or deny it."""
        guard = self.guard
        method, path = environ.get("REQUEST_METHOD", "GET"), path_of(environ)
        plain = not environ.get("SCRIPT_NAME") and not guard.by_method
        target = guard.targets.get((method, path), MISSING) if plain else MISSING
        if target is MISSING:
            target = self._target(environ, method, path)
        if target is None:
            if guard.idle:
                guard.idle_chores()
            visit = environ[STATE_KEY] = RequestState(
                guard, None, None, environ.get(STATE_KEY)
            )  # read by route limits
            return self.app(environ, _HeaderStart(visit, start_response))
        peer = environ.get("REMOTE_ADDR")
        visitor = guard.met.get(peer)
        if visitor is None:
            visitor = guard.clients.find(peer, forwarding(environ))
        gate, key = target.gate, visitor.key
        if target.special or visitor.special or guard.special or gate is None or key is None:
            return self._seldom(environ, start_response, target, visitor)
        try:
            decision = gate.decide(key, target.cost)
        except RateLimitError as error:
            return self._after(guard.lost(gate, error), environ, start_response, target, visitor)
        if decision[0] and decision[1] < guard.quiet and key in gate.seen:
            gate.seen[key] = decision  # fast path: a known client is allowed again
            gate.allowed += 1
        elif not guard.told(gate, key, target.cost, decision, method, path):
            return self._deny(environ, start_response, gate, visitor, decision)
        visit = environ[STATE_KEY] = RequestState(guard, visitor, decision, environ.get(STATE_KEY))
        return self.app(environ, _HeaderStart(visit, start_response))

    # ---- slow paths --------------------------------------------------------------------------------------------------

    def _target(self, environ: Environ, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        guard = self.guard
        overrides = method_overrides(environ) if guard.by_method else ()
        root = text_of(environ.get("SCRIPT_NAME", ""))
        place = (method, path) if not root and not overrides else (method, path, root, *overrides)
        target: RequestTarget | None = guard.targets.get(place, MISSING)
        if target is MISSING:
            target = guard.target(place, (method, *overrides), wsgi_routes(path, root, guard.root_path), None)
        return target

    def _seldom(self, environ: Environ, start: Start, target: RequestTarget, visitor: RequestClient) -> Iterable[bytes]:
        """Handle a request that needs more than one plain decision."""
        outcome = LimitOutcome(let_in=True)
        if target.gate is not None and visitor.key is not None:
            request = request_of(environ, visitor)
            outcome = drive(self.guard.admitting(request, target, visitor))
        return self._after(outcome, environ, start, target, visitor)

    def _after(
        self, outcome: LimitOutcome, environ: Environ, start: Start, target: RequestTarget, visitor: RequestClient
    ) -> Iterable[bytes]:
        """Pass the request on or deny it, as decided."""
        decision, settlement = outcome.decision, outcome.settlement
        if not outcome.let_in and outcome.gate is not None and decision is not None:
            return self._deny(environ, start, outcome.gate, visitor, decision, outcome.kind)
        visit = environ[STATE_KEY] = RequestState(self.guard, visitor, decision, environ.get(STATE_KEY))
        starting = _HeaderStart(visit, start)
        app = self._admin if target.admin else self.app
        if settlement is None:
            return app(environ, starting)
        try:
            return _SettlingBody(app(environ, _SettlingStart(starting, visit, settlement)), settlement)
        except BaseException:
            drive(settlement.ending())
            raise

    def _deny(
        self,
        environ: Environ,
        start: Start,
        gate: CategoryLimiter,
        visitor: RequestClient,
        decision: Decision,
        kind: Kind = "quota-exceeded",
    ) -> Iterable[bytes]:
        answers = self.guard.answers
        decision = worked_out(decision)
        answer = answers.denial(request_of(environ, visitor), decision, gate.category.policy, kind)
        outer: RequestState | None = environ.get(STATE_KEY)
        if outer is not None:
            outer.add(decision)
        return respond(environ, start, answer, answers.fields(decision) if outer is None else [])

    def _admin(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Serve the admin endpoint."""
        request = request_of(environ, environ[STATE_KEY].visitor)
        answer = admin.forbidden(self.guard, request, environ.get("REMOTE_ADDR"))
        if answer is None:
            length = str(environ.get("CONTENT_LENGTH") or "")
            wanted = int(length) if length.isdecimal() and len(length) < MAX_LENGTH_DIGITS else 0
            body = environ["wsgi.input"].read(min(wanted, admin.MAX_BODY_BYTES + 1)) if wanted else b""
            answer = drive(admin.answering(self.guard, request, environ.get("QUERY_STRING", ""), body))
        return respond(environ, start, answer, [])

    def close(self) -> None:
        """Close the store, if this middleware opened it."""
        self.guard.flush()
        if self.guard.owns_store:
            self.guard.store.close()


class _HeaderStart:
    """The `start_response` that the application calls: adds the header fields.

    The environ must not refer to it: the server's `start_response` may refer to the environ, and every request would
    leave a reference cycle to the garbage collector.
    """

    __slots__ = ("_start", "_visit")

    def __init__(self, visit: RequestState, start: Start) -> None:
        self._visit = visit
        self._start = start

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Start the response."""
        decision = None if self._visit.nested else self._visit.told  # nested: the outer middleware adds them
        if decision is not None:
            headers = [*headers, *self._visit.guard.answers.fields(decision)]
        return self._start(status, headers) if exc_info is None else self._start(status, headers, exc_info)


class _SettlingStart:
    """Corrects the charge of a request before its response starts, so the client sees the corrected limits."""

    __slots__ = ("_settlement", "_start", "_visit")

    def __init__(self, start: _HeaderStart, visit: RequestState, settlement: ResponseCharge) -> None:
        self._start = start
        self._visit = visit
        self._settlement = settlement

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Start the response."""
        self._settlement.status = int(status[:3])
        if self._settlement.at_the_start:
            self._visit.look_again(drive(self._settlement.starting()))
        return self._start(status, headers, exc_info)


class _SettlingBody:
    """A response body that corrects the charge of its request when it is closed."""

    def __init__(self, body: Iterable[bytes], settlement: ResponseCharge) -> None:
        self._body = body
        self._settlement = settlement

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the body of the application."""
        return iter(self._body)

    def close(self) -> None:
        """Close the body and correct the charge; called by the server."""
        try:
            if hasattr(self._body, "close"):
                self._body.close()
        finally:
            drive(self._settlement.ending())


def respond(environ: Environ, start: Start, answer: Response, fields: Fields) -> Iterable[bytes]:
    """Start a complete response and return its body."""
    start(answer.line, [*answer.headers, *fields])
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]


def request_of(environ: Environ, visitor: RequestClient) -> Request:
    """Build the Request that key, count and denial functions receive."""
    method = environ.get("REQUEST_METHOD", "GET")
    return Request(method, path_of(environ), visitor.address, environ, lambda name: wsgi_header(environ, name))


def path_of(environ: Environ) -> str:
    """Return the decoded path below the application's root."""
    return text_of(environ.get("PATH_INFO") or "/")


def method_overrides(environ: Environ) -> tuple[str, ...]:
    """Return the methods of method-override headers, which some applications use instead of the request's method."""
    values = [wsgi_header(environ, name) for name in METHOD_OVERRIDES]
    return tuple(value.strip()[:LONGEST_METHOD] for value in values if value)


def text_of(value: str) -> str:
    """Decode a WSGI string, whose bytes are written as Latin-1. Bytes that are not UTF-8 become lone surrogates."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value  # an outer middleware has decoded it already


def forwarding(environ: Environ) -> list[tuple[str, str]]:
    """Return the headers that proxies write client addresses into."""
    found = [(name, environ.get(field)) for name, field in FORWARDING_VARIABLES]
    return [(name, value) for name, value in found if value]


FORWARDING_VARIABLES = (("x-forwarded-for", "HTTP_X_FORWARDED_FOR"), ("forwarded", "HTTP_FORWARDED"))
