"""Throttle classes for Django REST Framework: the behaviour of its own, and exact where its own are not."""

from types import SimpleNamespace

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from tests.inbound.drf_views import FRAMEWORK, START, get, settings_for, statuses, user, view_of
from tidegate import ConfigError, Limit
from tidegate.stores._memory.store import MemoryStore
from tidegate.testing import ManualClock

# These read the settings when they are imported.
from rest_framework.throttling import BaseThrottle  # isort: skip
from rest_framework.views import APIView  # isort: skip

from tidegate.inbound import drf  # isort: skip


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture(autouse=True)
def _settings(clock):
    with settings_for(clock):
        yield


# ---- as REST Framework does ------------------------------------------------------------------------------------------


def test_anonymous_requests_are_limited_by_address():
    view = view_of(drf.AnonRateThrottle)
    assert statuses(view, 3) == [200, 200, 429]
    assert statuses(view, 1, peer="198.51.100.1") == [200]


def test_the_anonymous_rate_does_not_apply_to_users():
    assert statuses(view_of(drf.AnonRateThrottle), 5, user(1)) == [200] * 5


def test_users_are_limited_by_their_key_wherever_they_are():
    view = view_of(drf.UserRateThrottle)
    assert [get(view, user(1), peer=f"203.0.113.{host}")[0] for host in range(4)] == [200, 200, 200, 429]
    assert statuses(view, 1, user(2)) == [200]
    assert statuses(view, 4) == [200, 200, 200, 429], "without a user, by address"


def test_a_view_is_limited_by_its_scope():
    x, y = view_of(drf.ScopedRateThrottle, scope="x"), view_of(drf.ScopedRateThrottle, scope="y")
    assert statuses(x, 4) == [200, 200, 200, 429]
    assert statuses(y, 2) == [200, 429]


def test_views_with_one_scope_share_a_count():
    views = [view_of(drf.ScopedRateThrottle, scope="x") for _ in range(2)]
    assert [get(views[number % 2])[0] for number in range(4)] == [200, 200, 200, 429]


def test_a_view_without_a_scope_is_not_limited():
    assert statuses(view_of(drf.ScopedRateThrottle), 10) == [200] * 10


def test_a_rate_of_none_is_no_limit():
    assert statuses(view_of(drf.ScopedRateThrottle, scope="none"), 10) == [200] * 10


def test_an_unknown_scope_is_an_error():
    with pytest.raises(ImproperlyConfigured, match="No default throttle rate set for 'z' scope"):
        get(view_of(drf.ScopedRateThrottle, scope="z"))


def test_a_throttle_without_scope_and_rate_is_an_error():
    class Throttle(drf.SimpleRateThrottle):
        pass

    with pytest.raises(ImproperlyConfigured, match=r"set either `\.scope` or `\.rate`"):
        Throttle()


@pytest.mark.parametrize("rate", ["some rate", "5/fortnight", "/day", "5", 5])
def test_an_invalid_rate_is_an_error_that_names_the_scope(rate):
    throttle = type("Throttle", (drf.UserRateThrottle,), {"rate": rate})
    with pytest.raises(ConfigError, match="rate of scope 'user'"):
        throttle()


def test_get_cache_key_can_be_overridden():
    class ByTenant(drf.SimpleRateThrottle):
        rate = "1/min"
        scope = "tenant"

        def get_cache_key(self, request, view):
            return request.META.get("HTTP_X_TENANT")

    view = view_of(ByTenant)
    assert statuses(view, 2, HTTP_X_TENANT="a") == [200, 429]
    assert statuses(view, 1, HTTP_X_TENANT="b") == [200]
    assert statuses(view, 5) == [200] * 5, "None is not limited"


def test_the_base_class_needs_get_cache_key():
    throttle = type("Throttle", (drf.SimpleRateThrottle,), {"rate": "1/min"})()
    with pytest.raises(NotImplementedError):
        throttle.get_cache_key(None, None)


def test_the_default_cache_key_is_that_of_rest_framework():
    request = SimpleNamespace(user=user(7))
    assert drf.UserRateThrottle().get_cache_key(request, None) == "throttle_user_7"


def test_parse_rate_can_be_overridden():
    class Weekly(drf.UserRateThrottle):
        rate = "two a week"

        def parse_rate(self, rate):
            return 2, 7 * 86_400

    assert [get(view_of(Weekly)) for _ in range(3)] == [(200, None), (200, None), (429, "604800")]


@pytest.mark.parametrize(
    ("rate", "parsed"), [("3/sec", (3, 1)), ("5/m", (5, 60)), ("100/day", (100, 86_400)), (None, (None, None))]
)
def test_parse_rate_returns_requests_and_seconds(rate, parsed):
    assert drf.UserRateThrottle().parse_rate(rate) == parsed


def test_a_timer_can_be_replaced():
    class Throttle(drf.UserRateThrottle):
        rate = "1/min"
        seconds = 0

        def timer(self):
            return self.seconds

    view = view_of(Throttle)
    assert [get(view), get(view)] == [(200, None), (429, "60")]
    Throttle.seconds = 60
    assert get(view) == (200, None)


def test_a_throttle_of_another_package_keeps_its_own_decision():
    class Never(BaseThrottle):
        def allow_request(self, request, view):
            return False

    assert get(view_of(Never, drf.UserRateThrottle)) == (429, None)


# ---- exact -----------------------------------------------------------------------------------------------------------


class Burst(drf.UserRateThrottle):
    rate = "3/sec"


class Sustained(drf.UserRateThrottle):
    rate = "6/min"


