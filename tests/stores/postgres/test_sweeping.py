"""Calls delete expired state in small steps and keep live state; long logs cost no more than short ones."""

import time

import pytest

from tidegate import Limit, Policy
from tidegate.errors import CollectionFull
from tidegate.stores._postgres.store import SWEEP_EVERY
from tidegate.stores._values import MAX_LISTED, MAX_WRITES, Collection, Write

SECOND = 1_000_000
NOW = 1_750_000_000 * SECOND
MINUTE = Policy("p", (Limit(5, "1m", "fixed_window"), Limit(100_000, "1m", "sliding_log", name="log")))
MAX_SWEPT_ENTRIES = 1000  # entries that one sweep removes


@pytest.fixture
def store(open_store):
    store = open_store()
    store.apply_one("peek", MINUTE, "k", (1, 1), NOW)  # creates the schema
    return store


@pytest.fixture
def count(sql):
    queries = {table: f"select count(*) from tidegate.{table}" for table in ("keys", "log")}  # noqa: S608 - two names
    return lambda table: sql(queries[table]).fetchone()[0]


def calls(store, number, now, key="caller"):
    for _ in range(number):
        store.apply_one("acquire", Policy("other", (Limit(10**6, "1d", "fixed_window"),)), key, (1,), now)


def test_expired_keys_are_deleted_by_later_calls(store, count):
    for number in range(100):
        store.apply_one("acquire", MINUTE, f"once-{number}", (1, 1), NOW)
    calls(store, SWEEP_EVERY * 3, NOW + 59 * SECOND)
    assert (count("keys"), count("log")) == (101, 100)
    calls(store, SWEEP_EVERY * 3, NOW + 61 * SECOND - 1)  # what ended within a second may be in use: it is kept
    assert (count("keys"), count("log")) == (101, 100)
    calls(store, SWEEP_EVERY * 3, NOW + 61 * SECOND)
    assert (count("keys"), count("log")) == (1, 0)


def test_a_key_in_use_is_kept_by_sweeps(store, count):
    for minute in range(5):
        assert store.apply_one("acquire", MINUTE, "k", (1, 1), NOW + minute * 50 * SECOND)
        calls(store, SWEEP_EVERY * 2, NOW + minute * 50 * SECOND)
    assert count("keys") == 2
    assert store.apply_one("peek", MINUTE, "k", (0, 0), NOW + 200 * SECOND).views[1][0] == 100_000 - 2


def test_a_client_with_a_fast_clock_deletes_no_live_state(store, count):
    year = 365 * 86_400 * SECOND
    store.apply_one("acquire", Policy("long", (Limit(5, "52w", "fixed_window"),)), "k", (1,))  # by the server's clock
    calls(store, SWEEP_EVERY * 2, NOW + 100 * year)
    assert count("keys") == 2


def fill(sql, store, entries):
    """Write a log of so many entries for a key, a microsecond apart, the last at NOW."""
    store.apply_one("acquire", MINUTE, "long", (1, 1), NOW)
    more = "select log, %s + n, 1, n from tidegate.log, generate_series(2, %s) n"
    sql(f"insert into tidegate.log (log, at, cost, sum) {more}", NOW - entries, entries)
    sql("update tidegate.log set at = %s where sum = 1", NOW - entries + 1)
    sql("update tidegate.keys set states[2].numbers[3] = %s where key = 'long'", entries)


def test_a_long_log_is_deleted_in_small_steps(store, sql, count):
    fill(sql, store, 5 * MAX_SWEPT_ENTRIES)
    store.apply_one("reset", MINUTE, "long", (0, 0), NOW)
    assert count("log") == 5 * MAX_SWEPT_ENTRIES  # at first, it is only marked as expired
    left = [5 * MAX_SWEPT_ENTRIES]
    while count("keys") > 1 or left[-1]:
        calls(store, SWEEP_EVERY, NOW)
        left.append(count("log"))
        assert left[-2] - left[-1] <= MAX_SWEPT_ENTRIES
        assert len(left) < 10
    # A new log of the same key is separate from the old one.
    fill(sql, store, 2 * MAX_SWEPT_ENTRIES)
    store.apply_one("reset", MINUTE, "long", (0, 0), NOW)
    assert store.apply_one("acquire", MINUTE, "long", (1, 1), NOW).views[1][0] == 100_000 - 1


