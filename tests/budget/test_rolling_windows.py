"""Rolling windows are exact: compared with a plain list of admitted batches."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget.both_kinds import START
from tidegate.budget import TaskBudget
from tidegate.testing import ManualClock

LENGTHS = {"minute": 60, "hour": 3600, "day": 86_400, "week": 604_800, "month": 2_592_000}
PAUSES = [0, 0.000001, 1, 29.5, 60, 599, 600, 3600, 20_000, 86_400, 300_000, 604_800, 2_000_000]
STEPS = st.lists(
    st.tuples(st.sampled_from(PAUSES), st.integers(1, 12), st.integers(0, 12), st.booleans()), min_size=1, max_size=40
)


class Oracle:
    """A list of everything that counts: for each batch, the time of its check and its tasks."""

    def __init__(self, quotas):
        self.quotas = quotas
        self.entries = []

    def used(self, tier, now):
        return sum(tasks for at, tasks in self.entries if at > now - LENGTHS[tier] * 1_000_000)

    def allows(self, tasks, now):
        return all(self.used(tier, now) + tasks <= quota for tier, quota in self.quotas.items())

    def wait(self, tasks, now):
        """Return the time until the batch fits, which is when an entry expires."""
        if any(tasks > quota for quota in self.quotas.values()):
            return None
        expiries = {at + length * 1_000_000 for at, _ in self.entries for length in LENGTHS.values()}
        return min(then for then in expiries if then > now and self.allows(tasks, then)) - now


@settings(max_examples=60)
@given(STEPS)
def test_usage_denials_and_waits_match_a_plain_list(steps):
    quotas = {"minute": 9, "hour": 14, "day": 20, "week": 28, "month": 40}
    clock, oracle = ManualClock(start=START), Oracle(quotas)
    tiers = {f"per_{tier}": quota for tier, quota in quotas.items()}
    with TaskBudget(**tiers, store="memory://", clock=clock) as budget:
        for pause, tasks, done, checks in steps:
            clock.advance(pause)
            now = clock.ns() // 1000
            if checks:
                allowed = oracle.allows(tasks, now)
                result = budget.check_all_limits(tasks)
                assert result.allowed == allowed
                if allowed:
                    budget.record_completed_tasks(min(done, tasks), result=result)
                    oracle.entries.append((now, min(done, tasks)))
                else:
                    wait = oracle.wait(tasks, now)
                    assert result.wait == (None if wait is None else wait / 1_000_000)
            else:
                budget.record_completed_tasks(done)
                oracle.entries.append((now, done))
            usage = budget.get_current_usage()
            for tier in quotas:
                assert usage[tier].used == oracle.used(tier, now)


def test_a_month_of_more_than_a_hundred_thousand_tasks_is_exact(path):
    clock = ManualClock(start=START)
    with TaskBudget(per_month=120_000, store=path, clock=clock) as budget:
        for _ in range(300):
            assert budget.check_all_limits(400)
            budget.record_completed_tasks(400)
            clock.advance(8640)  # 300 of them are 30 days
        assert budget.get_current_usage()["month"].used == 119_600  # the first batch has just expired
        assert not budget.check_all_limits(401)
        assert budget.check_all_limits(400)
        assert budget.check_all_limits(1).wait == 8640.0