def test_the_period_ends_to_the_second(clock):
    view = view_of(drf.AnonRateThrottle)
    statuses(view, 2)
    clock.advance(59.5)
    assert get(view) == (429, "1")
    clock.advance(0.5)
    assert get(view) == (200, None)


def test_retry_after_is_the_time_of_the_next_permit(clock):
    view = view_of(drf.AnonRateThrottle)
    get(view)
    clock.advance(20)
    get(view)
    assert get(view) == (429, "40"), "REST Framework would say 40 as well"
    clock.advance(10)
    assert get(view) == (429, "30")


@pytest.mark.parametrize("classes", [(Burst, Sustained), (Sustained, Burst)], ids=["burst-first", "burst-last"])
def test_a_denied_request_is_charged_to_no_throttle_of_the_view(clock, classes):
    """In REST Framework, requests that the first throttle denies use up the second."""
    view = view_of(*classes)
    assert statuses(view, 20) == [200] * 3 + [429] * 17
    clock.advance(1)
    assert statuses(view, 3) == [200] * 3, "the 17 denied requests used nothing of the minute"
    assert get(view) == (429, "59")


def test_retry_after_is_the_longest_of_those_that_deny(clock):
    view = view_of(Burst, Sustained)
    statuses(view, 3)
    assert get(view) == (429, "1")
    clock.advance(1)
    statuses(view, 3)
    assert get(view) == (429, "59")


def test_a_throttle_that_is_not_the_reason_returns_no_wait(clock):
    asked = []

    class Watched(Sustained):
        def allow_request(self, request, view):
            allowed = super().allow_request(request, view)
            asked.append((allowed, self.wait()))
            return allowed

    view = view_of(Burst, Watched)
    statuses(view, 4)
    assert asked[-1] == (True, None)


def test_all_throttles_of_a_view_are_one_call_of_the_store(clock):
    calls = []

    class Store(MemoryStore):
        def apply(self, verb, asks, now=None, at=None):
            calls.append((verb, [policy.name for policy, _, _ in asks]))
            return super().apply(verb, asks, now, at)

    with override_settings(TIDEGATE={"store": Store(clock=clock)}):
        assert statuses(view_of(drf.AnonRateThrottle, Burst, Sustained, drf.ScopedRateThrottle, scope="x"), 1) == [200]
    assert calls == [("acquire", ["drf/anon/1m", "drf/user/1s", "drf/user/1m", "drf/x/1m"])]


def test_throttles_with_the_same_count_charge_it_once():
    view = view_of(drf.UserRateThrottle, drf.UserRateThrottle, drf.ScopedRateThrottle, scope="user")
    assert statuses(view, 4) == [200, 200, 200, 429]


def test_two_limits_that_would_share_a_count_are_an_error():
    class Stricter(drf.UserRateThrottle):
        rate = "1/min"

    with pytest.raises(ImproperlyConfigured, match="scope 'user' and the limits 3/1m sliding_log and 1/1m sliding_log"):
        get(view_of(drf.UserRateThrottle, Stricter))


def test_an_overridden_allow_request_decides_whether_a_throttle_applies():
    class WritesOnly(drf.ScopedRateThrottle):
        def allow_request(self, request, view):
            return request.META.get("HTTP_X_FREE") == "yes" or super().allow_request(request, view)

    view = view_of(drf.UserRateThrottle, WritesOnly, scope="y")
    assert statuses(view, 2, HTTP_X_FREE="yes") == [200, 200]
    assert statuses(view, 2) == [200, 429]


def test_a_throttle_that_asks_for_something_else_is_decided_by_itself():
    scopes = iter("xyxyxyxy")

    class Alternating(drf.ScopedRateThrottle):
        def allow_request(self, request, view):
            view.throttle_scope = next(scopes)  # "x" when it is asked, "y" when it decides
            return super().allow_request(request, view)

    assert statuses(view_of(drf.UserRateThrottle, Alternating), 2) == [200, 429]
    assert statuses(view_of(drf.UserRateThrottle), 2) == [200, 429], "each request was charged to the user once"


def test_check_throttles_called_again_charges_again():
    class Twice(APIView):
        def check_throttles(self, request):
            super().check_throttles(request)
            super().check_throttles(request)

    view = view_of(Sustained, Burst, base=Twice)
    assert statuses(view, 2) == [200, 429]


def test_allow_request_called_again_charges_again():
    request = SimpleNamespace(user=user(1), META={"REMOTE_ADDR": "203.0.113.9"}, method="GET", path="/")
    throttle = drf.UserRateThrottle()
    assert [throttle.allow_request(request, object()) for _ in range(4)] == [True, True, True, False]
    assert throttle.wait() == 60.0


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("2/30s", [200, 200, 429]),
        ("10/1m token_bucket burst=2", [200, 200, 429]),
        (Limit(1, "1h", "fixed_window"), [200, 429, 429]),
        (["2/1m", "1/1h"], [200, 429, 429]),
        ("1/month", [200, 429, 429]),
    ],
    ids=str,
)
def test_a_rate_may_be_any_limit(rate, expected):
    throttle = type("Throttle", (drf.UserRateThrottle,), {"rate": rate})
    assert statuses(view_of(throttle), 3) == expected


def test_a_changed_rate_refills_nothing():
    assert statuses(view_of(drf.ScopedRateThrottle, scope="x"), 3) == [200] * 3
    changed = {**FRAMEWORK, "DEFAULT_THROTTLE_RATES": {"x": "4/min"}}
    with override_settings(REST_FRAMEWORK=changed):
        assert statuses(view_of(drf.ScopedRateThrottle, scope="x"), 2) == [200, 429]
