"""Long logs: a decision reads few rows, and expired entries are removed."""

import random
import sqlite3

import pytest

from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._sqlite.log_rows import MAX_EXPIRED_ENTRIES, MAX_REMOVED_PER_TRANSACTION
from tidegate.testing import ManualClock

LONG = 6000
SECOND = 1_000_000


@pytest.fixture(scope="module")
def policy():
    return Policy("p", (Limit(LONG, "1h", "sliding_log"),))


@pytest.fixture(scope="module")
def filled(tmp_path_factory, policy):
    """Fill a log, one entry every half second."""
    path = tmp_path_factory.mktemp("log") / "limits.db"
    store = SQLiteStore(path)
    for step in range(LONG):
        assert store.apply_one("acquire", policy, "k", (1,), step * SECOND // 2)
    store.close()
    return path


@pytest.fixture
def store(tmp_path, filled):
    path = tmp_path / "limits.db"
    path.write_bytes(filled.read_bytes())
    store = SQLiteStore(path)
    yield store
    store.close()


class CountedConnection(sqlite3.Connection):
    """Counts SQL statements, instead of measuring time."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.set_trace_callback(STATEMENTS.append)


STATEMENTS: list[str] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **options: connect(*args, **options, factory=CountedConnection)
    )


def statements(store, verb, policy, cost, now, at=None):
    """Apply a verb; returns the decision and the number of SQL statements."""
    store.apply_one("peek", policy, "k", (0,), now)  # opens the file
    STATEMENTS.clear()
    decision = store.apply_one(verb, policy, "k", (cost,), now, at)
    return decision, len(STATEMENTS)


HALF = LONG // 2 * SECOND // 2 + 3600 * SECOND  # half of the entries have expired


@pytest.mark.parametrize(
    ("verb", "cost", "now", "at", "remaining"),
    [
        ("acquire", 1, LONG * SECOND // 2, None, 0),  # denied, waits for the oldest
        ("acquire", LONG // 3, LONG * SECOND // 2, None, 0),  # denied, waits for one in the middle
        ("acquire", 1, 3600 * SECOND, None, 0),  # one has expired
        ("acquire", 1, HALF, None, LONG // 2),  # half of them have expired at once, including the one at HALF - 1h
        ("peek", 1, HALF, None, LONG // 2),
        ("adjust", -1, LONG * SECOND // 2, None, 1),  # the latest is removed
        ("adjust", -1, LONG * SECOND // 2, (LONG - 10) * SECOND // 2, 1),  # a late one is removed
        ("adjust", -1, LONG * SECOND // 2, 10 * SECOND // 2, 1),  # an early one is removed
        ("adjust", -1, LONG * SECOND // 2, LONG * SECOND // 5, 1),  # before the middle
        ("adjust", -1, LONG * SECOND // 2, LONG * SECOND // 3, 1),  # after the middle
        ("reset", 0, LONG * SECOND // 2, None, LONG),
    ],
)
def test_a_decision_reads_few_rows(store, policy, verb, cost, now, at, remaining):
    decision, count = statements(store, verb, policy, cost, now, at)
    assert decision.remaining == remaining
    assert count <= 40


def test_a_correction_of_a_recent_charge_takes_few_statements(store, policy):
    now = LONG * SECOND // 2
    assert store.apply_one("acquire", policy, "k", (0,), now)
    assert store.apply_one("adjust", policy, "k", (2,), now, (LONG - 1) * SECOND // 2)
    _, count = statements(store, "adjust", policy, -1, now, (LONG - 1) * SECOND // 2)
    assert count <= 6  # BEGIN, the state, the last entries, the entry, the state, COMMIT


def test_corrections_of_a_long_log_are_those_of_the_memory_store(tmp_path):
    draw = random.Random(3)
    policy = Policy("p", (Limit(5000, "1m", "sliding_log", name="a"), Limit(10**6, "10m", "sliding_log", name="b")))
    stores = [MemoryStore(), SQLiteStore(tmp_path / "limits.db")]
    now, charged = 0, []
    for _ in range(500):
        now += draw.randint(1, SECOND)
        charged.append(now)
        calls = [("acquire", (9, 9), None)]
        calls += [
            (
                "adjust",
                (draw.randint(-9, 5), draw.choice([0, -9, 4])),
                draw.choice(charged[-draw.choice([1, 9, 400]) :]),
            )
        ]
        for verb, costs, at in calls:
            first, second = (store.apply_one(verb, policy, "k", costs, now, at).with_views() for store in stores)
            assert (list(first.views), first.used) == (list(second.views), second.used)
    stores[1].close()


def test_a_long_search_finds_the_exact_entry(store, policy):
    now = LONG * SECOND // 2
    for cost in (1, 2, 7, 8, 9, 100, 2999, 5999, 6000):
        wait = store.apply_one("peek", policy, "k", (cost,), now).retry
        assert now + wait == (cost - 1) * SECOND // 2 + 3600 * SECOND


def entries(store):
    with sqlite3.connect(store.path) as db:
        count = db.execute("SELECT count(*) FROM entry").fetchone()[0]
    db.close()
    return count


def test_expired_entries_are_removed_in_small_steps(store, policy):
    left = entries(store)
    assert left == LONG
    for step in range(100):
        assert store.apply_one("acquire", policy, "k", (1,), HALF + step)
        now = entries(store)
        assert left - now <= MAX_REMOVED_PER_TRANSACTION
        left = now
    assert left <= LONG // 2 + 100 + MAX_EXPIRED_ENTRIES


def test_the_entries_of_a_deleted_log_are_removed(tmp_path, filled, policy):
    path = tmp_path / "limits.db"
    path.write_bytes(filled.read_bytes())
    clock = ManualClock()
    clock.advance(LONG)
    with_clock = SQLiteStore(path, clock=clock)
    with_clock.apply_one("reset", policy, "k", (0,))
    other = Policy("other", (Limit(10, "1s"),))
    for step in range(LONG // MAX_REMOVED_PER_TRANSACTION * 16 + 64):
        with_clock.apply_one("acquire", other, f"k{step}", (1,))
    assert entries(with_clock) == 0
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM log").fetchone() == (0,)
    db.close()
    with_clock.close()


def test_slots_can_be_released_in_any_order(store):
    """The slot that expires first is released by default, otherwise the one acquired at the given time."""
    slots = Policy("slots", (Limit(1000, "1h", "concurrency"),))
    for step in range(1000):
        assert store.apply_one("acquire", slots, "k", (1,), step)
    for released, at in enumerate((None, 500, 700, None, 999, 2, None), start=1):
        assert store.apply_one("adjust", slots, "k", (-1,), 1000, at).remaining == released
    # 0, 1 and 3 were released as the first, 2 by its time; so 4 expires next.
    assert store.apply_one("peek", slots, "k", (8,), 1000).retry == 4 + 3600 * SECOND - 1000
    assert store.apply_one("peek", slots, "k", (0,), 1000).reset_after == (998 + 3600 * SECOND - 1000) / SECOND
