"""Throttle classes for Django REST Framework: client addresses, the setting TIDEGATE, logs, and a real server."""

import logging
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from django.test import override_settings

from tests.inbound.drf_views import FRAMEWORK, START, get, settings_for, statuses, user, view_of
from tests.inbound.servers import serving
from tidegate import ConfigError
from tidegate.testing import ManualClock

# These read the settings when they are imported.
from rest_framework.test import APIRequestFactory  # isort: skip

from tidegate.inbound import drf, wsgi  # isort: skip


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture(autouse=True)
def _settings(clock):
    with settings_for(clock):
        yield


# ---- client addresses ------------------------------------------------------------------------------------------------


def with_proxies(number):
    rates = {"DEFAULT_THROTTLE_RATES": {"anon": "1/day"}, "NUM_PROXIES": number}
    return override_settings(REST_FRAMEWORK={**FRAMEWORK, **rates})


@pytest.mark.parametrize(
    ("number", "first", "second", "expected"),
    [
        (0, "10.0.0.1, 10.0.0.2", "10.9.9.9", 429),
        (1, "10.0.0.1, 10.0.0.2", "10.9.9.9, 10.0.0.2", 429),
        (1, "10.0.0.1, 10.0.0.2", "10.0.0.1, 10.0.0.7", 200),
        (2, "10.0.0.1, 10.0.0.2", "10.9.9.9, 10.0.0.1, 10.0.0.2", 429),
        (2, "10.0.0.1, 10.0.0.2", "10.0.0.7, 10.0.0.2", 200),
        (3, "10.0.0.1", "10.0.0.1", 429),
        (1, "garbage", "other garbage", 429),
    ],
)
def test_as_many_proxies_are_trusted_as_num_proxies(number, first, second, expected):
    with with_proxies(number):
        view = view_of(drf.AnonRateThrottle)
        assert get(view, HTTP_X_FORWARDED_FOR=first)[0] == 200
        assert get(view, HTTP_X_FORWARDED_FOR=second)[0] == expected


def test_without_proxies_the_header_is_ignored_with_a_warning(caplog):
    """REST Framework uses the whole header as the address, so that any client can avoid the limit."""
    drf._throttling._warned = False  # noqa: SLF001 - once per process
    with with_proxies(None), caplog.at_level(logging.WARNING, "tidegate.inbound"):
        view = view_of(drf.AnonRateThrottle)
        assert [get(view, HTTP_X_FORWARDED_FOR=f"10.0.0.{host}")[0] for host in range(3)] == [200, 429, 429]
    assert [record.getMessage() for record in caplog.records].count(
        "throttles ignore X-Forwarded-For, because clients can forge it: set NUM_PROXIES of REST_FRAMEWORK or "
        "trusted_proxies of TIDEGATE"
    ) == 1


def test_trusted_proxies_may_be_given_by_address(clock):
    with override_settings(TIDEGATE={"clock": clock, "trusted_proxies": ["10.0.0.0/8"]}), with_proxies(None):
        view = view_of(drf.AnonRateThrottle)
        assert get(view, peer="10.0.0.1", HTTP_X_FORWARDED_FOR="198.51.100.7")[0] == 200
        assert get(view, peer="10.0.0.1", HTTP_X_FORWARDED_FOR="1.1.1.1, 198.51.100.7")[0] == 429
        assert get(view, peer="203.0.113.9", HTTP_X_FORWARDED_FOR="198.51.100.7")[0] == 200


def test_an_ipv6_client_is_its_network():
    view = view_of(drf.AnonRateThrottle)
    assert [get(view, peer=f"2001:db8::{host}")[0] for host in (1, 2, 3)] == [200, 200, 429]


# ---- settings, logs, store -------------------------------------------------------------------------------------------


