"""Several instances share one budget in any store: together they admit as much as one would."""

import asyncio

import pytest

from tests.budget.both_kinds import KINDS, BlockingBudget, used
from tests.budget.polling import wait_until
from tests.servers.valkey import ValkeyServer


@pytest.fixture(scope="module")
def redis_url():
    with ValkeyServer() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "redis", "postgresql"])
def storage(request, path):
    if request.param == "sqlite":
        return str(path)
    return request.getfixturevalue("redis_url" if request.param == "redis" else "postgres_url")


@pytest.fixture(params=["threads", "tasks"])
def instances(request, storage):
    """Open instances of one budget, with the clock of the server."""
    opened = []
    with asyncio.Runner() as runner:

        def start(**options):
            options = {"store": storage, "name": request.node.name, **options}
            kind = KINDS[request.param]
            opened.append(
                kind(**options) if request.param == "threads" else BlockingBudget(runner, lambda: kind(**options))
            )
            return opened[-1]

        yield start
        for budget in opened:
            budget.close()


def test_instances_share_a_budget(instances):
    settings = {"per_hour": 100, "per_month": 1000, "costs": {"tokens": {"day": 5000}}}
    one, other = instances(**settings), instances(**settings)
    assert one.check_all_limits(60, cost={"tokens": 3000})
    denied = other.check_all_limits(60, cost={"tokens": 1000})
    assert (denied.tier, denied.current_usage["hour"]) == ("hour", 60)
    assert not other.check_all_limits(1, cost={"tokens": 2001})
    assert other.check_all_limits(40, cost={"tokens": 2000})
    one.record_completed_tasks(50, cost={"tokens": 2500})
    other.record_completed_tasks(40)
    expected = {"hour": 90, "month": 90, "day:tokens": 4500}
    assert used(one) == used(other) == expected
    other.record_completed_tasks(30)  # not reserved, and beyond the quota
    assert one.get_current_usage()["hour"].remaining == 0
    assert one.get_current_usage()["month"].used == 120


def test_permits_that_an_instance_returns_are_free_for_others(instances):
    one, other = instances(per_hour=100), instances(per_hour=100)
    with one.batch(30):
        one.check_all_limits(20)
        assert used(other) == {"hour": 50}
        one.cancel()
        assert used(other) == {"hour": 30}
    one.check_all_limits(70)
    assert not other.check_all_limits(1)
    one.close()
    assert other.check_all_limits(70)


def test_fixed_windows_and_health_are_shared(instances):
    one, other = (instances(per_day=100, per_month=500, strategy="fixed") for _ in range(2))
    one.record_completed_tasks(100)
    assert other.check_all_limits(1).tier == "day"
    health = other.health()
    assert (health["status"], health["database"]["connected"]) == ("limited", True)
    assert other.reset_expired_windows() == 0


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_tasks_recorded_while_redis_is_down_are_charged_later(kind):
    settings = {"per_minute": 20, "per_day": 100}  # a stopped server refuses connections at once
    with ValkeyServer(None, "--appendonly", "yes", "--appendfsync", "always") as server, asyncio.Runner() as runner:
        budget_type = KINDS[kind]
        budget = (
            budget_type(**settings, store=server.url)
            if kind == "threads"
            else BlockingBudget(runner, lambda: budget_type(**settings, store=server.url))
        )
        reserved = budget.check_all_limits(10)
        server.kill()
        admitted = budget.check_all_limits(10)
        assert (admitted.allowed, admitted.local) == (True, True)
        assert budget.check_all_limits(1).tier == "minute"
        budget.record_completed_tasks(8, result=reserved)
        budget.record_completed_tasks(9, result=admitted)
        assert budget.backlog == 2
        server.start()
        wait_until(lambda: not budget.lost and not budget.backlog, "the budget caught up")
        assert used(budget) == {"minute": 17, "day": 17}
        budget.close()
