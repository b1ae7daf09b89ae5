"""How refusals change the capacity, in the process that was refused and in others."""

import pytest

from tidegate import Limit
from tidegate.outbound._capacity.refusals import Refusals

MINUTE = 60_000_000
INTERVAL = 4 * MINUTE


def refusals():
    return Refusals(Limit(90, "1m", "sliding_log"), INTERVAL)


def test_capacity_is_reduced_to_the_accepted_usage_but_at_most_by_half():
    each = refusals()
    assert each.record(MINUTE, MINUTE, 90, 30, None).value == 45
    assert each.record(MINUTE + 1, MINUTE, 45, 30, None).value == 45  # of the same moment
    assert each.record(2 * MINUTE, 2 * MINUTE, 45, 30, None).value == 30
    assert each.record(3 * MINUTE, 3 * MINUTE, 31, 40, None).value == 30  # at least one fewer than it was
    assert each.record(3 * MINUTE + 1, 3 * MINUTE, 30, 40, None).value == 30


@pytest.mark.parametrize("late", [0, 1_000_000])
def test_a_level_is_held_longer_each_time_by_all_processes(late):
    mine, other = refusals(), refusals()
    now, held = 0, []
    for _ in range(6):
        mine.record(now, now, 31, 30, None)
        other.record_remote(now + late, now, 31 if late else 30, 30)  # a bus may have lowered the capacity before
        steps = next(i for i in range(20) if mine.held_level(now + i * INTERVAL, 31) is None)
        assert steps == next(i for i in range(20) if other.held_level(now + late + i * INTERVAL, 31) is None)
        held.append(steps)
        now += 20 * INTERVAL
    assert held == [0, 1, 2, 4, 8, 8]


def test_a_received_higher_level_changes_nothing():
    each = refusals()
    for now in range(0, 3 * INTERVAL, INTERVAL):
        each.record(now, now, 31, 30, None)
    assert each.held_level(3 * INTERVAL, 31) == 30
    each.record_remote(3 * INTERVAL, 3 * INTERVAL, 30, 60)
    assert each.held_level(3 * INTERVAL, 31) == 30


def test_pauses_double_up_to_a_period_and_earlier_requests_count_once():
    each = refusals()
    now, pauses = 0, []
    for _ in range(8):
        pauses.append(each.record(now, now, 90, 90, None).pause)
        assert each.record(now + 1, now - 1, 90, 90, None).pause == 0
        now += pauses[-1]
    assert pauses == [1_000_000 << min(i, 6) if i < 6 else MINUTE for i in range(8)]
    each.record_success()
    assert each.record(now, now, 90, 90, None).pause == 1_000_000
    assert each.record(now, now, 90, 90, 7.5).pause == 7_500_000
