"""What a decision costs: one entry per call however large, no scan and no copy however long the log."""

from array import array

import pytest

from tests.core.strategies import START
from tidegate import Limit
from tidegate.core import _algorithms as algorithms
from tidegate.core._algorithms import LogEntries, State
from tidegate.core.codec import dump

SECOND = 1_000_000


@pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
def test_a_cost_of_50_000_is_one_entry(algorithm):
    limit = Limit(10**6, "1h", algorithm)
    state = limit.charge(None, limit, 50_000, START)
    assert dump(state) == [START, 50_000]
    assert limit.rules.view(state, limit, 0, START)[0] == 950_000


class CountingArray(array):  # type: ignore[type-arg]  # array takes none at run time
    """Counts how many elements are read, one by one or in slices."""

    reads = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        type(self).reads += len(found) if isinstance(index, slice) else 1
        return CountingArray("q", found) if isinstance(index, slice) else found


@pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
def test_a_decision_on_a_long_log_reads_a_few_entries(algorithm):
    limit = Limit(200_000, "1h", algorithm)
    entries = LogEntries(CountingArray("q", range(START, START + 100_000)), CountingArray("q", range(1, 100_001)))
    state: State | None = (limit, entries, 0, 100_000, 0)
    CountingArray.reads = 0
    for number in range(1000):
        now = START + 100_000 + number
        limit.rules.view(state, limit, 150_000, now)
        state = limit.charge(state, limit, 1, now)
    assert CountingArray.reads < 1000 * 60  # two bisections of 17 steps, and a few looks
    assert state is not None
    assert state[1] is entries, "no copy"


def test_expired_entries_are_dropped_at_a_constant_cost(monkeypatch):
    limit = Limit(1000, "1s", "sliding_log")
    copied, plain = 0, algorithms.LogEntries.trim

    def trim(self, head, tail, base):
        nonlocal copied
        copied += tail - head
        return plain(self, head, tail, base)

    monkeypatch.setattr(algorithms.LogEntries, "trim", trim)
    state, calls = None, 20_000
    for number in range(calls):
        state = limit.charge(state, limit, 1, START + number * 1000)
        assert state is not None
        assert len(state[1].times) <= 2 * 1000 + 2
    assert copied <= calls


def test_a_rarely_used_log_stays_small():
    limit = Limit(5, "1s", "sliding_log")
    state = None
    for number in range(1000):
        state = limit.charge(state, limit, 1, START + number * SECOND)
        assert state is not None
        assert len(state[1].times) <= 34
