"""The memory that workers share: rows of counters, messages, and what a process that is killed leaves behind."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers.process import until
from tidegate.observe._counters import CopiedCounts, Counters, RowKind
from tidegate.service._dashboard.status import STORE, ProcessReport, merge_near, merge_store
from tidegate.service._decisions.stats import LAST_DENIED, LATENCY_BUCKETS, Stats
from tidegate.service._runtime import shared_memory
from tidegate.service._runtime.shared_memory import CounterArea, SharedCounters, SharedMessage, WorkerMemory
from tidegate.service._runtime.workers import SPAWN_CONTEXT
from tidegate.testing import ManualClock


def area(size=2**16):
    return memoryview(bytearray(size))


# ---- counters --------------------------------------------------------------------------------------------------------


PAIR = RowKind("pair", 2)
BUSY = RowKind("busy", gauge=True)


def table(*areas, number=0, clock=None):
    return SharedCounters(areas, number, clock or ManualClock())


def test_a_row_continues_where_the_process_before_has_ended():
    memory, clock = area(), ManualClock()
    first = table(CounterArea(memory), clock=clock).row(PAIR, "é\ud800")
    first[0] += 3
    first[1] += 1
    clock.advance(5)
    second = table(CounterArea(memory), clock=clock)
    second.row(PAIR, "é\ud800")[0] += 2
    assert second.own(PAIR) == {("é\ud800",): [2, 0]}
    assert second.totals(PAIR) == {("é\ud800",): [5, 1]}


def test_current_values_end_with_their_process():
    memory = area()
    first = table(CounterArea(memory))
    first.row(BUSY, "a")[0] += 3
    first.row(PAIR, "a")[0] += 3
    parent = CounterArea(memory)
    assert table(parent).totals(BUSY) == {("a",): [3]}
    parent.clear_gauges()
    second = table(CounterArea(memory))
    second.row(BUSY, "a")[0] += 1
    assert (second.totals(BUSY), second.totals(PAIR)) == ({("a",): [1]}, {("a",): [3, 0]})


def test_other_processes_see_new_rows():
    memory = area()
    writer, reader = table(CounterArea(memory)), table(CounterArea(memory))
    kinds = [RowKind("row", width) for width in (1, 2, 3)]
    assert reader.totals(kinds[0]) == {}
    for number in range(50):
        writer.row(kinds[number % 3], str(number))[0] = number
        assert sorted(row[0] for row in reader.totals(kinds[0]).values()) == list(range(number + 1))


def test_a_full_area_counts_locally(caplog):
    memory = area(4096)
    writer = table(CounterArea(memory))
    for number in range(100):
        writer.row(PAIR, str(number))[1] += 7
    assert writer.own(PAIR)["99",] == [0, 7]
    shared = CounterArea(memory).rows("pair")
    assert 0 < len(shared) < 100
    assert ("99",) not in shared
    assert len(caplog.records) == 1


def test_a_row_that_was_not_finished_is_replaced():
    """A process that is killed while it appends a row has not yet changed the number of integers in use."""
    memory = area()
    table(CounterArea(memory)).row(PAIR, "whole")[0] += 1
    used = bytes(memory[:8])
    table(CounterArea(memory)).row(PAIR, "torn")[0] += 99
    memory[:8] = used  # as if the process had been killed before
    following = table(CounterArea(memory))
    assert list(following.row(PAIR, "next")) == [0, 0]
    assert set(following.totals(PAIR)) == {("whole",), ("next",)}


def test_totals_have_the_same_order_in_every_worker():
    areas, clock = [CounterArea(area()), CounterArea(area())], ManualClock()
    tables = [table(*areas, number=number, clock=clock) for number in range(2)]
    stats = [Stats(each) for each in tables]
    for worker, policy in [(1, "b"), (0, "c"), (1, "a"), (0, "b"), (1, "c")]:
        clock.advance(1)
        stats[worker].count(policy).allowed += 1
        orders = [list(each.totals().counts) for each in stats]
        assert orders[0] == orders[1]
        assert orders[0][0] == "b"
    totals = stats[0].totals()
    assert {name: count.allowed for name, count in totals.counts.items()} == {"b": 2, "c": 2, "a": 1}
    assert list(totals.counts) == ["b", "c", "a"]


def test_all_counts_are_added_and_outlive_a_process():
    areas = [CounterArea(area()), CounterArea(area())]
    for number, worker in enumerate((0, 1, 0), start=1):  # the third replaces the first
        counters = table(*areas, number=worker)
        stats = Stats(counters)
        count = stats.count("api")
        count.allowed += number
        count.denied += 10 * number
        stats.errors.add("busy", amount=number)
        stats.violated.add("api", "1m", amount=number)
        counters.row(LAST_DENIED, "api")[0] = {1: 500, 2: 900, 3: 600}[number]
        for _ in range(number):
            stats.latency["acquire"].add(30)
        source, copied = Labelled(), CopiedCounts(counters, STORE)
        copied.copy(source, ("failures",), 1)
        copied.copy(source, ("failures",), number)
        own = stats.totals(own=True)
        assert (own.counts["api"].allowed, own.counts["api"].shadow, own.errors) == (number, 0, {"busy": number})
    totals = stats.totals()
    assert (totals.counts["api"].allowed, totals.counts["api"].denied) == (6, 60)
    assert (totals.errors, totals.violated) == ({"busy": 6}, {("api", "1m"): 6})
    assert totals.last_denied == {"api": 900}
    assert (totals.latency["acquire"].total, sum(totals.latency["acquire"].counts)) == (180, 6)
    assert totals.latency["acquire"].counts[LATENCY_BUCKETS.index(50)] == 6
    assert copied.totals() == {"failures": 6}


class Labelled:
    """An object that keeps counts itself."""


@pytest.mark.parametrize("shared", [False, True])
def test_the_table_of_one_process_counts_as_the_shared_one(shared):
    counters = table(CounterArea(area())) if shared else Counters()
    counters.row(PAIR, "a")[1] += 2
    counters.row(PAIR, "b")[0] -= 1
    assert counters.totals(PAIR) == counters.own(PAIR) == {("a",): [0, 2], ("b",): [-1, 0]}
    assert counters.row(PAIR, "a") is counters.row(PAIR, "a")


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
    row = SharedCounters([memory.areas[number].counters], 0, ManualClock()).row(PAIR)
    value = 0
    while True:
        value += 1
        row[0] += 1
        memory.areas[number].message.write(b"%d" % value * 1000)
        row[1] += 1


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
        data = area.message.read()
        assert data is not None
        assert data == data[: len(data) // 1000] * 1000
    assert seen[1] > seen[0] + 100
    assert memory.areas[0].counters.rows("pair") == {}
    memory.close()


def values(area):
    return next((tuple(row.values) for row in area.counters.rows("pair").values()), None)


@pytest.mark.parametrize("workers", [1, 256])
def test_unused_memory_is_not_allocated(workers):
    before = open_descriptors()
    memory = WorkerMemory.create(workers, 0)
    opened = open_descriptors() - before
    assert opened
    SharedCounters([memory.areas[-1].counters], 0, ManualClock()).row(PAIR)[0] += 1
    memory.areas[-1].message.write(b"x")
    assert max(os.fstat(descriptor).st_blocks for descriptor in opened) * 512 < 2**20
    memory.close()


def open_descriptors():
    """Return the anonymous files of this process."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[int(path.name)] = str(path.readlink())
    return {number for number, target in found.items() if "memfd" in target}
