"""Websockets: a connection attempt is a request; messages are limited if an endpoint names them."""

import pytest

from tests.inbound.harness import only_match, run_websocket
from tidegate.inbound._client.request import by_header
from tidegate.inbound.asgi import RateLimitMiddleware

CONFIG = {
    "categories": {
        "read": {"limit": 2},
        "chat": {"limit": 3, "window": "10s", "endpoints": [{"path": "/ws/{room}", "methods": ["MESSAGE"]}]},
    }
}


async def echo(scope, receive, send):
    """Accept, and echo every message until the client disconnects."""
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept", "headers": [(b"x-app", b"yes")]})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
    await send({"type": "websocket.send", "text": "too late"})


def texts(sent):
    return [message["text"] for message in sent if message["type"] == "websocket.send"]


async def test_a_connection_attempt_is_a_request_and_its_acceptance_has_the_headers(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    accept = (await run_websocket(middleware, []))[0]
    assert accept["type"] == "websocket.accept"
    assert dict(accept["headers"])[b"x-app"] == b"yes"
    assert dict(accept["headers"])[b"x-ratelimit-remaining"] == b"1"


async def test_a_denied_connection_gets_429_if_the_server_supports_it(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    for _ in range(2):
        await run_websocket(middleware, [])
    start, body = await run_websocket(middleware, [], extensions=["websocket.http.response"])
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 429)
    assert dict(start["headers"])[b"retry-after"] == b"60"
    assert body["body"] == b"Rate limit exceeded. Try again later."
    (close,) = await run_websocket(middleware, [])
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


async def test_messages_over_the_limit_close_the_websocket(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    sent = await run_websocket(middleware, ["1", "2", "3", "4", "5"])
    assert texts(sent) == ["1", "2", "3"]
    assert (sent[-1]["type"], sent[-1]["code"]) == ("websocket.close", 1008)  # and nothing after it
    assert (
        texts(await run_websocket(middleware, ["6"])) == []
    )  # the client's messages are counted, not the connection's
    clock.advance(60)
    assert texts(await run_websocket(middleware, ["7"])) == ["7", "too late"]


async def test_messages_over_the_limit_can_be_dropped(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock, on_message="drop")
    assert texts(await run_websocket(middleware, ["1", "2", "3", "4", "5"])) == ["1", "2", "3", "too late"]


async def test_messages_are_not_limited_by_default(clock):
    middleware = RateLimitMiddleware(echo, {"categories": {"read": {"limit": 2}}}, clock=clock)
    assert len(texts(await run_websocket(middleware, [str(n) for n in range(50)]))) == 51
    other = RateLimitMiddleware(echo, CONFIG, clock=clock)
    assert len(texts(await run_websocket(other, [str(n) for n in range(50)], path="/elsewhere"))) == 51


async def test_an_http_method_named_message_does_not_avoid_limits(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    rules = middleware.request_limiter.rules
    assert [only_match(rules, path, "MESSAGE").category.name for path in ("/anything", "/ws/a")] == ["read", "read"]


@pytest.mark.parametrize("path", ["/WS/a", "/ws//a/", "/ws/%61", "/ws/x/../a"])
async def test_other_spellings_of_the_path_do_not_avoid_message_limits(clock, path):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    assert texts(await run_websocket(middleware, ["1", "2", "3", "4"], path=path)) == ["1", "2", "3"]


async def test_charges_that_depend_on_the_response(clock):
    """An accepted websocket is not a failure; a rejected one is."""

    async def reject(scope, receive, send):
        await receive()
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b""})

    config = {"categories": {"read": {"limit": 2, "count": [403]}}}
    middleware = RateLimitMiddleware(echo, config, clock=clock)
    for _ in range(4):
        assert dict((await run_websocket(middleware, []))[0]["headers"])[b"x-ratelimit-remaining"] == b"2"
    rejecting = RateLimitMiddleware(reject, config, clock=clock)
    statuses = [
        (await run_websocket(rejecting, [], extensions=["websocket.http.response"]))[0]["status"] for _ in range(3)
    ]
    assert statuses == [403, 403, 429]


async def test_no_message_reaches_the_application_after_one_over_the_limit(clock):
    reached = []

    async def note(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        reached.extend([(await receive())["type"] for _ in range(8)])

    await run_websocket(RateLimitMiddleware(note, CONFIG, clock=clock), [str(number) for number in range(9)])
    assert reached == ["websocket.receive"] * 3 + ["websocket.disconnect"] * 5


@pytest.mark.parametrize("more", [{"unmatched": None}, {"exempt": ["/ws/{room}"]}, {"exempt_methods": ["GET"]}])
async def test_messages_are_limited_if_connection_attempts_are_not(clock, more):
    chat = {"limit": 3, "window": "10s", "endpoints": [{"path": "/ws/{room}", "methods": ["MESSAGE"]}]}
    middleware = RateLimitMiddleware(echo, {"categories": {"chat": chat}, **more}, clock=clock)
    for _ in range(2):
        sent = await run_websocket(middleware, ["1", "2", "3", "4"])
    assert texts(sent) == []
    assert sent[-1]["code"] == 1008
    assert texts(await run_websocket(middleware, ["1"], peer="198.51.100.7")) == ["1", "too late"]


@pytest.mark.parametrize("unknown", ["allow", "limit"])
async def test_messages_of_exempt_clients_are_not_limited(clock, unknown):
    config = {**CONFIG, "exempt_clients": ["203.0.113.9", "198.51.100.7"]}
    middleware = RateLimitMiddleware(echo, config, clock=clock, unknown=unknown)
    for peer in ("203.0.113.9", "198.51.100.7"):
        assert len(texts(await run_websocket(middleware, [str(number) for number in range(9)], peer=peer))) == 10


async def test_messages_are_limited_by_the_custom_key(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock, key=by_header("x-tenant"))
    for tenant in (b"ann", b"bob"):
        sent = await run_websocket(middleware, ["1", "2", "3", "4"], headers=[(b"x-tenant", tenant)])
        assert texts(sent) == ["1", "2", "3"]


async def test_admin_actions_apply_to_messages_of_open_websockets(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    limiter = middleware.request_limiter
    limiter.allowed_clients.add("203.0.113.9", limiter.now() + 10**9, limiter.now())
    limiter.update_special()
    assert len(texts(await run_websocket(middleware, [str(number) for number in range(9)]))) == 10
    limiter.allowed_clients.remove("203.0.113.9")

    async def blocked_meanwhile(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        limiter.blocked_clients.add("203.0.113.9", limiter.now() + 10**9, limiter.now())
        assert (await receive())["type"] == "websocket.disconnect"

    middleware.app = blocked_meanwhile
    assert (await run_websocket(middleware, ["1"]))[-1]["code"] == 1008


async def test_a_message_with_two_readings_is_charged_to_both_or_to_none(clock):
    endpoints = {"jobs": (2, "/jobs/*"), "chat": (5, "/ws")}
    categories = {
        name: {"limit": limit, "window": "1h", "endpoints": [{"path": path, "methods": ["MESSAGE"]}]}
        for name, (limit, path) in endpoints.items()
    }
    middleware = RateLimitMiddleware(echo, {"categories": categories}, clock=clock, on_message="drop")
    assert texts(await run_websocket(middleware, list("123"), path="/jobs/../ws")) == ["1", "2", "too late"]
    assert texts(await run_websocket(middleware, list("1234"), path="/ws")) == ["1", "2", "3", "too late"]
