"""The views of the file, read with plain SQL."""

import sqlite3
from datetime import datetime

import pytest

from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.outbound import Gate, Providers
from tidegate.stores._sqlite import SQLiteStore

START = 1_736_936_580_000_000  # 2025-01-15 10:23:00 UTC
SECOND = 1_000_000


@pytest.fixture
def store(tmp_path):
    store = SQLiteStore(tmp_path / "limits.db")
    yield store
    store.close()


def query(store, sql):
    db = sqlite3.connect(store.path)
    db.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in db.execute(sql)]
    finally:
        db.close()


def columns(store, view):
    store.apply_one("peek", Policy("p", (Limit(1, "1m"),)), "k", (0,), START)
    return [row["name"] for row in query(store, f"PRAGMA table_info({view})")]


def test_the_columns_are_the_documented_ones(store):
    assert columns(store, "rate_limiter_state") == ["domain", "request_count", "window_start", "updated_at"]
    assert columns(store, "rate_limits") == [
        "time_period", "current_count", "window_start", "window_end", "last_updated",
    ]  # fmt: skip
    assert columns(store, "task_completions") == ["id", "completed_at", "task_type", "task_id"]


def test_the_state_of_a_domain(store):
    policy = Policy("providers", (Limit(300, "1m", "fixed_window"),))
    for step in range(45):
        store.apply_one("acquire", policy, "financialmodelingprep.com", (1,), START + step * SECOND)
    store.apply_one("acquire", policy, "alphavantage.co", (3,), START + 7)
    assert query(store, "SELECT * FROM rate_limiter_state ORDER BY domain DESC") == [
        {
            "domain": "financialmodelingprep.com",
            "request_count": 45,
            "window_start": "2025-01-15 10:23:00.000000Z",
            "updated_at": "2025-01-15 10:23:44.000000Z",
        },
        {
            "domain": "alphavantage.co",
            "request_count": 3,
            "window_start": "2025-01-15 10:23:00.000007Z",
            "updated_at": "2025-01-15 10:23:00.000007Z",
        },
    ]


def test_a_policy_of_several_limits_has_one_row_per_domain(store):
    policy = Policy("providers", (Limit(5, "1s"), Limit(300, "1m", "fixed_window")))
    store.apply_one("acquire", policy, "a", (1, 1), START)
    assert [row["domain"] for row in query(store, "SELECT * FROM rate_limiter_state")] == ["a"]


def test_timestamps_can_be_parsed_and_compared(store):
    store.apply_one("acquire", Policy("p", (Limit(5, "1s"),)), "a", (1,), START + 5)
    sql = """
        SELECT updated_at, datetime(updated_at) AS s,
               updated_at > datetime('2025-01-15 10:22:59') AS later,
               updated_at < datetime('2025-01-15 10:24:00') AS sooner
        FROM rate_limiter_state"""
    (row,) = query(store, sql)
    assert datetime.fromisoformat(row["updated_at"]).timestamp() * SECOND == START + 5
    assert (row["s"], row["later"], row["sooner"]) == ("2025-01-15 10:23:00", 1, 1)


