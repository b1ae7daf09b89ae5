"""Usage above a limit is reported as it is: by the budget, its metrics and the command, in every store."""

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry

from tests.budget.both_kinds import KINDS, BlockingBudget
from tests.budget.test_shared import redis_url, storage  # noqa: F401 - fixtures
from tests.cases import cases
from tidegate import Limit, Limiter
from tidegate._cli import main
from tidegate.budget.prometheus import BudgetCollector

ALGORITHMS = ["token_bucket", "fixed_window", "sliding_window", "sliding_log", "calendar_window"]


@pytest.fixture(params=["threads", "tasks"])
def open_shared(request, storage):  # noqa: F811 - the fixture
    """Open budgets with the same name in a store, with the clock of the store."""
    opened = []
    with asyncio.Runner() as runner:

        def start(**options):
            options = {"store": storage, "name": request.node.name, **options}
            kind = KINDS[request.param]
            budget = kind(**options) if request.param == "threads" else BlockingBudget(runner, lambda: kind(**options))
            opened.append(budget)
            return budget

        yield start
        for budget in opened:
            budget.close()


@pytest.mark.parametrize("strategy", ["rolling", "fixed"])
def test_more_tasks_recorded_than_the_limit_allows(open_shared, strategy):
    budget = open_shared(per_day=2, per_month=100, strategy=strategy)
    budget.record_completed_tasks(5)
    usage = budget.get_current_usage()
    assert (usage["day"].used, usage["day"].quota, usage["day"].remaining) == (5, 2, 0)
    assert usage["month"].used == 5
    denied = budget.check_all_limits(1)
    assert denied.current_usage == {"day": 5, "month": 5}
    assert denied.reason.startswith("5 of 2 tasks per day are used")
    assert budget.snapshot()["day"].used == 5
    assert budget.health()["tiers"]["day"]["used"] == 5
    registry = CollectorRegistry()
    registry.register(BudgetCollector(getattr(budget, "budget", budget)))
    assert registry.get_sample_value("rate_limit_current_usage", {"period": "day"}) == 5


@pytest.mark.parametrize("strategy", ["rolling", "fixed"])
def test_a_lowered_limit_reports_what_was_used_before(open_shared, strategy):
    open_shared(per_day=10, strategy=strategy).record_completed_tasks(8)
    usage = open_shared(per_day=5, strategy=strategy).get_current_usage()
    assert (usage["day"].used, usage["day"].quota, usage["day"].remaining) == (8, 5, 0)


def test_the_command_shows_usage_above_the_limit(open_budget, path, monkeypatch, capsys):
    open_budget(per_day=2, clock=None).record_completed_tasks(5)
    monkeypatch.setenv("RATE_LIMIT_PER_DAY", "2")
    monkeypatch.setenv("RATE_LIMIT_STORAGE_PATH", str(path))
    assert main(["budget"]) == 0
    assert " 5   2  250 %" in capsys.readouterr().out
    assert main(["budget", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"]["day"]["used"] == 5


@cases("algorithm", ALGORITHMS)
def test_the_usage_of_a_limiter_is_above_its_limit(algorithm, storage, request):  # noqa: F811 - the fixture
    url = storage if "://" in storage else f"sqlite:///{storage}"
    assert_reports_usage_above_its_limit(algorithm, url, request.node.name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_usage_in_memory_is_above_its_limit(algorithm):
    assert_reports_usage_above_its_limit(algorithm, "memory://", "p")


def assert_reports_usage_above_its_limit(algorithm, store, name):
    period = "day" if algorithm == "calendar_window" else "1h"
    with Limiter(Limit(10, period, algorithm, name="l"), store=store, name=name) as limiter:
        reservation = limiter.reserve("k", 8)
        reservation.commit(15)
        assert limiter.usage("k")["l"][1:3] == (15, 0)
        assert limiter.usage("other")["l"][1:3] == (0, 10)
        if algorithm != "token_bucket":  # a bucket keeps what is available
            limiter.update(Limit(5, period, algorithm, name="l"))
            assert limiter.usage("k")["l"][:3] == (5, 15, 0)
