"""Prometheus metrics: their values, and that clients cannot create labels."""

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.inbound.servers import serving
from tests.servers.process import until
from tidegate import ConfigError, Limiter, Policy
from tidegate.observe.prometheus import PrometheusObserver, StoreCollector, worker_registry
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


def test_the_number_of_clients_by_category(make_app, registry):
    api = make_app()
    StoreCollector(api.limiter, registry, metric="tidegate_clients")
    for peer in ("203.0.113.1", "203.0.113.2", "203.0.113.1"):
        api.request(peer=peer)
    api.request("/api/cluster")
    counts = {name: value(registry, "tidegate_clients", name=name) for name in ("read", "expensive", "moderately")}
    assert counts == {"read": 2, "expensive": 1, "moderately": 0}
    api.clock.advance(60)  # the window of `read` ends
    assert [value(registry, "tidegate_clients", name=name) for name in ("read", "expensive")] == [0, 1]


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


def ask_both(url, replies, workers):
    """Send a request; return whether both workers have answered, and one of them a denial."""
    replies.append(httpx.get(f"{url}/page", trust_env=False))
    workers.add(replies[-1].headers["x-worker"])
    return len(workers) > 1 and replies[-1].status_code == 429


def test_several_workers_add_up_their_metrics(tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    more = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "STORE": f"sqlite:///{tmp_path / 'limits.db'}"}
    with serving("uvicorn", "metrics_site:app", "--workers", "2", **more) as url:
        replies, workers = [], set()
        until(lambda: ask_both(url, replies, workers), "a response of each worker")
        for _ in range(4):  # whichever worker answers
            lines = httpx.get(f"{url}/metrics/", trust_env=False).text.splitlines()
            counts = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
            statuses = [reply.status_code for reply in replies]
            assert counts['tidegate_decisions_total{outcome="allowed",policy="pages"}'] == statuses.count(200)
            assert counts['tidegate_decisions_total{outcome="denied",policy="pages"}'] == statuses.count(429)
            assert 'tidegate_last_denied_timestamp_seconds{policy="pages"}' in counts
    assert len(workers) == 2


def test_one_process_uses_its_registry(registry, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert worker_registry(registry) is registry
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/no/such/folder")
    with pytest.raises(ConfigError, match="PROMETHEUS_MULTIPROC_DIR: '/no/such/folder' is not a folder"):
        worker_registry(registry)
