"""Websockets: connects are requests, messages are limited where the configuration says so."""

import pytest

from tests.inbound.harness import only_match, talk
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.inbound.client.request import by_header
from tidegate.testing import ManualClock

CONFIG = {
    "categories": {
        "read": {"limit": 2},
        "chat": {"limit": 3, "window": "10s", "endpoints": [{"path": "/ws/{room}", "methods": ["MESSAGE"]}]},
    }
}


async def echo(scope, receive, send):
    """Accept, and send every message back until the other end goes."""
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept", "headers": [(b"x-app", b"yes")]})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
    await send({"type": "websocket.send", "text": "too late"})


def texts(sent):
    return [message["text"] for message in sent if message["type"] == "websocket.send"]


@pytest.fixture
def clock():
    return ManualClock(start=1_728_000_000)


async def test_a_connect_is_a_request_and_its_acceptance_carries_the_fields(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    accept = (await talk(middleware, []))[0]
    assert accept["type"] == "websocket.accept"
    assert dict(accept["headers"])[b"x-app"] == b"yes"
    assert dict(accept["headers"])[b"x-ratelimit-remaining"] == b"1"


async def test_a_connect_too_many_is_answered_with_429_where_the_server_can(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    for _ in range(2):
        await talk(middleware, [])
    start, body = await talk(middleware, [], extensions=["websocket.http.response"])
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 429)
    assert dict(start["headers"])[b"retry-after"] == b"60"
    assert body["body"] == b"Rate limit exceeded. Try again later."
    (close,) = await talk(middleware, [])
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


async def test_messages_too_many_close_the_websocket(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    sent = await talk(middleware, ["1", "2", "3", "4", "5"])
    assert texts(sent) == ["1", "2", "3"]
    assert (sent[-1]["type"], sent[-1]["code"]) == ("websocket.close", 1008)  # and nothing after it
    assert texts(await talk(middleware, ["6"])) == []  # the client's messages are counted, not the connection's
    clock.advance(60)
    assert texts(await talk(middleware, ["7"])) == ["7", "too late"]


async def test_messages_too_many_can_be_dropped(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock, on_message="drop")
    assert texts(await talk(middleware, ["1", "2", "3", "4", "5"])) == ["1", "2", "3", "too late"]


async def test_messages_are_not_limited_unless_the_configuration_says_so(clock):
    middleware = RateLimitMiddleware(echo, {"categories": {"read": {"limit": 2}}}, clock=clock)
    assert len(texts(await talk(middleware, [str(n) for n in range(50)]))) == 51
    other = RateLimitMiddleware(echo, CONFIG, clock=clock)
    assert len(texts(await talk(other, [str(n) for n in range(50)], path="/elsewhere"))) == 51


async def test_an_http_method_called_message_is_no_way_around(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    rules = middleware.guard.rules
    assert [only_match(rules, path, "MESSAGE").category.name for path in ("/anything", "/ws/a")] == ["read", "read"]


@pytest.mark.parametrize("path", ["/WS/a", "/ws//a/", "/ws/%61", "/ws/x/../a"])
async def test_no_way_around_by_writing_the_path_differently(clock, path):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    assert texts(await talk(middleware, ["1", "2", "3", "4"], path=path)) == ["1", "2", "3"]


async def test_charges_that_depend_on_the_answer(clock):
    """An accepted websocket is not a failure; one that the application refuses is."""

    async def refuse(scope, receive, send):
        await receive()
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b""})

    config = {"categories": {"read": {"limit": 2, "count": [403]}}}
    middleware = RateLimitMiddleware(echo, config, clock=clock)
    for _ in range(4):
        assert dict((await talk(middleware, []))[0]["headers"])[b"x-ratelimit-remaining"] == b"2"
    refusing = RateLimitMiddleware(refuse, config, clock=clock)
    statuses = [(await talk(refusing, [], extensions=["websocket.http.response"]))[0]["status"] for _ in range(3)]
    assert statuses == [403, 403, 429]


async def test_after_a_message_too_many_no_further_one_reaches_the_application(clock):
    reached = []

    async def note(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        reached.extend([(await receive())["type"] for _ in range(8)])

    await talk(RateLimitMiddleware(note, CONFIG, clock=clock), [str(number) for number in range(9)])
    assert reached == ["websocket.receive"] * 3 + ["websocket.disconnect"] * 5


@pytest.mark.parametrize("more", [{"unmatched": None}, {"exempt": ["/ws/{room}"]}, {"exempt_methods": ["GET"]}])
async def test_messages_are_limited_where_connects_are_not(clock, more):
    chat = {"limit": 3, "window": "10s", "endpoints": [{"path": "/ws/{room}", "methods": ["MESSAGE"]}]}
    middleware = RateLimitMiddleware(echo, {"categories": {"chat": chat}, **more}, clock=clock)
    for _ in range(2):
        sent = await talk(middleware, ["1", "2", "3", "4"])
    assert texts(sent) == []
    assert sent[-1]["code"] == 1008
    assert texts(await talk(middleware, ["1"], peer="198.51.100.7")) == ["1", "too late"]


@pytest.mark.parametrize("unknown", ["allow", "limit"])
async def test_messages_of_exempt_clients_are_not_limited(clock, unknown):
    config = {**CONFIG, "exempt_clients": ["203.0.113.9", "198.51.100.7"]}
    middleware = RateLimitMiddleware(echo, config, clock=clock, unknown=unknown)
    for peer in ("203.0.113.9", "198.51.100.7"):
        assert len(texts(await talk(middleware, [str(number) for number in range(9)], peer=peer))) == 10


async def test_messages_go_by_the_key_that_the_application_chooses(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock, key=by_header("x-tenant"))
    for tenant in (b"ann", b"bob"):
        sent = await talk(middleware, ["1", "2", "3", "4"], headers=[(b"x-tenant", tenant)])
        assert texts(sent) == ["1", "2", "3"]


async def test_orders_of_the_operator_hold_for_messages_of_open_websockets(clock):
    middleware = RateLimitMiddleware(echo, CONFIG, clock=clock)
    guard = middleware.guard
    guard.allowed_clients.add("203.0.113.9", guard.now() + 10**9, guard.now())
    guard.update_special()
    assert len(texts(await talk(middleware, [str(number) for number in range(9)]))) == 10
    guard.allowed_clients.remove("203.0.113.9")

    async def blocked_meanwhile(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        guard.blocked_clients.add("203.0.113.9", guard.now() + 10**9, guard.now())
        assert (await receive())["type"] == "websocket.disconnect"

    middleware.app = blocked_meanwhile
    assert (await talk(middleware, ["1"]))[-1]["code"] == 1008


async def test_a_message_with_two_readings_is_charged_to_both_or_to_none(clock):
    endpoints = {"jobs": (2, "/jobs/*"), "chat": (5, "/ws")}
    categories = {
        name: {"limit": limit, "window": "1h", "endpoints": [{"path": path, "methods": ["MESSAGE"]}]}
        for name, (limit, path) in endpoints.items()
    }
    middleware = RateLimitMiddleware(echo, {"categories": categories}, clock=clock, on_message="drop")
    assert texts(await talk(middleware, list("123"), path="/jobs/../ws")) == ["1", "2", "too late"]
    assert texts(await talk(middleware, list("1234"), path="/ws")) == ["1", "2", "3", "too late"]
