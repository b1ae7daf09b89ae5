"""Metrics: names, scrapes by Prometheus, alert rules, and the queries of the dashboard."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from tests.budget.polling import wait_until
from tests.budget.prometheus import prometheus, promtool
from tidegate.budget import TaskBudget
from tidegate.budget.alerts import _metrics as module
from tidegate.budget.prometheus import BudgetCollector

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules" / "budget.rules.yml"
USAGE = "(rate_limit_current_usage / rate_limit_max_allowed) * 100"


@pytest.fixture
def registry():
    return CollectorRegistry()


def read(registry):
    text = generate_latest(registry).decode()
    return {
        (sample.name, sample.labels.get("period", sample.labels.get("le"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_and_labels_match_the_specification(open_budget, registry, clock):
    budget = open_budget(per_minute=20, per_day=500, costs={"tokens": {"day": 9000}}, concurrency=5)
    registry.register(BudgetCollector(getattr(budget, "budget", budget)))
    budget.check_all_limits(5, cost={"tokens": 1800})
    budget.record_completed_tasks(4, cost={"tokens": 1500})
    budget.check_all_limits(30)
    clock.advance(10)
    metrics = read(registry)
    assert metrics["rate_limit_current_usage", "minute"] == metrics["rate_limit_current_usage", "day"] == 4
    assert metrics["rate_limit_current_usage", "day:tokens"] == 1500
    assert metrics["rate_limit_current_usage", "concurrency"] == 0
    assert metrics["rate_limit_max_allowed", "minute"] == 20
    assert metrics["rate_limit_window_reset_seconds", "minute"] == 50
    assert metrics["rate_limit_exceeded_total", "minute"] == 1
    assert metrics["rate_limit_exceeded_total", "day"] == 0
    assert metrics["rate_limit_check_duration_seconds_count", None] == 2
    assert metrics["rate_limit_check_duration_seconds_bucket", "+Inf"] == 2
    assert metrics["rate_limit_record_duration_seconds_count", None] == 1
    assert metrics["rate_limit_database_up", None] == 1
    assert metrics["rate_limit_tasks_recorded_total", None] == 4
    assert metrics["rate_limit_tasks_returned_total", None] == 1


def test_durations_are_logged_for_debugging(open_budget, caplog):
    caplog.set_level("DEBUG", "tidegate.budget")
    budget = open_budget(per_minute=20)
    budget.check_all_limits(5)
    budget.record_completed_tasks(4)
    budget.check_all_limits(30)
    figures = [record.getMessage() for record in caplog.records if " took " in record.getMessage()]
    check, record, denied = (re.sub(r"\d+\.\d{3} ms", "N ms", figure) for figure in figures)
    assert check == "checking 5 tasks took N ms: allowed"
    assert record == "recording 4 tasks took N ms"
    assert denied == "checking 30 tasks took N ms: denied"


def test_every_metric_is_in_the_module_docstring(open_budget, registry):
    budget = open_budget(per_minute=20)
    registry.register(BudgetCollector(getattr(budget, "budget", budget)))
    docstring = str(module.__doc__)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name in docstring


def test_prometheus_scrapes_the_metrics(tmp_path, path, clock, registry):
    with TaskBudget(per_minute=20, per_hour=100, per_day=500, store=path, clock=clock) as budget:
        registry.register(BudgetCollector(budget))
        promtool("check", "metrics", text=generate_latest(registry))
        budget.check_all_limits(15)
        budget.record_completed_tasks(15)
        clock.advance(18)
        server, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            with prometheus(tmp_path, server.server_port, RULES) as scraped:
                wait_for_values(scraped, USAGE, {"minute": 75.0, "hour": 15.0, "day": 3.0})
                wait_for_values(
                    scraped, "rate_limit_window_reset_seconds", {"minute": 42.0, "hour": 3582.0, "day": 86_382.0}
                )
                for _ in range(6):
                    budget.check_all_limits(10)
                rates = "rate(rate_limit_exceeded_total[5m])"
                wait_until(lambda: scraped.query(rates).get("minute", 0) > 0, "denials were scraped")
                wait_for_values(scraped, "rate_limit_exceeded_total", {"minute": 6.0, "hour": 0.0, "day": 0.0})
                for expression in ("rate_limit:usage:percent", *dashboard_queries()):
                    wait_until(
                        lambda expression=expression: scraped.query(expression),
                        f"the query {expression} returns something",
                    )
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def wait_for_values(scraped, expression, expected):
    """Poll, because a late scrape on a busy machine leaves a gap."""
    wait_until(lambda: scraped.query(expression) == expected, f"{expression} returns {expected}")


def dashboard_queries():
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "budget.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_has_the_queries_of_the_specification():
    assert {USAGE, "rate_limit_window_reset_seconds", "rate(rate_limit_exceeded_total[5m])"} <= set(dashboard_queries())


@pytest.mark.slow
def test_the_alert_rules_pass_their_tests():
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULES.parents[1] / "budget.rules.test.yml")


def test_the_forecast_is_a_metric(open_budget, registry, clock):
    budget = open_budget(per_hour=100, per_day=120, per_month=100_000, costs={"tokens": {"day": 9000}}, concurrency=5)
    registry.register(BudgetCollector(getattr(budget, "budget", budget)))
    budget.record_completed_tasks(60)
    name = "rate_limit_exhausted_in_seconds"
    ends = {period: value for (metric, period), value in read(registry).items() if metric == name}
    pace = 60 / 3600
    assert ends.keys() == {"hour", "day", "month", "day:tokens"}
    assert ends["day"] == pytest.approx(60 / (pace - 60 / 86_400))
    assert ends["hour"] == ends["day:tokens"] == float("inf")
    budget.record_completed_tasks(60)
    assert read(registry)[name, "day"] == 0