@pytest.mark.parametrize("long", [False, True], ids=["short log", "log as rows"])
def test_rates_of_rolling_windows(store, long):
    count = 40 if long else 4
    periods = ("1m", "1h", "1d", "1w", "30d")
    policy = Policy("budget", tuple(Limit(100, period, "sliding_log") for period in periods))
    for step in range(count):
        store.apply_one("acquire", policy, "tasks", (1,) * 5, START + step * 30 * SECOND)
    newest = datetime.fromtimestamp(START // SECOND + (count - 1) * 30).astimezone(tz=None)
    rows = query(store, "SELECT * FROM rate_limits")
    assert [row["time_period"] for row in rows] == ["minute", "hour", "day", "week", "month"]
    assert [row["current_count"] for row in rows] == [2, count, count, count, count]
    for row, seconds in zip(rows, (60, 3600, 86_400, 604_800, 2_592_000), strict=True):
        opened, closes = (datetime.fromisoformat(row[name]) for name in ("window_start", "window_end"))
        assert (closes - newest).total_seconds() == seconds
        assert (newest - opened).total_seconds() == 30 * (row["current_count"] - 1)
    tasks = query(store, "SELECT * FROM task_completions")
    assert [task["id"] for task in tasks] == list(range(1, count + 1))
    assert tasks[0]["completed_at"] == "2025-01-15 10:23:00.000000Z"
    assert tasks[1]["completed_at"] == "2025-01-15 10:23:30.000000Z"


def test_rates_of_calendar_windows(store):
    policy = Policy("budget", (Limit(500, "day", "calendar_window"), Limit(7500, "month", "calendar_window")))
    store.apply_one("acquire", policy, "tasks", (12, 12), START)
    rows = query(store, "SELECT time_period, current_count, window_start, window_end FROM rate_limits")
    assert [tuple(row.values()) for row in rows] == [
        ("day", 12, "2025-01-15 00:00:00.000000Z", "2025-01-16 00:00:00.000000Z"),
        ("month", 12, "2025-01-01 00:00:00.000000Z", "2025-02-01 00:00:00.000000Z"),
    ]


def test_a_charge_of_many_tasks_has_a_row_for_each(store):
    policy = Policy("budget", (Limit(500, "1d", "sliding_log"),))
    store.apply_one("acquire", policy, "tasks", (20,), START)
    store.apply_one("acquire", policy, "tasks", (3,), START + 1)
    assert query(store, "SELECT count(*) AS n, max(id) AS last FROM task_completions") == [{"n": 23, "last": 23}]


@pytest.mark.parametrize("long", [False, True], ids=["short log", "log as rows"])
def test_tasks_can_be_labelled(store, long):
    policy = Policy("budget", (Limit(500, "1d", "sliding_log"), Limit(500, "1w", "sliding_log")))
    for step in range(40 if long else 3):
        store.apply_one("acquire", policy, "tasks", (1, 1), START + step)
    store.label(policy, "tasks", START + 1, "embedding", "task-7")
    store.label(policy, "tasks", START - 1, "embedding", "not there")
    rows = query(store, "SELECT * FROM task_completions WHERE task_id IS NOT NULL")
    assert [tuple(row.values()) for row in rows] == [(2, "2025-01-15 10:23:00.000001Z", "embedding", "task-7")]
    assert store.apply_one("peek", policy, "tasks", (0, 0), START + 50).remaining == (460 if long else 497)


def test_every_algorithm_shows_its_used_permits(store):
    kinds = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")
    policy = Policy("all", tuple(Limit(10, "1h", kind, name=kind) for kind in kinds))
    store.apply_one("acquire", policy, "k", (4,) * 5, START)
    rows = query(store, "SELECT policy, key, name, algorithm, quota, used FROM tidegate_states")
    assert [tuple(row.values()) for row in rows] == [("all", "k", kind, kind, 10, 4) for kind in kinds]
    store.apply_one("reset", policy, "k", (0,) * 5, START)
    assert query(store, "SELECT * FROM tidegate_states") == []


def test_policies_of_tidegate_itself_are_not_shown(store):
    for name in ("tidegate.probe", "tidegate.capacity:x", "tidegates"):
        store.apply_one("acquire", Policy(name, (Limit(5, "1m", "fixed_window"),)), name, (1,), START)
    assert query(store, "SELECT domain FROM rate_limiter_state") == [{"domain": "tidegates"}]
    assert query(store, "SELECT count(*) AS n FROM rate_limits") == [{"n": 1}]


@pytest.mark.parametrize("cost", [1, 2])
def test_a_margin_shows_in_the_end_of_a_window_and_not_in_its_period(store, cost):
    policy = Policy("provider:fmp", (Limit(300, "1m", "sliding_log", margin=300_000),))
    for seconds in (0, 30, 65):
        store.apply_one("acquire", policy, "fmp.example", (cost,), START + seconds * SECOND)
    (row,) = query(store, "SELECT time_period, current_count, window_start, window_end FROM rate_limits")
    assert list(row.values()) == [
        "minute", 2 * cost, "2025-01-15 10:23:30.000000Z", "2025-01-15 10:25:05.300000Z",
    ]  # fmt: skip
    assert query(store, "SELECT period FROM tidegate_states") == [{"period": "1m"}]
    store.apply_one("adjust", policy, "fmp.example", (-cost,), START + 70 * SECOND, START + 65 * SECOND)
    (row,) = query(store, "SELECT current_count, window_end FROM rate_limits")
    assert list(row.values()) == [cost, "2025-01-15 10:24:30.300000Z"]


def test_the_quota_of_a_provider_is_shown_with_its_period(tmp_path):
    """The gate lets permits count a little longer than the period; that is not the period."""
    url = f"sqlite:///{tmp_path / 'quota.db'}"
    gate = Gate(Providers.of({"domain": "fmp.example", "limit": 300, "period": "1m"}), url)
    gate.acquire("fmp.example").commit()
    gate.close()
    db = sqlite3.connect(tmp_path / "quota.db")
    assert db.execute("SELECT time_period, current_count FROM rate_limits").fetchall() == [("minute", 1)]
    assert db.execute("SELECT domain, request_count FROM rate_limiter_state").fetchall() == [("fmp.example", 1)]
    db.close()
