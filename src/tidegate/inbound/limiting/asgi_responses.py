"""Sends responses of ASGI applications: adds the header fields, decides what is pending, sends denials."""

from __future__ import annotations

from operator import attrgetter, call
from typing import TYPE_CHECKING, Any, Final

from tidegate.flow import run_async
from tidegate.inbound.client.request import Request, asgi_header, asgi_path
from tidegate.inbound.limiting.denials import write_result
from tidegate.inbound.limiting.fast_decision import decide_deferred
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.responses.response import PLAIN_DENIAL, RAW_PLAIN_HEADERS, Response, fit_to_status, raw

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.core.decision import Decision
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.request_state import RequestState

    RawFields = list[tuple[bytes, bytes]]
    Scope = Any  # a mutable mapping; frameworks have different types for it
    Message = Any
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]
    Writer = Callable[[Decision], RawFields]

POLICY_VIOLATION: Final = 1008  # the close code of a websocket that exceeds its limit
START_MESSAGES: Final = frozenset(("http.response.start", "websocket.accept", "websocket.http.response.start"))


def add_fields(request_state: RequestState, scope: Scope, receive: Receive, send: Send) -> Send:
    """Return a `send` for the application that adds the header fields to the first message of a response.

    It first settles what depends on the response, so that the client sees the corrected limits.
    The scope must not refer to it: the server's `send` refers to the scope, and a reference cycle per request would
    make the garbage collector cost more than the decision.
    """

    def send_with_fields(message: Message) -> Awaitable[None]:
        # A plain function: cheaper than a coroutine or an object with __call__.
        if message["type"] in START_MESSAGES:
            write = request_state.write
            if write is None:
                return start_response(request_state, scope, receive, send, message)
            message = {**message, "headers": [*message.get("headers", ()), *write(request_state.written)]}
        elif request_state.replaced:
            return ignore()
        elif message["type"] == "websocket.close" and request_state.is_pending:
            return reject_handshake(request_state, scope, receive, send, message)
        return send(message)

    return send_with_fields


async def reject_handshake(
    request_state: RequestState, scope: Scope, receive: Receive, send: Send, message: Message
) -> None:
    """Decide what is pending when the application rejects a websocket; a denial replaces its message."""
    if await decide_pending(scope, receive, add_fields(request_state, scope, receive, send), started=True):
        await send(message)
    else:
        request_state.replaced = True


async def start_response(
    request_state: RequestState, scope: Scope, receive: Receive, send: Send, message: Message
) -> None:
    """Decide what is pending, settle what depends on the response, and start the response with its header fields.

    A response to a request that is denied only now is replaced by the denial.
    """
    if request_state.is_pending:
        with_denial_fields = add_fields(request_state, scope, receive, send)
        if not await decide_pending(scope, receive, with_denial_fields, started=True):
            request_state.replaced = True
            return
    response_charge = request_state.response_charge
    if response_charge is not None:
        response_charge.status = message.get("status", 101)
        if response_charge.settles_at_start:
            request_state.replace_decisions(await run_async(response_charge.settle_at_start_flow(), call))
    await send(with_fields(request_state, message))


def with_fields(request_state: RequestState, message: Message) -> Message:
    """Return the first message of a response with the header fields; nested: the outer middleware adds them."""
    decision = None if request_state.nested else request_state.shown_decision
    if decision is None:
        return message
    fields = request_state.request_limiter.response_writer.raw_fields(decision)
    if not decision:
        fields = fit_to_status(fields, message.get("status", 0))
    return {**message, "headers": [*message.get("headers", ()), *fields]}


async def ignore() -> None:
    """Send nothing."""


async def finish(scope: Scope, request_state: RequestState, *, cancelled: bool = False) -> None:
    """Settle what depends on the response; before, charge what is pending, unless the application was cancelled."""
    try:
        if request_state.is_pending and not cancelled:
            request = make_request(scope, request_state.client)
            await run_async(request_state.charge_flow((), request, tasks=True), call)
    finally:
        if request_state.response_charge is not None:
            await run_async(request_state.response_charge.settle_flow(), call)


async def decide_pending(scope: Scope, receive: Receive, send: Send, *, started: bool = False) -> bool:
    """Decide the pending charges of a request; a denied request gets its response. Returns whether it is allowed."""
    request_state: RequestState = scope[STATE_KEY]
    if not request_state.is_pending or decide_deferred(request_state):
        return True
    request = make_request(scope, request_state.client)
    result = await run_async(request_state.charge_flow((), request, tasks=True), call)
    if result.allowed:
        return True
    response = write_result(result, request, request)
    if started and scope["type"] != "http":
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"})
    else:
        await respond(scope, receive, send, response, [])
    return False


async def respond(scope: Scope, receive: Receive, send: Send, response: Response, fields: RawFields) -> None:
    """Send a complete response, to an HTTP request or to a websocket handshake."""
    headers = [*(RAW_PLAIN_HEADERS if response is PLAIN_DENIAL else raw(response.headers)), *fields]
    if scope["type"] == "http":
        body = b"" if scope["method"] == "HEAD" else response.body
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    await receive()  # websocket.connect
    if "websocket.http.response" in scope.get("extensions", ()):
        await send({"type": "websocket.http.response.start", "status": response.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": response.body})
    else:
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"})


def make_request(scope: Scope, client: RequestClient | None) -> Request:
    """Build the Request that key, count and denial functions receive."""
    method = scope.get("method", "GET")
    address = None if client is None else client.address
    return Request(method, asgi_path(scope), address, scope, lambda name: asgi_header(scope, name))


class ScopeRequests:
    """What the requests of ASGI frameworks have in common: a scope."""

    mapping: Final = attrgetter("scope")

    def sender(self, native: object, mapping: Scope) -> tuple[str | None, Any]:
        """Return the address of the peer, and the headers."""
        del native
        peer = mapping.get("client")
        return peer[0] if peer else None, mapping["headers"]

    def common(self, native: object, mapping: Scope, client: RequestClient) -> Request:
        """Return the Request that is the same for all frameworks."""
        del native
        return make_request(mapping, client)

    def is_websocket(self, native: Any) -> bool:  # noqa: ANN401 - any request
        """Return whether the request opens a WebSocket."""
        return native.scope["type"] == "websocket"  # type: ignore[no-any-return]  # a string
