"""The ASGI application: paths, bounds on what a request may be, and answers.

Requests are bounded in size, time and number. Whatever goes wrong is answered as problem details; what was not
foreseen as a 500 that says nothing of the inside, with the traceback in the log.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.service.dashboard.overview import Overview
from tidegate.service.dashboard.static_files import read_files
from tidegate.service.decisions.idempotency import KeyedCall
from tidegate.service.decisions.stats import LatencyHistogram
from tidegate.service.http import metrics
from tidegate.service.http.auth import Authenticator
from tidegate.service.http.body import read_body
from tidegate.service.http.check import METHODS, check
from tidegate.service.http.json_protocol import loads
from tidegate.service.http.openapi import document
from tidegate.service.http.problems import KINDS, HTTPReply, ProblemError, problem_of
from tidegate.service.http.replays import IdempotentReplies, replayed
from tidegate.service.http.verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, MutableMapping

    from tidegate.service.config.settings import Settings
    from tidegate.service.decisions.decider import Decider

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    Verb = Callable[..., Coroutine[Any, Any, HTTPReply]]
    Get = Callable[[Scope, dict[bytes, bytes]], Awaitable[HTTPReply]]
    Panel = Callable[[], Awaitable[object] | object]

log = logging.getLogger("tidegate.service")

ADMIN_VERBS: Final = ("reset", "block", "unblock", "blocks")  # verbs that need the admin token
IDEMPOTENT_VERBS: Final = ("acquire", "reserve", "lease", "batch", "commit", "cancel", "release")
FREE_SHARE_DIVISOR: Final = 8  # one part in eight of max_concurrency is never taken by calls that may wait
TASK_KEY: Final = "tidegate.task"  # in a scope: the task that answers the request
HUNG_UP_KEY: Final = "tidegate.hung_up"  # in a scope: the client has closed the connection
SECURITY_HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


class App:
    """The service's ASGI application over a decider."""

    def __init__(self, decider: Decider, settings: Settings) -> None:
        """Answer by this decider, within the bounds of the settings."""
        self.decider = decider
        self.settings = settings
        self.in_flight = 0
        self.waiting = 0  # requests under way that may wait for a permit
        self.stopping = False
        self.idle = asyncio.Event()  # set when the last request of a stopping service is answered
        self.reloads = {"adopted": 0, "refused": 0}
        self.refused: str | None = None  # why the file as it stands now is not in force
        self.checks: dict[str, Callable[[], None]] = {}  # what else has to be there for the service to be ready
        self.panels: dict[str, Panel] = {}  # what other faces show on the dashboard: see dashboard/panels.py
        self.overview = Overview(self)
        self._door = Authenticator(settings)
        self._clock = decider.store.clock
        self._replays = IdempotentReplies(self._clock)
        self._awaits_store = not decider.store.instant
        self._verbs = Verbs(decider)
        self._latency = decider.stats.latency
        self._posts = {f"/v1/{name}": (name, verb) for name, verb in self._verbs.all.items()}
        self._gets: dict[str, tuple[str, Get]] = {
            "/v1/check": ("check", self._check),
            "/v1/policies": ("policies", self._policies),
            "/v1/blocks": ("blocks", self._blocks),
            "/healthz": ("", self._healthz),
            "/readyz": ("", self._readyz),
            "/metrics": ("metrics", self._metrics),
            "/openapi.json": ("", self._openapi),
            "/v1/overview": ("overview", self._overview),
        }
        self._files = read_files(token=not self._door.open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901, PLR0912 - a coroutine for each branch would cost every request
        """Answer one request.

        The usual question, a cost of 1 to a store in memory, is answered at once: coroutines between it and its answer
        would cost as much as the decision.
        """
        if scope["type"] != "http":
            await _lifespan(scope, receive, send)
            return
        if self._awaits_store:
            if HUNG_UP_KEY in scope:
                return
            scope[TASK_KEY] = asyncio.current_task()  # to be cancelled if the client hangs up: see `http.protocol`
        steady = self._clock.steady
        start = steady()
        self.in_flight += 1
        verb = "other"
        try:
            try:
                path = scope["path"]
                if (post := self._posts.get(path)) is not None:
                    verb = post[0]
                    headers = self._admit(scope, verb)
                    body = await read_body(headers, receive, self.settings.max_body)
                    key = headers.get(b"idempotency-key")
                    at_once = self._verbs.at_once(body) if verb == "acquire" and key is None else None
                    # What may wait is timed apart: its time is mostly the client's wish.
                    verb = f"{verb} wait" if at_once is None and b'"wait"' in body else verb
                    reply = at_once or await self._post(post[0], post[1], body, key, receive)
                elif (get := self._gets.get(path)) is not None:
                    verb = get[0] or verb
                    reply = await self._get(scope, *get)
                else:
                    reply = await self._page(scope, path)
            except ProblemError as problem:
                reply = self._refuse(problem)
            except RateLimitError as error:
                reply = self._refuse(problem_of(error))
            except ConnectionAbortedError:
                return  # nobody is there to be answered
            except asyncio.CancelledError:
                if HUNG_UP_KEY in scope:
                    return  # what was charged is given back by the store
                raise
            except Exception:
                log.exception("a request to %s failed", scope["path"][:100])
                reply = self._refuse(ProblemError("internal", "see the log of the service"))
            await respond(send, reply, head=scope["method"] == "HEAD")
        finally:
            self.in_flight -= 1
            if self.stopping and not self.in_flight:
                self.idle.set()
            latency = self._latency.get(verb)
            if latency is None:
                latency = self._latency[verb] = LatencyHistogram()
            latency.add(steady() - start)

    def stop(self) -> None:
        """Answer no further questions."""
        self.stopping = True
        if not self.in_flight:
            self.idle.set()

    def _refuse(self, problem: ProblemError) -> HTTPReply:
        self.decider.stats.errors[problem.kind] += 1
        return problem.reply()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def _admit(self, scope: Scope, name: str) -> dict[bytes, bytes]:
        """Let a question in, or refuse it, before its body is read."""
        if scope["method"] != "POST":
            raise ProblemError("method-not-allowed", f"send a POST, not a {scope['method'][:20]}", allow="POST")
        headers = dict(scope["headers"])
        self._door.check(headers, admin=name in ADMIN_VERBS)
        # The admin has to get in when there are too many requests.
        if self.stopping or (self.in_flight > self.settings.max_concurrency and name not in ADMIN_VERBS):
            self._check_load()
        kind = headers.get(b"content-type", b"")
        if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
            raise ProblemError("unsupported-type", "send JSON, with the header 'Content-Type: application/json'")
        return headers

    async def _post(self, name: str, verb: Verb, body: bytes, key: bytes | None, receive: Receive) -> HTTPReply:
        asked = loads(body)
        if key is None or name not in IDEMPOTENT_VERBS:
            answer = verb(asked)
        else:
            answer = self._replays.answer(key, (name, body), lambda: self._once(name, verb, body, asked, key))
        if isinstance(asked, dict) and asked.get("wait"):
            return await self._waiting(answer, receive)
        return await answer

    async def _once(self, name: str, verb: Verb, body: bytes, asked: object, key: bytes) -> HTTPReply:
        """Ask with an idempotency key; a store that is shared remembers it, too."""
        if self.decider.store.instant:
            return await verb(asked)
        call = KeyedCall.read(key, name, body)
        reply = await verb(asked, call)
        return replayed(reply) if call.repeated else reply

    async def _waiting(self, answer: Coroutine[Any, Any, HTTPReply], receive: Receive) -> HTTPReply:
        """Answer a call that may wait for a permit; such calls leave room for those that are decided at once."""
        most = self.settings.max_concurrency
        if self.waiting >= most - most // FREE_SHARE_DIVISOR:
            answer.close()
            raise ProblemError("busy", f"{self.waiting} calls wait already: ask without wait, or later")
        self.waiting += 1
        try:
            return await unless_gone(answer, receive)
        finally:
            self.waiting -= 1

    def _check_load(self) -> None:
        if self.stopping:
            raise ProblemError("stopping")
        if self.in_flight > self.settings.max_concurrency:
            raise ProblemError("busy", f"more than {self.settings.max_concurrency} requests are under way")

    async def _get(self, scope: Scope, name: str, get: Get) -> HTTPReply:
        methods = METHODS if name == "check" else ("GET", "HEAD")
        if scope["method"] not in methods:
            detail = f"send a GET, not a {scope['method'][:20]}"
            raise ProblemError("method-not-allowed", detail, allow=", ".join(methods))
        headers = dict(scope["headers"])
        if name:
            # The overview tells of keys: where there is any token, it is not for everybody who can connect.
            admin = name in ADMIN_VERBS or (name == "overview" and self.settings.decision_token is None)
            self._door.check(headers, admin=admin)
        return await get(scope, headers)

    async def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> HTTPReply:
        self._door.check_site(headers)
        self._check_load()
        return await check(self.decider, scope["query_string"], headers, self.settings.headers)

    async def _policies(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return await self._verbs.policies()

    async def _blocks(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return self._verbs.blocks()

    # ---- the dashboard -----------------------------------------------------------------------------------------------

    async def _page(self, scope: Scope, path: str) -> HTTPReply:
        """Give a file of the page, which has no data in it and therefore needs no token."""
        if path not in self._files:
            raise ProblemError("not-found", f"there is no {path[:100]!r}: see /openapi.json")
        return await self._get(scope, "", self._file)

    async def _file(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return self._files[scope["path"]]

    async def _overview(self, scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, await self.overview.write(scope["query_string"]))

    # ---- operating ---------------------------------------------------------------------------------------------------

    async def _healthz(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, b'{"ok":true}')

    async def _readyz(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        """Tell whether decisions can be made: store and bus answer, and the service is not stopping."""
        if self.stopping:
            raise ProblemError("stopping")
        await self.decider.probe()
        for needed in self.checks.values():
            needed()
        return HTTPReply(200, b'{"ok":true}')

    async def _metrics(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, metrics.render(self.decider, self.in_flight, self.reloads), metrics.CONTENT_TYPE)

    async def _openapi(self, _scope: Scope, _headers: dict[bytes, bytes]) -> HTTPReply:
        return HTTPReply(200, document())


async def unless_gone(answer: Coroutine[Any, Any, HTTPReply], receive: Receive) -> HTTPReply:
    """Wait for an answer while there is somebody to be answered: who hangs up leaves the line."""
    answering = asyncio.create_task(answer)
    # Not cancelled at the end: a server need not allow that, and ends it with the request at the latest.
    listening = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((answering, listening), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise ConnectionAbortedError
    finally:
        answering.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the end of the body


async def respond(send: Send, reply: HTTPReply, *, head: bool = False) -> None:
    """Send an answer."""
    status, body, kind, more = reply
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *SECURITY_HEADERS, *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def _lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Start and stop with the server, where one asks for it; refuse what is neither that nor HTTP."""
    if scope["type"] != "lifespan":
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        return
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


__all__ = ["ADMIN_VERBS", "IDEMPOTENT_VERBS", "KINDS", "App", "respond"]
