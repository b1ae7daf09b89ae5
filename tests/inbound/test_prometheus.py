"""Prometheus metrics: their values, and that clients cannot create labels."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tidegate import Limiter, Policy
from tidegate.observe.prometheus import PrometheusObserver, StoreCollector
from tidegate.testing import ManualClock


@pytest.fixture
def registry():
    return CollectorRegistry()


def value(registry, metric, **labels):
    return registry.get_sample_value(metric, labels)


def test_requests_by_category_and_outcome(make_app, registry):
    config = {"categories": {"read": {"limit": 2, "mode": "shadow"}, "expensive": {"limits": ["1/1m", "9/1h"]}}}
    api = make_app(config, observer=PrometheusObserver(registry))
    StoreCollector(api.limiter.store, registry)
    api.statuses(3, "/api/feeds")
    api.statuses(3, "/api/cluster")
    assert value(registry, "tidegate_decisions_total", policy="read", outcome="allowed") == 2
    assert value(registry, "tidegate_decisions_total", policy="read", outcome="shadow") == 1
    assert value(registry, "tidegate_decisions_total", policy="expensive", outcome="denied") == 2
    assert value(registry, "tidegate_denials_total", policy="expensive", limit="expensive-1m") == 2
    assert value(registry, "tidegate_denials_total", policy="expensive", limit="expensive-1h") is None
    assert value(registry, "tidegate_remaining_ratio_count", policy="read") == 3
    assert value(registry, "tidegate_remaining_ratio_sum", policy="read") == 0.5
    assert value(registry, "tidegate_last_denied_timestamp_seconds", policy="expensive") == 1_728_000_000
    assert value(registry, "tidegate_store", name="entries") == 2


def test_clients_and_paths_create_no_labels(make_app, registry):
    api = make_app(observer=PrometheusObserver(registry))
    api.request()
    before = len(generate_latest(registry).splitlines())
    for number in range(300):
        api.request(f"/{number}", peer=f"198.51.{number // 256}.{number % 256}")
    assert len(generate_latest(registry).splitlines()) == before


def test_the_number_of_policy_labels_is_bounded(registry):
    observer = PrometheusObserver(registry, max_policies=3)
    for number in range(50):
        limiter = Limiter(Policy(f"p{number}", ("1/1m",)), clock=ManualClock(), observer=observer)
        limiter.try_acquire("a")
        limiter.try_acquire("a")
        limiter.peek("a")
        limiter.close()
    assert value(registry, "tidegate_decisions_total", policy="p2", outcome="allowed") == 1
    assert value(registry, "tidegate_decisions_total", policy="p3", outcome="allowed") is None
    assert value(registry, "tidegate_decisions_total", policy="other", outcome="allowed") == 47
    assert value(registry, "tidegate_denials_total", policy="other", limit="other") == 47