def test_requests_without_an_address_follow_the_rule_of_the_middlewares(clock, caplog):
    view = view_of(drf.AnonRateThrottle)
    assert statuses(view, 4, peer="") == [200] * 4
    assert "requests without a client address are allowed without limits" in caplog.text
    assert statuses(view_of(drf.UserRateThrottle), 4, user(1), peer="") == [200, 200, 200, 429]
    with override_settings(TIDEGATE={"unknown": "limit", "clock": clock}):
        assert statuses(view, 3, peer="") == [200, 200, 429]


def test_an_unknown_option_is_an_error():
    with override_settings(TIDEGATE={"stroe": "memory://"}), pytest.raises(ConfigError, match="unknown option 'stroe'"):
        get(view_of(drf.AnonRateThrottle))


def test_a_denial_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "tidegate.inbound"):
        statuses(view_of(drf.AnonRateThrottle), 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "drf/anon" in caplog.text
    assert "GET /" in caplog.text


def test_an_observer_sees_each_decision(clock):
    seen = []
    with override_settings(TIDEGATE={"clock": clock, "observer": seen.append}):
        statuses(view_of(drf.AnonRateThrottle), 3)
    assert [(record.policy.name, record.decision.allowed) for record in seen] == [
        ("drf/anon/1m", True),
        ("drf/anon/1m", True),
        ("drf/anon/1m", False),
    ]


def test_a_middleware_in_front_shows_the_tightest_limit(clock):
    view = view_of(drf.AnonRateThrottle)

    def site(environ, start_response):
        request = APIRequestFactory().get("/", REMOTE_ADDR="203.0.113.9", tidegate=environ["tidegate"])
        response = view(request)
        start_response(f"{response.status_code} x", list(response.items()))
        return [b""]

    app = wsgi.RateLimitMiddleware(site, {"categories": {"read": {"limit": 60}}}, clock=clock)
    sent = []
    for _ in range(3):
        app({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "203.0.113.9"}, lambda *a: sent.append(a))
    assert [(status, dict(fields)["X-RateLimit-Remaining"]) for status, fields in sent] == [
        ("200 x", "1"),
        ("200 x", "0"),
        ("429 x", "0"),
    ]


def test_what_a_throttle_denies_is_not_charged_to_the_middleware_in_front(clock):
    view = view_of(drf.AnonRateThrottle)

    def site(environ, start_response):
        response = view(APIRequestFactory().get("/", REMOTE_ADDR="203.0.113.9", tidegate=environ["tidegate"]))
        start_response(f"{response.status_code} x", list(response.items()))
        return [b""]

    app = wsgi.RateLimitMiddleware(site, {"categories": {"read": {"limit": 60}}}, clock=clock)
    sent = []
    for _ in range(5):
        app({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "203.0.113.9"}, lambda *a: sent.append(a[0]))
    assert sent == ["200 x", "200 x", "429 x", "429 x", "429 x"]
    assert app.request_limiter.category_limiters["read"].limiter.peek("203.0.113.9", 0).remaining == 58


@pytest.mark.parametrize(("on_store_error", "expected"), [("deny", (429, "1")), ("allow", (200, None))])
def test_a_lost_store_is_answered_as_configured(clock, on_store_error, expected):
    with override_settings(TIDEGATE={"store": "redis://127.0.0.1:1", "on_store_error": on_store_error}):
        assert get(view_of(drf.AnonRateThrottle, drf.UserRateThrottle)) == expected


def test_concurrent_requests_to_a_real_server_get_exactly_the_quota(tmp_path):
    """In REST Framework, requests that read the history at the same time are all admitted."""
    store = f"sqlite:///{tmp_path}/limits.db"
    with (
        serving("gunicorn", "drf_site:app", "--workers", "2", TIDEGATE_STORE=store) as url,
        httpx.Client(timeout=60) as client,
    ):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: client.get(f"{url}/upload"), range(24)))
        assert sorted(response.status_code for response in found) == [200] * 5 + [429] * 19
        waits = {int(response.headers["retry-after"]) for response in found if response.status_code == 429}
        assert all(3500 < wait <= 3600 for wait in waits)
        assert client.get(f"{url}/plain").status_code == 200, "the denied requests used nothing of the day"
