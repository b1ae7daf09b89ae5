"""The memory that workers share: rows of counters, messages, and what a process that is killed leaves behind."""

import os
import signal

import pytest

from tests.servers.process import until
from tidegate.service.dashboard.status import ProcessReport, merge_near, merge_store
from tidegate.service.decisions.stats import LATENCY_BUCKETS
from tidegate.service.runtime import shared_memory
from tidegate.service.runtime.shared_memory import CounterArea, SharedMessage, WorkerMemory
from tidegate.service.runtime.worker_stats import SharedStats, add_up, read_totals
from tidegate.service.runtime.workers import SPAWN_CONTEXT
from tidegate.testing import ManualClock


def area(size=2**16):
    return memoryview(bytearray(size))


# ---- counters --------------------------------------------------------------------------------------------------------


def test_a_row_continues_where_the_process_before_has_ended():
    memory = area()
    first = CounterArea(memory).row(("a", "é\ud800"), 2, 5)
    first.write(0, 3)
    first.write(1, 1)
    second = CounterArea(memory).row(("a", "é\ud800"), 2, 9)
    assert (second.start, second.created) == ((3, 1), 5)
    second.write(0, 2)
    assert [(name, list(row.values)) for name, row in CounterArea(memory).rows()] == [(("a", "é\ud800"), [5, 1])]


def test_other_processes_see_new_rows():
    memory = area()
    writer, reader = CounterArea(memory), CounterArea(memory)
    assert list(reader.rows()) == []
    for number in range(50):
        writer.row(("row", str(number)), 1 + number % 3, number).write(0, number)
        assert [row.values[0] for _, row in reader.rows()] == list(range(number + 1))


def test_a_full_area_counts_locally():
    memory = area(4096)
    writer = CounterArea(memory)
    rows = [writer.row(("row", str(number)), 4, 0) for number in range(100)]
    assert writer.full
    rows[-1].write(3, 7)
    assert rows[-1].values[3] == 7
    shared = dict(CounterArea(memory).rows())
    assert 0 < len(shared) < 100
    assert ("row", "99") not in shared


def test_a_row_that_was_not_finished_is_replaced():
    """A process that is killed while it appends a row has not yet changed the number of integers in use."""
    memory = area()
    CounterArea(memory).row(("whole",), 1, 0).write(0, 1)
    used = bytes(memory[:8])
    CounterArea(memory).row(("torn",), 2, 0).write(0, 99)
    memory[:8] = used  # as if the process had been killed before
    row = CounterArea(memory).row(("next",), 1, 0)
    assert row.start == (0,)
    assert [name for name, _ in CounterArea(memory).rows()] == [("whole",), ("next",)]


def test_totals_have_the_same_order_in_every_worker():
    areas = [CounterArea(area()), CounterArea(area())]
    clock = ManualClock()
    stats = [SharedStats(each, clock) for each in areas]
    for worker, policy in [(1, "b"), (0, "c"), (1, "a"), (0, "b"), (1, "c")]:
        clock.advance(1)
        stats[worker].count(policy).allowed += 1
        assert list(read_totals(add_up(areas)).counts)[:1] == ["b"]
        assert list(read_totals(add_up(areas)).counts) == list(read_totals(add_up(areas[::-1])).counts)
    totals = read_totals(add_up(areas))
    assert {name: count.allowed for name, count in totals.counts.items()} == {"b": 2, "c": 2, "a": 1}
    assert list(totals.counts) == ["b", "c", "a"]


def test_all_counts_are_added_and_outlive_a_process():
    areas = [CounterArea(area()), CounterArea(area())]
    for number, part in enumerate((areas[0], areas[1], areas[0]), start=1):  # the third replaces the first
        stats = SharedStats(part, ManualClock())
        count = stats.count("api")
        count.allowed += number
        count.denied += 10 * number
        stats.errors["busy"] += number
        stats.violated["api", "1m"] += number
        stats.last_denied["api"] = {1: 500, 2: 900, 3: 600}[number]
        for _ in range(number):
            stats.latency["acquire"].add(30)
        stats.write_store({"failures": number, "entries": number, "lease_used_requests": number})
        assert (count.allowed, count.shadow, stats.errors["busy"]) == (number, 0, number)  # of this process only
    totals = read_totals(rows := add_up(areas))
    assert (totals.counts["api"].allowed, totals.counts["api"].denied) == (6, 60)
    assert (totals.errors, totals.violated) == ({"busy": 6}, {("api", "1m"): 6})
    assert totals.last_denied == {"api": 900}
    assert (totals.latency["acquire"].total, sum(totals.latency["acquire"].counts)) == (180, 6)
    assert totals.latency["acquire"].counts[LATENCY_BUCKETS.index(50)] == 6
    kept = {name[1]: values[0] for name, values in rows.items() if name[0] == "store"}
    assert kept == {"failures": 6, "lease_used_requests": 6}


