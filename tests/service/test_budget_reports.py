"""`tidegate start` with a budget: the metrics of the document, and its status in the health endpoints."""

from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import serving
from tidegate.budget import TaskBudget

DOCUMENTED = {
    "rate_limit_current_usage": "gauge",
    "rate_limit_max_allowed": "gauge",
    "rate_limit_window_reset_seconds": "gauge",
    "rate_limit_exceeded": "counter",
    "rate_limit_check_duration_seconds": "histogram",
}


@pytest.fixture
def variables(tmp_path):
    return {
        "RATE_LIMIT_PER_MINUTE": "20",
        "RATE_LIMIT_PER_DAY": "500",
        "RATE_LIMIT_STORAGE_PATH": str(tmp_path / "budget.db"),
    }


def test_metrics_and_health_of_a_budget(tmp_path, variables):
    with (
        closing(TaskBudget(per_minute=20, per_day=500, store=variables["RATE_LIMIT_STORAGE_PATH"])) as budget,
        serving(tmp_path, "policies: {api: 2/1h}\n", "--budget", "true", **variables) as service,
    ):
        budget.record_completed_tasks(25)
        families = {family.name: family for family in text_string_to_metric_families(service.get("/metrics").text)}
        assert {name: families[name].type for name in DOCUMENTED} == DOCUMENTED
        used = {sample.labels["period"]: sample.value for sample in families["rate_limit_current_usage"].samples}
        assert used == {"minute": 25, "day": 25}
        assert "tidegate_decisions" in families
        for path in ("/healthz", "/readyz"):
            health = service.get(path).json()
            assert health["ok"]
            assert (health["budget"]["status"], health["budget"]["exhausted"]) == ("limited", ["minute"])
            assert health["budget"]["database"]["connected"]


@pytest.mark.slow
def test_every_worker_reports_the_budget(tmp_path, variables):
    flags = ("--budget", "true", "--workers", "3", "--store", f"sqlite:///{tmp_path / 'limits.db'}?deadline=20s")
    with (
        closing(TaskBudget(per_minute=20, per_day=500, store=variables["RATE_LIMIT_STORAGE_PATH"])) as budget,
        serving(tmp_path, "policies: {api: 2/1h}\n", *flags, **variables) as service,
    ):
        budget.record_completed_tasks(25)
        for _ in range(30):  # each is a new connection, which any worker may accept
            assert 'rate_limit_current_usage{period="day"} 25' in service.get("/metrics").text
            assert service.get("/healthz").json()["budget"]["status"] in ("limited", "unknown")
            assert service.get("/v1/overview").json()["panels"]["budgets"][0]["tiers"][0]["used"] == 25
        assert service.stop() == 0


def test_a_lost_database_is_reported_and_does_not_fail_the_probes(tmp_path, variables):
    with ValkeyServer() as server:
        variables["RATE_LIMIT_STORAGE_PATH"] = server.url
        with serving(tmp_path, "policies: {api: 2/1h}\n", "--budget", "true", **variables) as service:
            until(lambda: service.get("/healthz").json()["budget"]["status"] == "ok", "the first report")
            server.kill()
            until(lambda: service.get("/readyz").json()["budget"]["status"] == "degraded", "the loss is reported")
            assert service.get("/healthz").json()["budget"]["database"]["connected"] is False
            assert "rate_limit_database_up 0" in service.get("/metrics").text


def test_a_service_without_a_budget_reports_none(tmp_path):
    with serving(tmp_path, "policies: {api: 2/1h}\n") as service:
        assert service.get("/healthz").json() == {"ok": True}
        assert service.get("/readyz").json() == {"ok": True, "state": "ready"}
        assert "rate_limit_" not in service.get("/metrics").text
