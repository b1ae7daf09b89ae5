"""Sends responses of ASGI applications: adds the header fields, settles charges, sends denials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.flow import run_async
from tidegate.inbound._limiting.charges import perform_async
from tidegate.inbound._limiting.native_requests import asgi_request
from tidegate.inbound._responses.response import PLAIN_DENIAL, RAW_PLAIN_HEADERS, Response, fit_to_status, raw

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.inbound._limiting.request_state import RequestState

    RawFields = list[tuple[bytes, bytes]]
    Scope = Any  # a mutable mapping; frameworks have different types for it
    Message = Any
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]

POLICY_VIOLATION: Final = 1008  # the close code of a websocket that exceeds its limit
SWITCHING_PROTOCOLS: Final = 101  # the status of a websocket that is accepted
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
            if request_state.is_open or request_state.denied is not None or request_state.raised is not None:
                return start_response(request_state, scope, receive, send, message)
            result = request_state.result
            if result is None or request_state.inner is not None or request_state.nested:
                message = with_fields(request_state, message)
            else:  # the usual case, inlined
                fields = result.prepared.write(result.decisions) if result.before is None else result.write()  # type: ignore[union-attr]  # it has this if it is kept
                message = {**message, "headers": [*message.get("headers", ()), *fields]}
        elif request_state.replaced:
            return ignore()
        elif message["type"] == "websocket.close" and request_state.denied is not None:
            message = {"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"}
        return send(message)

    return send_with_fields


async def start_response(
    request_state: RequestState, scope: Scope, receive: Receive, send: Send, message: Message
) -> None:
    """Settle what depends on the response, and start the response with its header fields.

    If the request was denied and its endpoint was not reached, the denial replaces the response.
    """
    if request_state.denied is not None or request_state.raised is not None:
        request = asgi_request(scope, request_state.address)
        flow = request_state.replacement_flow(message.get("status", 0), request)
        replacement = await run_async(flow, perform_async)
        if replacement is not None:
            await replace_response(replacement, request_state, scope, receive, send)
            return
    if request_state.is_open:
        request, status = (
            asgi_request(scope, request_state.address),
            message.get("status", SWITCHING_PROTOCOLS),
        )
        await run_async(request_state.settle_start_flow(request, status), perform_async)
    await send(with_fields(request_state, message))


async def replace_response(
    response: Response, request_state: RequestState, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the denial of a request in place of the response of the application."""
    request_state.replaced = True
    if scope["type"] == "http":
        decision = None if request_state.nested else request_state.combined_decision
        fields = [] if decision is None else request_state.request_limiter.response_writer.raw_fields(decision)
        await respond(scope, receive, send, response, fit_to_status(fields, response.status))
    else:
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"})


def with_fields(request_state: RequestState, message: Message) -> Message:
    """Return the first message of a response with the header fields."""
    fields = request_state.fields(message.get("status", 0), raw=True)
    return {**message, "headers": [*message.get("headers", ()), *fields]} if fields else message


async def ignore() -> None:
    """Send nothing."""


async def finish(scope: Scope, request_state: RequestState) -> None:
    """Settle what depends on the response, at its end; without a response, the application has failed."""
    if request_state.is_open:
        request = asgi_request(scope, request_state.address)
        await run_async(request_state.settle_flow(request), perform_async)


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
