"""RateLimitMiddleware for WSGI: Flask, Django, or any other application.

    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, config="config.yaml")          # Flask
    application = RateLimitMiddleware(get_wsgi_application(), config="config.yaml") # Django

It looks at the request, adds fields where the application calls `start_response`, and gives back what the application
returned, untouched. A denied request never reaches the application.
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

MAX_LENGTH_DIGITS: Final = 10  # no body is that long


class RateLimitMiddleware:
    """Limits the requests that a WSGI application receives."""

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
        """Limit by a configuration: the path of a file, a mapping, or None for the spec's defaults."""
        self.app = app
        self.guard = RequestLimiter(config, store, trusted_proxies, headers, clock, **options)

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:
        """Let a request in, or answer it."""
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
            )  # for limits of single routes
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
            gate.seen[key] = decision  # a client that is known is allowed once more: this is all there is to note
            gate.allowed += 1
        elif not guard.told(gate, key, target.cost, decision, method, path):
            return self._deny(environ, start_response, gate, visitor, decision)
        visit = environ[STATE_KEY] = RequestState(guard, visitor, decision, environ.get(STATE_KEY))
        return self.app(environ, _HeaderStart(visit, start_response))

    # ---- what is not usual -------------------------------------------------------------------------------------------

    def _target(self, environ: Environ, method: str, path: str) -> RequestTarget | None:
        """Tell where a request goes; None: it is not limited."""
        guard = self.guard
        overrides = method_overrides(environ) if guard.by_method else ()
        root = text_of(environ.get("SCRIPT_NAME", ""))
        place = (method, path) if not root and not overrides else (method, path, root, *overrides)
        target: RequestTarget | None = guard.targets.get(place, MISSING)
        if target is MISSING:
            target = guard.target(place, (method, *overrides), wsgi_routes(path, root, guard.root_path), None)
        return target

    def _seldom(self, environ: Environ, start: Start, target: RequestTarget, visitor: RequestClient) -> Iterable[bytes]:
        """Let in or answer a request with something special about it."""
        outcome = LimitOutcome(let_in=True)
        if target.gate is not None and visitor.key is not None:
            request = request_of(environ, visitor)
            outcome = drive(self.guard.admitting(request, target, visitor))
        return self._after(outcome, environ, start, target, visitor)

    def _after(
        self, outcome: LimitOutcome, environ: Environ, start: Start, target: RequestTarget, visitor: RequestClient
    ) -> Iterable[bytes]:
        """Do what was decided."""
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
        """Answer the operator."""
        request = request_of(environ, environ[STATE_KEY].visitor)
        answer = admin.forbidden(self.guard, request, environ.get("REMOTE_ADDR"))
        if answer is None:
            length = str(environ.get("CONTENT_LENGTH") or "")
            wanted = int(length) if length.isdecimal() and len(length) < MAX_LENGTH_DIGITS else 0
            body = environ["wsgi.input"].read(min(wanted, admin.MAX_BODY_BYTES + 1)) if wanted else b""
            answer = drive(admin.answering(self.guard, request, environ.get("QUERY_STRING", ""), body))
        return respond(environ, start, answer, [])

    def close(self) -> None:
        """Let the store go, if it was opened here."""
        self.guard.flush()
        if self.guard.owns_store:
            self.guard.store.close()


class _HeaderStart:
    """Adds the fields where a response begins. It is the `start_response` that the application calls.

    The environ must not lead here: the server's `start_response` may lead back to it, and such a circle would be left
    to the garbage collector with every request.
    """

    __slots__ = ("_start", "_visit")

    def __init__(self, visit: RequestState, start: Start) -> None:
        self._visit = visit
        self._start = start

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Begin the response."""
        decision = None if self._visit.nested else self._visit.told  # nested: the middleware in front adds them
        if decision is not None:
            headers = [*headers, *self._visit.guard.answers.fields(decision)]
        return self._start(status, headers) if exc_info is None else self._start(status, headers, exc_info)


class _SettlingStart:
    """Corrects the charge of a request before its response begins, so that whoever has that may count on it."""

    __slots__ = ("_settlement", "_start", "_visit")

    def __init__(self, start: _HeaderStart, visit: RequestState, settlement: ResponseCharge) -> None:
        self._start = start
        self._visit = visit
        self._settlement = settlement

    def __call__(self, status: str, headers: Fields, exc_info: Any = None) -> Any:  # noqa: ANN401 - as WSGI has it
        """Begin the response."""
        self._settlement.status = int(status[:3])
        if self._settlement.at_the_start:
            self._visit.look_again(drive(self._settlement.starting()))
        return self._start(status, headers, exc_info)


class _SettlingBody:
    """The body of a response whose request is settled when it ends."""

    def __init__(self, body: Iterable[bytes], settlement: ResponseCharge) -> None:
        self._body = body
        self._settlement = settlement

    def __iter__(self) -> Iterator[bytes]:
        """Give what the application gives."""
        return iter(self._body)

    def close(self) -> None:
        """End, as the server tells us to."""
        try:
            if hasattr(self._body, "close"):
                self._body.close()
        finally:
            drive(self._settlement.ending())


def respond(environ: Environ, start: Start, answer: Response, fields: Fields) -> Iterable[bytes]:
    """Give a whole answer."""
    start(answer.line, [*answer.headers, *fields])
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]


def request_of(environ: Environ, visitor: RequestClient) -> Request:
    """Give the request as keys and answers are chosen by."""
    method = environ.get("REQUEST_METHOD", "GET")
    return Request(method, path_of(environ), visitor.address, environ, lambda name: wsgi_header(environ, name))


def path_of(environ: Environ) -> str:
    """Give the path beneath the application's root; WSGI hands bytes over as if they were Latin-1."""
    return text_of(environ.get("PATH_INFO") or "/")


def method_overrides(environ: Environ) -> tuple[str, ...]:
    """Tell the methods that a request asks to be taken for; some applications do."""
    values = [wsgi_header(environ, name) for name in METHOD_OVERRIDES]
    return tuple(value.strip()[:LONGEST_METHOD] for value in values if value)


def text_of(value: str) -> str:
    """Read what WSGI hands over: bytes as if they were Latin-1. Those that are no UTF-8 become lone surrogates."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value  # something in front of us has decoded it


def forwarding(environ: Environ) -> list[tuple[str, str]]:
    """Give the headers that speak of addresses."""
    found = [(name, environ.get(field)) for name, field in FORWARDING_VARIABLES]
    return [(name, value) for name, value in found if value]


FORWARDING_VARIABLES = (("x-forwarded-for", "HTTP_X_FORWARDED_FOR"), ("forwarded", "HTTP_FORWARDED"))
