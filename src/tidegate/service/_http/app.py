"""The application: finds what a request asks for, checks it, and answers it, at once or in a coroutine.

Errors are sent as problem details. An unexpected exception is sent as a 500 without details; its traceback is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.service._api.problems import HTTPReply, ProblemError, problem_from
from tidegate.service._api.verbs import VERBS
from tidegate.service._dashboard.key_report import key_json
from tidegate.service._dashboard.overview import Overview
from tidegate.service._dashboard.rule_changes import describe_changes
from tidegate.service._dashboard.static_files import read_files
from tidegate.service._decisions.audit import Origin
from tidegate.service._decisions.idempotency import KeyedCall
from tidegate.service._http import metrics
from tidegate.service._http.auth import Authenticator
from tidegate.service._http.check import METHODS, check
from tidegate.service._http.openapi import document
from tidegate.service._http.readiness import check_readiness
from tidegate.service._http.replays import IdempotentReplies, mark_replayed
from tidegate.service._http.request_head import OTHER, RequestHead, ServiceRoute
from tidegate.service._http.verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tidegate.observe._text_format import MetricFamily
    from tidegate.service._api.requests import VerbRequest
    from tidegate.service._api.verbs import ServiceVerb
    from tidegate.service._config.settings import Settings
    from tidegate.service._decisions.decider import Decider
    from tidegate.service._decisions.policies import ServicePolicies
    from tidegate.service._http.request_head import Exchange, Headers, Reply, Running
    from tidegate.service._http.runs import ServiceRuns

    Verb = ServiceVerb[VerbRequest, object]
    Get = Callable[[RequestHead], Awaitable[HTTPReply]]
    Panel = Callable[[], Awaitable[object] | object]
    ReadinessCheck = Callable[[], ProblemError | None]  # returns why the service is not ready
    Report = Callable[[], Awaitable[dict[str, Any]]]
    ReadFamilies = Callable[[], Awaitable[Sequence[MetricFamily]]]

log: logging.Logger = logging.getLogger("tidegate.service")

FREE_SHARE_DIVISOR: Final = 8  # an eighth of max_concurrency is reserved for calls that do not wait
GET_METHODS: Final = ("GET", "HEAD")


class App:
    """The application of the service, over a Decider."""

    def __init__(self, decider: Decider, settings: Settings) -> None:
        """Serve this decider, within the bounds of the settings."""
        self.decider = decider
        self.settings = settings
        self._max_concurrency = settings.max_concurrency
        self.in_flight: int = 0
        self.waiting: int = 0  # active requests that may wait for a permit
        self.draining: bool = False  # about to stop: not ready; each response is the last one of its connection
        self.stopping: bool = False
        self.idle: asyncio.Event = asyncio.Event()  # set when a stopping service has no active request left
        self.reloads: dict[str, int] = {"adopted": 0, "refused": 0}
        self.refused: str | None = None  # why the current file was refused
        self.refused_at: int | None = None  # since when, in milliseconds since 1970
        self.checks: list[ReadinessCheck] = []  # further checks of /readyz
        self.reports: dict[str, Report] = {}  # states of components in /healthz and /readyz
        self.families: list[ReadFamilies] = []  # metrics of components
        self.panels: dict[str, Panel] = {}  # panels of other components on the dashboard: see dashboard/panels.py
        self.on_sample: list[Callable[[], None]] = []  # called once a second: components copy their counts
        self.overview: Overview = Overview(self)
        self.authenticator: Authenticator = Authenticator(settings)
        self._clock = decider.store.clock
        self._steady = self._clock.steady
        self._latency = decider.stats.latency
        self._replays = IdempotentReplies(self._clock)
        self._verbs = Verbs(decider)
        self._immediate = self._verbs.immediate
        self._document = b""  # the OpenAPI description, once it was requested
        self._routes = self._build_routes()

    # ---- routes ------------------------------------------------------------------------------------------------------

    def _build_routes(self) -> dict[str, ServiceRoute]:
        """Return what each path does."""
        auth = self.authenticator
        decision, admin = partial(auth.check, admin=False), partial(auth.check, admin=True)
        # The overview contains keys: if there is any token, the overview needs one.
        overview = admin if self.settings.decision_token is None else decision
        gets: tuple[tuple[str, str, Callable[[Headers], object], Get], ...] = (
            ("/healthz", OTHER, _allow, self._healthz),
            ("/readyz", OTHER, _allow, self._readyz),
            ("/openapi.json", OTHER, _allow, self._openapi),
            ("/metrics", "metrics", auth.check_metrics, self._metrics),
            ("/v1/overview", "overview", overview, self._overview),
            ("/v1/history", "overview", overview, self._history),
            ("/v1/key", "overview", overview, self._key),
            *((path, OTHER, _allow, self._file) for path in read_files(token=not auth.open)),
        )
        self._files = read_files(token=not auth.open)
        routes = {
            path: ServiceRoute(name, GET_METHODS, rights, partial(self._get, get)) for path, name, rights, get in gets
        }
        routes["/v1/check"] = ServiceRoute("check", METHODS, auth.check_proxy, self._check, bounded=True)
        for verb in VERBS.values():
            rights = admin if verb.admin else decision
            if verb.method == "POST":
                routes[verb.path] = ServiceRoute(verb.name, ("POST",), rights, self._post, verb, not verb.admin)
            else:
                routes[verb.path] = ServiceRoute(verb.name, GET_METHODS, rights, partial(self._list, verb.name))
        return routes

    @property
    def runs(self) -> ServiceRuns:
        """The runs of the store."""
        return self._verbs.store_runs

    def find_route(self, path: str) -> ServiceRoute:
        """Return what a path does."""
        found = self._routes.get(path)
        if found is None:
            raise ProblemError("not-found", f"unknown path {path[:100]!r}: see /openapi.json")
        return found

    def check_head(self, route: ServiceRoute, method: str, headers: Headers) -> None:
        """Check the head of a request before its body is read."""
        if method not in route.methods:
            detail = f"expected {route.methods[0]}, not {method[:20]}"
            raise ProblemError("method-not-allowed", detail, allow=", ".join(route.methods))
        route.authenticate(headers)
        # Admin requests are accepted even if there are too many requests.
        if route.bounded or (self.stopping and route.verb is not None):
            self.check_load()
        if route.verb is not None:
            kind = headers.get(b"content-type", b"")
            if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
                raise ProblemError("unsupported-type", "send JSON, with the header 'Content-Type: application/json'")
            if int(headers.get(b"content-length", b"0")) > self.settings.max_body:
                raise self.too_large

    @property
    def too_large(self) -> ProblemError:
        """The problem of a body that is too large."""
        return ProblemError("too-large", f"the body of a request must not exceed {self.settings.max_body} bytes")

    # ---- requests ----------------------------------------------------------------------------------------------------

    def begin_request(self) -> int:
        """Count an active request; return the steady time, for `end_request`."""
        self.in_flight += 1
        return self._steady()

    def end_request(self, verb: str, start: int) -> None:
        """Count a request that is no longer active, and its duration."""
        self.in_flight -= 1
        if self.stopping and not self.in_flight:
            self.idle.set()
        self._latency[verb].add(self._steady() - start)

    def refuse(self, error: BaseException, path: str = "") -> HTTPReply:
        """Count an error, and return the response to its request; an unexpected one is logged."""
        if isinstance(error, ProblemError):
            problem = error
        elif isinstance(error, RateLimitError):
            problem = problem_from(error)
        else:
            log.error("a request to %s failed", path[:100], exc_info=error)
            problem = ProblemError("internal", "see the log of the service")
        self.decider.stats.errors.add(problem.kind)
        return problem.reply()

    def stop(self) -> None:
        """Refuse new requests."""
        self.draining = self.stopping = True
        if not self.in_flight:
            self.idle.set()

    def update_policies(self, policies: ServicePolicies) -> None:
        """Decide by these policies from now on; the charts of the dashboard mark the change."""
        self.overview.history.add_mark("rules", describe_changes(self.decider.policies, policies))
        self.decider.update_policies(policies)

    def record_refusal(self, reason: str | None) -> None:
        """Record why the current file is refused; None if it is not."""
        now = self._clock.ns() // 1_000_000
        self.refused_at = None if reason is None else self.refused_at or now
        self.refused = reason

    def begin_wait(self) -> None:
        """Count a call that may wait for a permit in `waiting`; refuse it if there are too many."""
        most = self.settings.max_concurrency
        if self.waiting >= most - most // FREE_SHARE_DIVISOR:
            raise ProblemError("busy", f"{self.waiting} calls are already waiting: retry without a timeout, or later")
        self.waiting += 1

    @property
    def is_busy(self) -> bool:
        """Whether the service would refuse one more request: it is stopping, or enough requests are active."""
        return self.stopping or self.in_flight >= self._max_concurrency

    def check_load(self) -> None:
        """Refuse an active request if the service is stopping, or too many requests are active."""
        if self.stopping:
            raise ProblemError("stopping")
        if self.in_flight > self._max_concurrency:
            raise ProblemError("busy", f"more than {self._max_concurrency} requests are active: retry later")

    # ---- verbs -------------------------------------------------------------------------------------------------------

    def _post(self, head: RequestHead, body: bytes, exchange: Exchange) -> Reply | Running:
        """Run a verb: at once if its request allows that, otherwise in a coroutine."""
        verb: Verb = head.route.verb  # type: ignore[union-attr,assignment]  # of a route that takes JSON
        request = verb.decode(body)
        if verb.guarded and request.needs_admin:  # type: ignore[attr-defined]  # of a guarded verb
            self.authenticator.check(head.headers, admin=True)
        key = head.headers.get(b"idempotency-key") if verb.idempotent else None
        if key is None and verb.name in self._immediate and (reply := self._immediate[verb.name](request)) is not None:
            return reply
        if verb.waits and request.timeout:  # type: ignore[attr-defined]  # of a verb that waits
            # The client chooses how long such a call may wait, so it has a histogram of its own.
            exchange.timed_as = f"{verb.name} wait"
            return self._run_waiting(verb, request, body, key)
        if verb.audited:
            return self._verbs.run(verb.name, request, Origin(request.actor, exchange.address, request.reason))  # type: ignore[attr-defined]  # of an audited verb
        return self._run(verb, request, body, key)

    def _run(self, verb: Verb, request: VerbRequest, body: bytes, key: bytes | None) -> Running:
        """Run a verb; a repetition with an idempotency key gets the same response."""
        if key is None:
            return self._verbs.run(verb.name, request)
        return self._replays.reply(key, (verb.name, body), lambda: self._run_keyed(verb, request, body, key))

    async def _run_keyed(self, verb: Verb, request: VerbRequest, body: bytes, key: bytes) -> HTTPReply:
        """Run a verb with an idempotency key; a shared store also remembers the key."""
        if self.decider.store.instant:
            return HTTPReply(200, await self._verbs.run(verb.name, request))
        call = KeyedCall.read(key, verb.name, body)
        reply = HTTPReply(200, await self._verbs.run(verb.name, request, call))
        return mark_replayed(reply) if call.repeated else reply

    async def _run_waiting(self, verb: Verb, request: VerbRequest, body: bytes, key: bytes | None) -> Reply:
        """Run a call that may wait for a permit; a part of max_concurrency is reserved for calls that do not wait."""
        self.begin_wait()
        try:
            return await self._run(verb, request, body, key)
        finally:
            self.waiting -= 1

    def _list(self, verb: str, _head: RequestHead, _body: bytes, _exchange: Exchange) -> Running:
        """Run a verb without parameters."""
        return self._verbs.run(verb)

    def _check(self, head: RequestHead, _body: bytes, _exchange: Exchange) -> Reply | Running:
        return check(self.decider, head.query, head.headers, self.settings.headers)

    # ---- the dashboard -----------------------------------------------------------------------------------------------

    def _get(self, get: Get, head: RequestHead, _body: bytes, _exchange: Exchange) -> Running:
        return get(head)  # type: ignore[return-value]  # all of them are coroutines

    async def _file(self, head: RequestHead) -> HTTPReply:
        """Serve a file of the dashboard, which contains no data and therefore needs no token."""
        return self._files[head.path]

    async def _overview(self, head: RequestHead) -> HTTPReply:
        return HTTPReply(200, await self.overview.to_json(head.query))

    async def _history(self, head: RequestHead) -> HTTPReply:
        return HTTPReply(200, await self.overview.history_json(head.query))

    async def _key(self, head: RequestHead) -> HTTPReply:
        return HTTPReply(200, await key_json(self, head.query))

    # ---- operations --------------------------------------------------------------------------------------------------

    async def _healthz(self, _head: RequestHead) -> HTTPReply:
        return HTTPReply(200, await self._with_reports(b'{"ok":true}'))

    async def _with_reports(self, body: bytes) -> bytes:
        """Add the states of components to the JSON object of a health check."""
        if not self.reports:
            return body
        return json.dumps(json.loads(body) | {name: await report() for name, report in self.reports.items()}).encode()

    async def _readyz(self, head: RequestHead) -> HTTPReply:
        """Check that the service can decide, that the bus answers, and that the service is not stopping."""
        if self.draining:
            raise ProblemError("stopping", more={"state": "stopping"})
        for kind, detail in self.overview.source.failed_checks():
            raise ProblemError(kind, detail)
        ready = await check_readiness(
            self.decider, self.settings.readiness, with_names=self.authenticator.may_decide(head.headers)
        )
        return ready._replace(body=await self._with_reports(ready.body)) if self.reports else ready

    def failed_checks(self) -> list[tuple[str, str]]:
        """Return which checks of this process fail: the kinds of the problems, and their details."""
        return [(problem.kind, str(problem)) for check in self.checks if (problem := check()) is not None]

    async def _metrics(self, _head: RequestHead) -> HTTPReply:
        more = [family for read in self.families for family in await read()]
        return HTTPReply(200, metrics.render(self.overview.source, self.reloads, more), metrics.CONTENT_TYPE)

    async def _openapi(self, _head: RequestHead) -> HTTPReply:
        self._document = self._document or document()
        return HTTPReply(200, self._document)


def _allow(_headers: Headers) -> None:
    """Need no token."""