def test_expired_entries_are_deleted_by_later_calls(store, count):
    for step in range(300):
        store.apply_one("acquire", Policy("p", (MINUTE.limits[1],)), "k", (1,), NOW + step * SECOND)
    assert count("log") <= 60 + 8


def test_a_decision_costs_no_more_with_a_long_log(store, sql):
    """Counts the pages that the server reads, with a hundred thousand entries and with a few."""
    description = store._encode_policy(MINUTE, NOW).limits  # noqa: SLF001 - what a call sends

    def pages(verb, at):
        call = "select apply(array[%s], '{1}', '{p}', '{long}', '{2}', %s, %s, array[%s::bigint], '{null}', 0)"
        values = (verb, f"{{{description}}}", [0, 100_000 if verb == "peek" else 1], at)
        sql(f"set enable_seqscan = off; set enable_bitmapscan = off; {store.schema.session_settings}")
        sql(call, *values)  # the first call includes planning
        plan = sql(f"explain (analyze, buffers, format json) {call}", *values).fetchone()[0][0]["Plan"]
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    def measured(entries):
        sql("truncate tidegate.keys, tidegate.log")
        fill(sql, store, entries)
        half = NOW - entries // 2 + 60 * SECOND
        return [pages("peek", NOW), pages("acquire", half), pages("peek", half), pages("acquire", half)]

    short, long = measured(20), measured(99_000)
    assert all(many <= few + 60 for few, many in zip(short, long, strict=True)), (short, long)


def test_running_totals_restart_before_they_overflow(store, sql):
    huge = Policy("huge", (Limit(2**53 - 1, "1s", "sliding_log"),))
    for step in range(3):
        assert store.apply_one("acquire", huge, "k", (2**52,), NOW + step * 2 * SECOND)
    ahead = 2**62 - 2 * 2**52  # as if as many permits had been spent before
    sql("update tidegate.log set sum = sum + %s", ahead)
    numbers = sql("select states[1].numbers from tidegate.keys").fetchone()[0]
    moved = [numbers[0], numbers[1] + ahead, numbers[2] + ahead, numbers[3]]
    sql("update tidegate.keys set states[1].numbers = %s", moved)
    now = NOW + 4 * SECOND + 500_000
    left = 2**53 - 1 - 2**52 - 2**51
    assert store.apply_one("acquire", huge, "k", (2**51,), now).remaining == left
    assert sql("select states[1].numbers[2:3] from tidegate.keys").fetchone()[0] == [0, 2**52 + 2**51]
    assert store.apply_one("peek", huge, "k", (2**53 - 1,), now).views == [(left, SECOND, SECOND)]


def test_a_step_counts_a_collection_once(open_store):
    store, listed, other = open_store(), Collection("c"), Collection("d")
    store.put_value(other, "x", b"", 3600)

    def write(names):
        store.apply("acquire", (), None, None, [Write(listed, name, b"", 3600 * SECOND, None) for name in names])

    names = [f"{number}" for number in range(MAX_LISTED - 2 * MAX_WRITES)]
    for start in range(0, len(names), MAX_WRITES):
        write(names[start : start + MAX_WRITES])
    began = time.perf_counter()
    for number in range(MAX_WRITES):
        write([f"one {number}"])
    middle = time.perf_counter()
    write([f"together {number}" for number in range(MAX_WRITES)])
    assert time.perf_counter() - middle < (middle - began) / 3
    both = [Write(other, "y", b"", SECOND), Write(listed, "full", b"", SECOND)]
    with pytest.raises(CollectionFull, match="'c'"):
        store.apply("acquire", (), None, None, both)
    assert set(store.list_values(other)) == {"x"}
