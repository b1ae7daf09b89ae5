"""`reset_time: next`: X-RateLimit-Reset is the time of the next permit."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.harness import HARNESSES, PEER, START, AsgiHarness, WsgiHarness
from tests.servers.valkey import ValkeyServer
from tidegate import ConfigError, StoreUnavailable
from tidegate.inbound import starlette
from tidegate.stores._memory.store import MemoryStore
from tidegate.testing import ManualClock
from tidegate.testing._reference import ReferenceStore

SECOND = 1_000_000
ALGORITHMS = ("sliding_log", "sliding_window", "fixed_window", "token_bucket", "calendar_window")
PERIODS = {"sliding_log": "7s", "sliding_window": "10s", "fixed_window": "9s", "token_bucket": "8s"}


def limit_of(algorithm, quota):
    return f"{quota}/{PERIODS.get(algorithm, 'minute')} {algorithm}"


def config_of(limits, **more):
    return {"categories": {"api": {"limits": limits, "endpoints": ["/one"], **more}}}


COSTS = {"endpoints": ["/one", {"path": "/two", "cost": 2}]}


class Oracle:
    """The core alone, charged with the same requests; it can be asked about any later instant."""

    def __init__(self, api):
        self.store, self.clock = ReferenceStore(), api.clock
        self.policy = api.limiter.category_limiters["api"].policy

    @property
    def now(self):
        return self.clock.ns() // 1000

    def charge(self, cost):
        return self.store.apply("acquire", [(self.policy, PEER, self.policy.costs(cost))], self.now)[0]

    def allows_one(self, instant):
        return self.store.apply("peek", [(self.policy, PEER, self.policy.one)], max(instant, self.now))[0].allowed


def check_reply(reply, oracle, cost):
    expected = oracle.charge(cost)
    assert (reply.status == 200) == expected.allowed
    reset = int(reply["x-ratelimit-reset"]) * SECOND
    if min(view[0] for view in expected.views):
        assert reset == -(-oracle.now // SECOND) * SECOND
    else:
        assert oracle.allows_one(reset)
        assert not oracle.allows_one(reset - SECOND)


limits_strategy = st.lists(
    st.tuples(st.sampled_from(ALGORITHMS), st.integers(2, 5)), min_size=1, max_size=3, unique_by=lambda pair: pair[0]
)
steps_strategy = st.lists(
    st.tuples(st.integers(0, 6 * SECOND) | st.sampled_from([0, SECOND]), st.sampled_from([1, 1, 2])), max_size=30
)


@cases("harness", HARNESSES)
@given(limits=limits_strategy, steps=steps_strategy)
def test_one_more_request_is_allowed_at_the_shown_time_and_not_a_second_before(harness, limits, steps):
    api = harness(config_of([limit_of(*each) for each in limits], **COSTS), reset_time="next")
    oracle = Oracle(api)
    for advance, cost in steps:
        api.clock.advance(advance / SECOND)
        check_reply(api.request("/one" if cost == 1 else "/two"), oracle, cost)
    api.close()


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@cases("harness", HARNESSES)
@cases("algorithm", ALGORITHMS)
def test_stores_that_do_not_return_states_show_the_next_permit_too(valkey, harness, algorithm):
    store = f"{valkey.url}?prefix={harness.__name__}-{algorithm}"
    api = harness(config_of([limit_of(algorithm, 3)], **COSTS), store=store, reset_time="next")
    oracle = Oracle(api)
    for advance, cost in [(0, 1), (1.3, 2), (0.4, 1), (0, 2), (2.9, 1), (4.1, 1), (0.2, 2), (0, 1)]:
        api.clock.advance(advance)
        check_reply(api.request("/one" if cost == 1 else "/two"), oracle, cost)
    api.close()


def test_the_last_permit_shows_when_the_first_returns(make_app):
    api = make_app(config_of(["2/1m"]), reset_time="next")
    assert api.request("/one")["x-ratelimit-reset"] == str(START)  # one is left
    api.clock.advance(20)
    assert api.request("/one")["x-ratelimit-reset"] == str(START + 60)
    denied = api.request("/one")
    assert (denied.status, denied["retry-after"], denied["x-ratelimit-reset"]) == (429, "40", str(START + 60))


def test_the_default_shows_when_the_whole_limit_is_available(make_app):
    for options in ({}, {"reset_time": "full"}):
        api = make_app(config_of(["2/1m"]), **options)
        api.request("/one")
        api.clock.advance(20)
        assert api.request("/one")["x-ratelimit-reset"] == str(START + 80)


def test_the_file_sets_it_and_the_option_takes_precedence(make_app):
    config = {**config_of(["1/1m", "5/1h"]), "reset_time": "next"}
    assert make_app(config).request("/one")["x-ratelimit-reset"] == str(START + 60)
    config = {**config_of(["5/1h"]), "reset_time": "next"}
    assert make_app(config).request("/one")["x-ratelimit-reset"] == str(START)
    assert make_app(config, reset_time="full").request("/one")["x-ratelimit-reset"] == str(START + 3600)


def test_a_reload_changes_it(make_app, tmp_path: Path):
    file = tmp_path / "config.yaml"
    text = "rate_limiting: {categories: {api: {limits: [5/1h], endpoints: [/one]}}%s}"
    file.write_text(text % "")
    api = make_app(file)
    assert api.request("/one")["x-ratelimit-reset"] == str(START + 3600)
    file.write_text(text % ", reset_time: next")
    assert api.limiter.reload() is None
    assert api.request("/one")["x-ratelimit-reset"] == str(START)
    file.write_text(text % "")
    assert api.limiter.reload() is None
    assert api.request("/one")["x-ratelimit-reset"] == str(START + 3600)


@cases("style", ["x", "both", {"reset": "X-Next"}])
def test_every_style_with_the_header_shows_it(make_app, style):
    api = make_app(config_of(["2/1m", "9/1h"]), headers=style, reset_time="next")
    api.request("/one")
    api.clock.advance(20)
    reply = api.request("/one")
    assert reply["x-next" if isinstance(style, dict) else "x-ratelimit-reset"] == str(START + 60)
    if style == "both":
        assert reply["ratelimit"] == '"api-1m";r=0;t=60, "api-1h";r=7;t=3600'  # as without the option


def test_a_refunded_request_shows_what_is_left_then(make_app):
    api = make_app(config_of(["2/1m"], refund=["5xx"]), reset_time="next")
    api.request("/one")
    api.clock.advance(20)
    failed = api.request("/one", headers=[("x-status", "500")])
    assert (failed.status, failed["x-ratelimit-reset"]) == (500, str(START + 20))
    assert api.request("/one")["x-ratelimit-reset"] == str(START + 60)


def test_limits_of_routes_show_it():
    @starlette.limit("2/1m")
    async def page(request):
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/page", page)])
    api = AsgiHarness({"categories": {"api": {"limits": ["9/1h"], "endpoints": ["/page"]}}}, app=app, reset_time="next")
    assert api.request("/page")["x-ratelimit-reset"] == str(START)
    api.clock.advance(20)
    assert api.request("/page")["x-ratelimit-reset"] == str(START + 60)
    assert api.request("/page")["x-ratelimit-reset"] == str(START + 60)
    api.close()


def test_a_closed_category_has_no_next_permit(make_app):
    closed = config_of(["0/1m"])
    assert make_app(closed, reset_time="next").request("/one").fields == make_app(closed).request("/one").fields


def test_another_value_is_rejected(make_app):
    with pytest.raises(ConfigError, match="reset_time: must be one of full, next, not 'soon'"):
        make_app(reset_time="soon")
    with pytest.raises(ConfigError, match="reset_time: expected full or next, not 'soon'"):
        make_app({"reset_time": "soon"})


class FailingPeeks(MemoryStore):
    """A store whose peeks raise an error."""

    error: BaseException | None = None

    def apply(self, verb, asks, now=None, *args, **options):
        if verb == "peek" and self.error is not None:
            raise self.error
        return super().apply(verb, asks, now, *args, **options)

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        return self.apply(verb, [(policy, key, costs)], now, at)[0]


def test_without_an_answer_of_the_store_the_whole_limit_is_shown():
    clock = ManualClock(start=START)
    store = FailingPeeks(clock=clock)
    api = WsgiHarness(config_of(["1/1m"]), clock=clock, store=store, reset_time="next")
    store.error = StoreUnavailable("no answer")
    reply = api.request("/one")
    assert (reply.status, reply["x-ratelimit-reset"]) == (200, str(START + 60))
    api.close()


def test_a_request_that_is_interrupted_while_the_store_is_asked_is_refunded():
    clock = ManualClock(start=START)
    store = FailingPeeks(clock=clock)
    api = WsgiHarness(config_of(["1/1m"]), clock=clock, store=store, reset_time="next")
    store.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        api.request("/one")
    store.error = None
    assert api.statuses(2, "/one") == [200, 429]
    api.close()
