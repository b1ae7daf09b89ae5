"""The ASGI application: routes requests, bounds their size, time and number, and sends responses.

Errors are sent as problem details. An unexpected exception is sent as a 500 without details; its traceback is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.errors import RateLimitError
from tidegate.service.api.verbs import VERBS
from tidegate.service.dashboard.key_report import key_json
from tidegate.service.dashboard.overview import Overview
from tidegate.service.dashboard.rule_changes import describe_changes
from tidegate.service.dashboard.static_files import read_files
from tidegate.service.decisions.audit import Origin
from tidegate.service.decisions.idempotency import KeyedCall
from tidegate.service.http import metrics
from tidegate.service.http.auth import Authenticator
from tidegate.service.http.body import read_body
from tidegate.service.http.check import METHODS, check
from tidegate.service.http.openapi import document
from tidegate.service.http.problems import KINDS, HTTPReply, ProblemError, problem_from
from tidegate.service.http.readiness import check_readiness
from tidegate.service.http.replays import IdempotentReplies, mark_replayed
from tidegate.service.http.verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence

    from tidegate.observe.text_format import Family
    from tidegate.service.api.requests import VerbRequest
    from tidegate.service.api.verbs import ServiceVerb
    from tidegate.service.config.settings import Settings
    from tidegate.service.decisions.decider import Decider
    from tidegate.service.decisions.policies import ServicePolicies

    Fields = Iterable[tuple[bytes, bytes]]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    Function = Callable[..., Coroutine[Any, Any, HTTPReply]]
    Get = Callable[[Scope, dict[bytes, bytes]], Awaitable[HTTPReply]]
    Verb = ServiceVerb[VerbRequest, object]
    ImmediateReply = Callable[[bytes], bytes | None]
    Panel = Callable[[], Awaitable[object] | object]
    ReadinessCheck = Callable[[], ProblemError | None]  # returns why the service is not ready
    Report = Callable[[], Awaitable[dict[str, Any]]]
    ReadFamilies = Callable[[], Awaitable[Sequence[Family]]]

log: logging.Logger = logging.getLogger("tidegate.service")

FREE_SHARE_DIVISOR: Final = 8  # an eighth of max_concurrency is reserved for calls that do not wait
TASK_KEY: Final = "tidegate.task"  # in a scope: the task that handles the request
CANCELS_KEY: Final = "tidegate.cancels"  # in a scope: the server cancels the task when the client disconnects
DISCONNECTED_KEY: Final = "tidegate.disconnected"  # in a scope: the client has closed the connection
CONNECTION_CLOSE: Final = (b"connection", b"close")
SECURITY_HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


class ImmediateVerb(NamedTuple):
    """A verb whose common requests are answered at once, without a coroutine."""

    verb: Verb
    reply: ImmediateReply  # returns the JSON of the response to a body; None: nothing was done, use the app


class App:
    """The ASGI application of the service, over a Decider."""

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
        self.egress_gauges: Callable[[], list[tuple[str, str, int, int]]] = list  # in a worker: see `worker_egress`
        self.panels: dict[str, Panel] = {}  # panels of other components on the dashboard: see dashboard/panels.py
        self.overview: Overview = Overview(self)
        self.authenticator: Authenticator = Authenticator(settings)
        self._clock = decider.store.clock
        self._replays = IdempotentReplies(self._clock)
        self._verbs = Verbs(decider)
        self._immediate: dict[bytes, ImmediateVerb] = {
            VERBS[name].path.encode(): self._time_verb(VERBS[name], reply)
            for name, reply in self._verbs.immediate.items()
        }
        self._posts = {
            verb.path: (verb, self._verbs.all[verb.name]) for verb in VERBS.values() if verb.method == "POST"
        }
        self._gets: dict[str, tuple[str, Get]] = {
            **{verb.path: (verb.name, self._list) for verb in VERBS.values() if verb.method == "GET"},
            "/v1/check": ("check", self._check),
            "/healthz": ("", self._healthz),
            "/readyz": ("", self._readyz),
            "/metrics": ("metrics", self._metrics),
            "/openapi.json": ("", self._openapi),
            "/v1/overview": ("overview", self._overview),
            "/v1/history": ("overview", self._history),
            "/v1/key": ("overview", self._key),
        }
        self._document = b""  # the OpenAPI description, once it was requested
        self._files = read_files(token=not self.authenticator.open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901 - a coroutine for each branch would cost every request
        """Handle one request. The server first calls `find_immediate`: common requests need no task."""
        if scope["type"] != "http":
            await _lifespan(scope, receive, send)
            return
        if DISCONNECTED_KEY in scope:
            return
        scope[TASK_KEY] = asyncio.current_task()  # cancelled if the client disconnects: see `http.protocol`
        start = self.begin_request()
        verb = "other"
        try:
            try:
                path = scope["path"]
                if (post := self._posts.get(path)) is not None:
                    verb = post[0].name
                    headers = self._check_head(scope, post[0])
                    body = await read_body(headers, receive, self.settings.max_body)
                    key = headers.get(b"idempotency-key")
                    request = post[0].decode(body)
                    verb, running = self._post(*post, request, (body, key), scope, receive)
                    reply = await running
                elif (get := self._gets.get(path)) is not None:
                    verb = get[0] or verb
                    reply = await self._get(scope, *get)
                else:
                    reply = await self._page(scope, path)
            except ProblemError as problem:
                reply = self._refuse(problem)
            except RateLimitError as error:
                reply = self._refuse(problem_from(error))
            except ConnectionAbortedError:
                return  # the client has disconnected
            except asyncio.CancelledError:
                if DISCONNECTED_KEY in scope:
                    return  # the store refunds what was charged
                raise
            except Exception:
                log.exception("a request to %s failed", scope["path"][:100])
                reply = self._refuse(ProblemError("internal", "see the log of the service"))
            await respond(send, reply, head=scope["method"] == "HEAD", last=self.draining)
        finally:
            self.end_request(verb, start)

    def begin_request(self) -> int:
        """Count an active request; return the steady time, for `end_request`."""
        self.in_flight += 1
        return self._clock.steady()

    def end_request(self, verb: str, start: int) -> None:
        """Count a request that is no longer active, and its duration."""
        self.in_flight -= 1
        if self.stopping and not self.in_flight:
            self.idle.set()
        self.decider.stats.latency_of(verb).add(self._clock.steady() - start)

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

    def _refuse(self, problem: ProblemError) -> HTTPReply:
        self.decider.stats.errors[problem.kind] += 1
        return problem.reply()

    # ---- verbs -------------------------------------------------------------------------------------------------------

    def find_immediate(self, path: bytes, fields: Fields) -> ImmediateVerb | None:
        """Return the verb of a POST that may be answered at once, after the checks of its head; None for all others."""
        found = self._immediate.get(path)
        if found is None or self.is_busy or self.draining:
            return None
        headers = dict(fields)
        if headers.get(b"content-type") != b"application/json" or b"idempotency-key" in headers:
            return None
        try:
            self.authenticator.check(headers, admin=found.verb.admin)
        except ProblemError:
            return None  # refused by __call__, which counts it
        return found

    def _time_verb(self, verb: Verb, run: ImmediateReply) -> ImmediateVerb:
        """Return a verb whose common requests are answered by this function, timed and with its errors translated."""
        steady, add_latency = self._clock.steady, self.decider.stats.latency_of(verb.name).add

        def reply(body: bytes) -> bytes | None:
            start = steady()
            try:
                response = run(body)
            except RateLimitError:
                return None
            except Exception:
                log.exception("a request to %s failed", verb.path)
                raise ProblemError("internal", "see the log of the service") from None
            if response is not None:
                add_latency(steady() - start)
            return response

        return ImmediateVerb(verb, reply)

    def _check_head(self, scope: Scope, verb: Verb) -> dict[bytes, bytes]:
        """Check the head of a request before its body is read; return the header fields."""
        if scope["method"] != "POST":
            raise ProblemError("method-not-allowed", f"expected POST, not {scope['method'][:20]}", allow="POST")
        headers = dict(scope["headers"])
        self.authenticator.check(headers, admin=verb.admin)
        # Admin requests are accepted even if there are too many requests.
        if self.stopping or (not verb.admin and self.is_full):
            self.check_load()
        kind = headers.get(b"content-type", b"")
        if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
            raise ProblemError("unsupported-type", "send JSON, with the header 'Content-Type: application/json'")
        return headers

    def _post(
        self,
        verb: Verb,
        run: Function,
        request: VerbRequest,
        repeatable: tuple[bytes, bytes | None],
        scope: Scope,
        receive: Receive,
    ) -> tuple[str, Coroutine[Any, Any, HTTPReply]]:
        """Return the name of the histogram for a request, and the coroutine that answers it.

        `repeatable` is the body of the request and its idempotency key.
        """
        body, key = repeatable
        if verb.audited:
            reply = run(request, find_origin(scope, request))
        elif key is None or not verb.idempotent:
            reply = run(request)
        else:
            reply = self._replays.reply(key, (verb.name, body), lambda: self._run_keyed(verb, run, request, body, key))
        if not (verb.waits and request.wait_seconds):
            return verb.name, reply
        # The client chooses how long such a call may wait, so it has a histogram of its own.
        return f"{verb.name} wait", self._run_waiting(reply, scope, receive)

    async def _run_keyed(self, verb: Verb, run: Function, request: VerbRequest, body: bytes, key: bytes) -> HTTPReply:
        """Run a verb with an idempotency key; a shared store also remembers the key."""
        if self.decider.store.instant:
            return await run(request)
        call = KeyedCall.read(key, verb.name, body)
        reply = await run(request, call)
        return mark_replayed(reply) if call.repeated else reply

    async def _run_waiting(self, reply: Coroutine[Any, Any, HTTPReply], scope: Scope, receive: Receive) -> HTTPReply:
        """Run a call that may wait for a permit; a part of max_concurrency is reserved for calls that do not wait."""
        try:
            self.begin_wait()
        except ProblemError:
            reply.close()
            raise
        try:
            # In a task of its own, a reply could be complete, and charged, at the moment the client disconnects.
            return await (reply if CANCELS_KEY in scope else run_until_disconnect(reply, receive))
        finally:
            self.waiting -= 1

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

    @property
    def is_full(self) -> bool:
        """Whether the service refuses further requests: it is stopping, or too many requests are active."""
        return self.stopping or self.in_flight > self.settings.max_concurrency

    def check_load(self) -> None:
        """Refuse a request if the service is stopping, or too many requests are active."""
        if self.stopping:
            raise ProblemError("stopping")
        if self.in_flight > self.settings.max_concurrency:
            raise ProblemError("busy", f"more than {self.settings.max_concurrency} requests are active: retry later")

    async def _get(self, scope: Scope, name: str, get: Get) -> HTTPReply:
        methods = METHODS if name == "check" else ("GET", "HEAD")
        if scope["method"] not in methods:
            detail = f"expected GET, not {scope['method'][:20]}"
            raise ProblemError("method-not-allowed", detail, allow=", ".join(methods))
        headers = dict(scope["headers"])
        if name == "metrics":
            self.authenticator.check_metrics(headers)
        elif name:
            # The overview contains keys: if there is any token, the overview needs one.
            verb = VERBS.get(name)
            admin = verb.admin if verb else name == "overview" and self.settings.decision_token is None
            self.authenticator.check(headers, admin=admin)
        return await get(scope, headers)

    async def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> HTTPReply:
        self.authenticator.check_site(headers)
        self.check_load()
        return await check(self.decider, scope["query_string"], headers, self.settings.headers)

    async def _list(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        """Run a verb without parameters."""
        return await self._verbs.all[scope["path"].removeprefix("/v1/")]()

    # ---- the dashboard -----------------------------------------------------------------------------------------------

    async def _page(self, scope: Scope, path: str) -> HTTPReply:
        """Serve a file of the dashboard, which contains no data and therefore needs no token."""
        if path not in self._files:
            raise ProblemError("not-found", f"unknown path {path[:100]!r}: see /openapi.json")
        return await self._get(scope, "", self._file)

    async def _file(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return self._files[scope["path"]]

    async def _overview(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, await self.overview.to_json(scope["query_string"]))

    async def _history(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, await self.overview.history_json(scope["query_string"]))

    async def _key(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, await key_json(self, scope["query_string"]))

    # ---- operations --------------------------------------------------------------------------------------------------

    async def _healthz(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, await self._with_reports(b'{"ok":true}'))

    async def _with_reports(self, body: bytes) -> bytes:
        """Add the states of components to the JSON object of a health check."""
        if not self.reports:
            return body
        return json.dumps(json.loads(body) | {name: await report() for name, report in self.reports.items()}).encode()

    async def _readyz(self, _scope: Scope, headers: dict[bytes, bytes]) -> HTTPReply:
        """Check that the service can decide, that the bus answers, and that the service is not stopping."""
        if self.draining:
            raise ProblemError("stopping", more={"state": "stopping"})
        for kind, detail in self.overview.source.failed_checks():
            raise ProblemError(kind, detail)
        ready = await check_readiness(
            self.decider, self.settings.readiness, with_names=self.authenticator.may_decide(headers)
        )
        return ready._replace(body=await self._with_reports(ready.body)) if self.reports else ready

    def failed_checks(self) -> list[tuple[str, str]]:
        """Return which checks of this process fail: the kinds of the problems, and their details."""
        return [(problem.kind, str(problem)) for check in self.checks if (problem := check()) is not None]

    async def _metrics(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        more = [family for read in self.families for family in await read()]
        return HTTPReply(200, metrics.render(self.overview.source, self.reloads, more), metrics.CONTENT_TYPE)

    async def _openapi(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        self._document = self._document or document()
        return HTTPReply(200, self._document)


async def run_until_disconnect(reply: Coroutine[Any, Any, HTTPReply], receive: Receive) -> HTTPReply:
    """Run a call, but cancel it if the client disconnects, so that it leaves the wait queue."""
    running = asyncio.create_task(reply)
    # Not cancelled at the end: a server need not support that, and ends it with the request at the latest.
    listening = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((running, listening), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ConnectionAbortedError
    finally:
        running.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the end of the body


def find_origin(scope: Scope, request: Any) -> Origin:  # noqa: ANN401 - a request of an audited verb
    """Return who sends a request, for the audit log: as given, and the address of the connection."""
    client = scope.get("client")
    return Origin(request.actor, client[0] if client else "", request.reason)


async def respond(send: Send, reply: HTTPReply, *, head: bool = False, last: bool = False) -> None:
    """Send a response: to a HEAD request without its body, and if it is the `last` one, then close the connection."""
    status, body, kind, more = reply
    headers = [*SECURITY_HEADERS, (b"content-type", kind), (b"content-length", b"%d" % len(body)), *more]
    if last:
        headers.append(CONNECTION_CLOSE)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def _lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Handle the lifespan protocol; refuse every other protocol but HTTP."""
    if scope["type"] != "lifespan":
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        return
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


__all__ = ["KINDS", "App", "respond"]
