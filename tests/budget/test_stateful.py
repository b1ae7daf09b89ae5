"""However batches end, the file counts the same as a plain list.

Batches are recorded at once or in parts, cancelled, never settled, recorded too late, or open when the program ends.
"""

import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from tests.budget.both_kinds import START
from tests.budget.test_rolling_windows import Oracle
from tidegate.budget import TaskBudget
from tidegate.errors import Denied
from tidegate.testing import ManualClock

TTL = 600_000_000
QUOTAS = {"minute": 12, "day": 30}


class ExpectedBatch:
    """An open batch: what is counted of it, how much of that is open, and until when."""

    def __init__(self, handle, at, tasks):
        self.handle = handle
        self.entry = [at, tasks]
        self.left = tasks
        self.ends = at + TTL
        self.closed = False  # returned, or completely recorded in parts

    def settle(self, oracle, done, now):
        if self.closed:
            oracle.entries.append([now, done])
        else:
            self.entry[1] += done - self.left


class Batches(RuleBasedStateMachine):
    checked = Bundle("checked")  # by check_all_limits
    blocks = Bundle("blocks")  # by batch

    def __init__(self):
        super().__init__()
        self.clock = ManualClock(start=START)
        self.oracle = Oracle(QUOTAS)
        self.folder = tempfile.TemporaryDirectory()
        self.open_batches = []
        self.start()

    def start(self):
        path = f"{self.folder.name}/limits.db"
        self.budget = TaskBudget(per_minute=12, per_day=30, batch_ttl=TTL / 1e6, store=path, clock=self.clock)

    def teardown(self):
        self.budget.close()
        self.folder.cleanup()

    @property
    def now(self):
        return self.clock.ns() // 1000

    def open(self, handle, tasks):
        batch = ExpectedBatch(handle, self.now, tasks)
        self.open_batches.append(batch)
        self.oracle.entries.append(batch.entry)
        return batch

    def end(self, batch, done):
        """Settle a batch in the oracle; returns false if it is settled already."""
        if batch not in self.open_batches:
            return False
        self.open_batches.remove(batch)
        batch.settle(self.oracle, done, self.now)
        return True

    @rule(target=checked, tasks=st.integers(1, 6))
    def check(self, tasks):
        allowed = self.oracle.allows(tasks, self.now)
        result = self.budget.check_all_limits(tasks)
        assert result.allowed == allowed
        return self.open(result, tasks) if allowed else multiple()

    @rule(target=blocks, tasks=st.integers(1, 6))
    def enter(self, tasks):
        allowed = self.oracle.allows(tasks, self.now)
        batch = self.budget.batch(tasks)
        try:
            batch.__enter__()
        except Denied:
            assert not allowed
            return multiple()
        assert allowed
        return self.open(batch, tasks)

    @rule(batch=checked, done=st.integers(0, 7))
    def record(self, batch, done):
        if self.end(batch, done):
            self.budget.record_completed_tasks(done, result=batch.handle)

    @rule(batch=checked)
    def cancel(self, batch):
        if self.end(batch, 0):
            self.budget.cancel(batch.handle)

    @rule(batch=blocks, tasks=st.integers(1, 3))
    def record_a_part(self, batch, tasks):
        if batch not in self.open_batches:
            return
        batch.handle.record(tasks)
        if batch.closed:
            self.oracle.entries.append([self.now, tasks])
            return
        batch.entry[1] += max(0, tasks - batch.left)
        batch.left = max(0, batch.left - tasks)
        batch.closed = not batch.left
        batch.ends = self.now + TTL  # its tasks are being processed

    @rule(batch=blocks, succeeded=st.booleans())
    def leave(self, batch, succeeded):
        if batch not in self.open_batches:
            return
        # The whole batch is recorded, unless parts of it were.
        self.end(batch, batch.handle.task_count if succeeded and not batch.handle.completed else 0)
        error = None if succeeded else ValueError()
        batch.handle.__exit__(type(error) if error else None, error, None)

    @rule(seconds=st.sampled_from([0.5, 30, 61, 200, 599, 600, 3600, 90_000]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def restart(self):
        for batch in list(self.open_batches):
            self.end(batch, 0)
            if hasattr(batch.handle, "__exit__"):
                batch.handle.__exit__(ValueError, ValueError(), None)
        self.budget.close()
        self.start()

    @invariant()
    def counts(self):
        for batch in self.open_batches:
            if batch.ends <= self.now and not batch.closed:
                batch.entry[1] -= batch.left
                batch.closed = True
        usage = self.budget.get_current_usage()
        for tier in QUOTAS:
            assert usage[tier].used == self.oracle.used(tier, self.now)


TestBatches = Batches.TestCase
TestBatches.settings = settings(max_examples=30, stateful_step_count=30)