def test_current_values_of_stores_are_merged():
    reports = [
        ProcessReport(1, 0, 0, store={"entries": 2, "store_lost": 0, "processes": 3, "failures": 1}),
        ProcessReport(2, 0, 0, store={"entries": 5, "store_lost": 1, "processes": 2, "failures": 1}),
    ]
    assert merge_store(reports, {"failures": 9}) == {"entries": 7, "store_lost": 1, "processes": 3, "failures": 9}


def test_the_last_decision_of_a_key_is_shown_unless_it_was_reset():
    def near(key, used, at):
        return {"policy": "api", "key": key, "used": used, "remaining": 10 - used, "at": at}

    reports = [
        ProcessReport(1, 0, 0, near=[near("a", 9, 100), near("b", 9, 100), near(["x", "y"], 3, 5)]),
        ProcessReport(2, 0, 0, near=[near("a", 2, 200)], reset_keys=[("api", "b", 150), ("api", ["x", "y"], 4)]),
    ]
    assert merge_near(reports) == [near(["x", "y"], 3, 5), near("a", 2, 200)]


# ---- messages --------------------------------------------------------------------------------------------------------


def message(size=64):
    return SharedMessage(memoryview(bytearray(shared_memory.message_bytes(size))))


def test_a_message_is_replaced_as_a_whole():
    it = message()
    assert (it.read(), it.version) == (None, 0)
    for number in range(5):
        text = b"x" * (number * 16)
        assert it.write(text)
        assert (it.read(), it.version) == (text, number + 1)
    assert not it.write(b"y" * 65)
    assert it.read() == b"x" * 64


def test_a_message_that_was_not_finished_is_not_read():
    memory = memoryview(bytearray(shared_memory.message_bytes(64)))
    it = SharedMessage(memory)
    it.write(b"first")
    it.write(b"second")
    memory[shared_memory.HEADER_BYTES + 64 :][:5] = b"torn!"  # the third was begun
    assert SharedMessage(memory).read() == b"second"
    memory[shared_memory.HEADER_BYTES :][:5] = b"wrong"  # a message that is damaged is not read
    assert SharedMessage(memory).read() is None


def count_for_ever(memory, number):
    """Count in a process of its own, until it is killed."""
    row = memory.areas[number].counters.row(("count",), 2, 0)
    value = 0
    while True:
        value += 1
        row.write(0, value)
        memory.areas[number].report.write(b"%d" % value * 1000)
        row.write(1, value)


def test_a_killed_process_loses_nothing():
    memory = WorkerMemory.create(2, 0)
    area = memory.areas[1]
    seen = []
    for killed in range(2):
        process = SPAWN_CONTEXT.Process(target=count_for_ever, args=(memory, 1))
        process.start()
        start = seen[-1] if seen else 0
        until(lambda: (values(area) or (0, 0))[1] > start + 100, "some counts")  # noqa: B023 - called in this iteration
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        before, after = values(area)
        assert 0 <= before - after <= 1 + killed  # each may have been killed between the two
        seen.append(before)
        data = area.report.read()
        assert data is not None
        assert data == data[: len(data) // 1000] * 1000
    assert seen[1] > seen[0] + 100
    assert list(memory.areas[0].counters.rows()) == []
    memory.close()


def values(area):
    return next((tuple(row.values) for _, row in area.counters.rows()), None)


@pytest.mark.parametrize("workers", [1, 256])
def test_unused_memory_is_not_allocated(workers):
    memory = WorkerMemory.create(workers, 0)
    memory.areas[-1].counters.row(("a",), 1, 0).write(0, 1)
    memory.areas[-1].report.write(b"x")
    assert os.fstat(memory._descriptor).st_blocks * 512 < 2**20  # noqa: SLF001 - the size is not visible otherwise
    memory.close()
