"""`check(address, category)`: decisions by the configuration without an HTTP request."""

import asyncio
import logging

import pytest

from tests.cases import cases
from tests.inbound.harness import PEER, AsgiHarness, WsgiHarness
from tidegate import ConfigError
from tidegate._runtime.clock import SystemClock

TWO = {"categories": {"read": {"limit": 2, "window": "1m"}}}


@pytest.fixture(params=["check", "check_async"])
def check(request):
    """Call `check` or `check_async` of a limited application."""

    def run(api, *args):
        if request.param == "check":
            return api.limiter.check(*args)
        return asyncio.run(api.limiter.check_async(*args))

    return run


def test_a_check_counts_and_denies_as_the_design_document_says(make_app, check):
    api = make_app()
    first = check(api, "127.0.0.1", "read")
    assert (first.allowed, first.remaining) == (True, 59)
    for _ in range(59):
        check(api, "127.0.0.1", "read")
    denied = check(api, "127.0.0.1", "read")
    assert (denied.allowed, denied.remaining, denied.retry_after) == (False, 0, 60.0)
    assert check(api, "192.168.1.1", "read").allowed
    assert check(api, "127.0.0.1", "expensive").remaining == 4


def test_checks_and_requests_share_their_counts(make_app, check):
    api = make_app(TWO)
    assert check(api, PEER, "read").allowed
    assert api.statuses(2) == [200, 429]
    assert not check(api, PEER, "read")


def test_addresses_of_an_ipv6_network_are_one_client(make_app, check):
    api = make_app(TWO)
    assert [check(api, f"2001:db8::{number}", "read").allowed for number in range(3)] == [True, True, False]


def test_a_check_may_cost_more_than_one(make_app, check):
    api = make_app(TWO)
    assert check(api, PEER, "read", 2).remaining == 0
    with pytest.raises(ConfigError, match="cost"):
        check(api, PEER, "read", -1)


def test_exempt_and_blocked_clients_are_those_of_the_file(make_app, check):
    api = make_app({**TWO, "exempt_clients": [PEER], "blocked_clients": ["198.51.100.7"]})
    assert {check(api, PEER, "read").remaining for _ in range(5)} == {2}
    assert not check(api, "198.51.100.7", "read")


def test_denied_checks_count_for_block_after(make_app, check):
    api = make_app(TWO, block_after="2/1m", block_for="10m")
    assert [check(api, PEER, "read").retry_after for _ in range(5)] == [0.0, 0.0, 60.0, 600.0, 600.0]
    assert api.request().status == 429


def test_disabled_limits_and_shadow_mode_allow_every_check(make_app, check):
    disabled = make_app({**TWO, "enabled": False})
    assert all(check(disabled, PEER, "read") for _ in range(5))
    shadowed = make_app({"categories": {"read": {"limit": 1, "mode": "shadow"}}})
    decisions = [check(shadowed, PEER, "read") for _ in range(2)]
    assert [(each.allowed, len(each.violated)) for each in decisions] == [(True, 0), (True, 1)]


@cases(("unknown", "allowed"), [("allow", True), ("limit", False)])
def test_a_client_without_an_address_is_limited_as_the_option_says(make_app, check, unknown, allowed):
    api = make_app(TWO, unknown=unknown)
    assert [check(api, address, "read").allowed for address in (None, "unknown", None)] == [True, True, allowed]


def test_an_unknown_category_is_an_error_that_names_the_right_one(make_app, check):
    with pytest.raises(ConfigError, match="unknown category 'raed': did you mean 'read'"):
        check(make_app(), PEER, "raed")


def test_a_category_of_concurrent_requests_cannot_be_checked(make_app, check):
    slots = {"limits": ["3/1m concurrency"], "endpoints": ["/slow"]}
    with pytest.raises(ConfigError, match="'slow' limits concurrent requests"):
        check(make_app({"categories": {"slow": slots}}), PEER, "slow")


def test_checks_are_logged_and_observed(make_app, check, caplog):
    caplog.set_level(logging.WARNING)
    records = []
    api = make_app({"categories": {"read": {"limit": 1}}}, observer=records.append)
    check(api, PEER, "read")
    check(api, PEER, "read")
    assert [record.message for record in caplog.records] == [
        "rate limit exceeded: read: 203.0.113.9, retry in 60 s: CHECK read"
    ]
    assert [record.decision.allowed for record in records] == [True, False]


def test_a_changed_file_applies_to_checks(make_app, check, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("rate_limiting: {categories: {read: {limit: 5}}}")
    api = make_app(file)
    assert check(api, PEER, "read").remaining == 4
    file.write_text("rate_limiting: {enabled: false, categories: {read: {limit: 70}}}")
    api.clock.advance(2)
    check(api, PEER, "read")
    assert check(api, PEER, "read").remaining == 70
    file.write_text("rate_limiting: {categories: {read: {limit: 800}}}")
    api.clock.advance(2)
    assert check(api, PEER, "read").remaining == 797  # the counts of the two charged checks remain


def test_each_middleware_refuses_the_check_that_would_block_or_not_wait(tmp_path):
    url = f"sqlite:///{tmp_path}/limits.db"
    threads = WsgiHarness(TWO, store=url, clock=SystemClock())
    tasks = AsgiHarness(TWO, store=url, clock=SystemClock())
    assert threads.limiter.check(PEER, "read").remaining == 1
    assert tasks.runner.run(tasks.limiter.check_async(PEER, "read")).remaining == 0
    with pytest.raises(ConfigError, match="use `await check_async"):
        tasks.limiter.check(PEER, "read")
    with pytest.raises(ConfigError, match="use `check"):
        asyncio.run(threads.limiter.check_async(PEER, "read"))
    threads.close()
    tasks.close()
