"""Reloading config.yaml in a running application."""

import os

import pytest

from tests.inbound.harness import run_websocket
from tests.servers.process import free_port
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.testing import ManualClock


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    written = []

    def write(text):
        path.write_text(text, encoding="utf-8")
        written.append(text)
        os.utime(path, ns=(len(written), len(written)))  # two writes within a tick of the file system's clock differ
        return path

    write.path = path
    return write


def limits(number, name="read"):
    return f"rate_limiting:\n  categories:\n    {name}:\n      limit: {number}\n"


def test_a_changed_file_takes_effect_within_a_second(make_app, config):
    api = make_app(config(limits(3)))
    assert api.request()["x-ratelimit-limit"] == "3"
    config(limits(9))
    assert api.request()["x-ratelimit-limit"] == "3"
    api.clock.advance(1)
    api.request()
    assert api.request()["x-ratelimit-limit"] == "9"


def test_a_reload_keeps_the_usage(make_app, config):
    api = make_app(config(limits(10)))
    api.statuses(6)
    config(limits(8))
    api.clock.advance(1)
    api.request()
    reply = api.request()
    assert (reply["x-ratelimit-limit"], reply["x-ratelimit-remaining"]) == ("8", "0")
    assert api.request().status == 429


@pytest.mark.parametrize("text", ["", "# rate_limiting:\n"], ids=["empty", "only a comment"])
def test_a_file_that_an_editor_has_emptied_does_not_mean_the_default_limits(make_app, config, caplog, text):
    path = config(limits(3))
    api = make_app(path)
    api.request()
    config(text)
    api.clock.advance(1)
    assert [api.request()["x-ratelimit-limit"] for _ in range(2)] == ["3", "3"]
    assert f"{path}:1: is empty: expected rate_limiting, with its settings" in caplog.text
    config(limits(9))
    api.clock.advance(1)
    assert [api.request()["x-ratelimit-limit"] for _ in range(2)] == ["3", "9"]


def test_an_invalid_file_is_logged_with_its_position_and_the_previous_rules_stay(make_app, config, caplog):
    path = config(limits(3))
    api = make_app(path)
    api.request()
    config(limits("many"))
    api.clock.advance(1)
    assert [api.request()["x-ratelimit-limit"] for _ in range(2)] == ["3", "3"]
    expected = f"{path}:4: rate_limiting.categories.read.limit: expected an integer of at least 1, not 'many'"
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in errors] == [f"rules not reloaded, the previous rules stay active: {expected}"]
    api.clock.advance(5)
    api.request()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1  # logged once
    config(limits(4))
    api.clock.advance(1)
    api.request()
    assert api.request(peer="198.51.100.1")["x-ratelimit-limit"] == "4"


def test_a_missing_file_keeps_the_previous_rules(make_app, config, caplog):
    path = config(limits(3))
    api = make_app(path)
    api.request()
    path.unlink()
    api.clock.advance(1)
    assert [api.request().status for _ in range(2)] == [200, 200]
    assert "cannot be read" in caplog.text
    config(limits(5))
    api.clock.advance(1)
    api.request()
    assert api.request(peer="198.51.100.1")["x-ratelimit-limit"] == "5"


def test_categories_can_be_added_and_removed(make_app, config):
    api = make_app(config(limits(3)))
    api.request("/login")
    config("rate_limiting:\n  categories:\n    login: {limit: 2, endpoints: [/login]}\n  max_entries: 7\n")
    api.clock.advance(1)
    api.request("/login")
    assert [api.request("/login")["x-ratelimit-limit"] for _ in range(2)] == ["2", "2"]
    assert api.limiter.store.metrics()["max_entries"] == 7
    config("rate_limiting: {enabled: false}\n")
    api.clock.advance(1)
    api.request("/login")
    assert "x-ratelimit-limit" not in api.request("/login").headers
    config(limits(3))
    api.clock.advance(1)
    api.request("/login")
    assert api.request("/login")["x-ratelimit-limit"] == "3"  # enabled again


def test_changed_exempt_clients_take_effect(make_app, config):
    api = make_app(config("rate_limiting: {categories: {read: {limit: 1}}}\n"))
    assert api.statuses(2) == [200, 429]
    config("rate_limiting: {exempt_clients: [203.0.113.9], categories: {read: {limit: 1}}}\n")
    api.clock.advance(1)
    api.request()
    assert api.statuses(3) == [200] * 3


def test_a_category_that_the_count_option_names_cannot_be_removed(make_app, config, caplog):
    api = make_app(
        config("rate_limiting: {categories: {login: {limit: 2, endpoints: [/login]}}}\n"),
        count={"login": lambda *_: True},
    )
    api.request("/login")
    config("rate_limiting: {}\n")
    api.clock.advance(1)
    api.request("/login")
    assert api.request("/login")["x-ratelimit-limit"] == "2"
    assert "unknown category 'login'" in caplog.text


# ---- one set of rules per request ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(10, 3), (3, 10)])
def test_the_response_to_the_request_that_finds_a_new_file_uses_one_set_of_rules(make_app, config, before, after):
    api = make_app(config(limits(before)))
    api.request()
    config(limits(after))
    api.clock.advance(1)
    reply = api.request()
    assert (reply["x-ratelimit-limit"], reply.remaining) == (str(before), before - 2)
    reply = api.request()
    assert (reply["x-ratelimit-limit"], reply.remaining) == (str(after), after - 3)


def test_the_status_of_a_denial_is_that_of_the_rules_that_denied_it(make_app, config):
    """Without the store, a denial is a 503: the limits of the denial are compared with those of the rules."""
    api = make_app(config(limits(1)), store=f"redis://127.0.0.1:{free_port()}")
    config(limits(5))
    assert [api.request().status for _ in range(2)] == [503, 503]


def test_a_reload_keeps_the_statistics(make_app, config):
    api = make_app(config(limits(2)))
    api.statuses(3)
    config(limits(9))
    api.clock.advance(1)
    api.statuses(2)
    read = api.limiter.category_limiters["read"]
    assert (read.allowed, read.denied_requests, list(read.last_decisions)) == (3, 2, ["203.0.113.9"])


async def test_a_reload_applies_to_the_messages_of_an_open_websocket(config):
    chat = "rate_limiting:\n  categories: {chat: {limit: %d, endpoints: [{path: /ws/*, methods: [MESSAGE]}]}}\n"
    clock = ManualClock(start=1_728_000_000)
    received = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message["text"])
            if message["text"] == "1":
                config(chat % 3)
                clock.advance(1)

    middleware = RateLimitMiddleware(app, config(chat % 9), clock=clock)
    await run_websocket(middleware, list("123456"))
    await middleware.close()
    assert received == ["1", "2", "3"]
