"""What the result of a denied check says: how long to wait, why, and how many tasks would fit."""

from tests.budget.both_kinds import START
from tidegate.testing import ManualClock


def test_the_wait_for_a_slot_is_unknown(open_budget):
    budget = open_budget(per_minute=20, concurrency=5)
    budget.check_all_limits(4)
    denied = budget.check_all_limits(2)
    assert (denied.tier, denied.wait, denied.retry_after, denied.fits) == ("concurrency", None, None, 1)
    assert denied.reason == "4 of 5 tasks are running: 2 tasks must wait until a running task ends"


def test_the_wait_is_that_of_the_windows_if_slots_are_used_up_too(open_budget):
    budget = open_budget(per_minute=6, concurrency=5)
    budget.check_all_limits(5)
    denied = budget.check_all_limits(3)
    assert (denied.tier, denied.wait, denied.fits) == ("minute", 60.0, 0)
    assert denied.exceeded == ("minute", "concurrency")


def test_the_reason_names_the_reserved_share(open_budget):
    budget = open_budget(per_minute=20, reserved={1: 0.2})
    budget.check_all_limits(10)
    denied = budget.check_all_limits(7)
    assert denied.reason == (
        "10 of 20 tasks per minute are used, and 4 are reserved for priority 1 and above: 7 tasks must wait, "
        "try again in 60.000 s"
    )
    assert denied.fits == 6
    assert budget.check_all_limits(6)


def test_the_reason_names_the_cost_of_the_batch(open_budget):
    budget = open_budget(per_minute=20, costs={"tokens": {"day": 1000}})
    budget.check_all_limits(1, cost={"tokens": 900})
    denied = budget.check_all_limits(4, cost={"tokens": 200})
    assert denied.reason == (
        "900 of 1000 tokens per day are used: 4 tasks for 200 tokens must wait, try again in 86400.000 s"
    )
    assert denied.fits == 2  # each is a quarter of the cost
    never = budget.check_all_limits(1, cost={"tokens": 2000})
    assert never.wait is None
    assert "1 task for 2000 tokens is more than the limit can ever allow" in never.reason


def test_as_many_tasks_fit_as_the_smallest_tier_has_left(open_budget):
    budget = open_budget(per_minute=20, per_day=8, types={"embedding": {"day": 3}})
    assert budget.check_all_limits(30).fits == 8
    assert budget.check_all_limits(5, task_type="embedding").fits == 3
    assert budget.check_all_limits(8).fits == 8


def test_nothing_fits_if_every_check_is_denied(open_budget, path):
    budget = open_budget(per_minute=20, on_store_error="deny", deadline=0.3, clock=ManualClock(start=START))
    budget.check_all_limits(1)
    path.unlink()
    assert budget.check_all_limits(2).fits == 0
