"""Expired keys are removed, a few with each write, so the file does not grow without limit."""

import sqlite3

import pytest

from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._sqlite.rows import SWEEP_ROWS
from tidegate.testing import ManualClock

SHORT = Policy("short", (Limit(100, "1s"), Limit(100, "1s", "sliding_log", name="log")))


@pytest.fixture
def clock():
    return ManualClock(start=1_750_000_000)


@pytest.fixture
def store(tmp_path, clock):
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    yield store
    store.close()


def rows(store):
    db = sqlite3.connect(store.path)
    try:
        return db.execute("SELECT count(*) FROM state").fetchone()[0]
    finally:
        db.close()


def test_expired_keys_are_removed_a_few_at_a_time(store, clock):
    for key in range(500):
        store.apply_one("acquire", SHORT, f"old {key}", (1, 1))
    clock.advance(10)
    left = rows(store)
    assert left == 500
    for key in range(160):
        store.apply_one("acquire", SHORT, "new", (0, 0) if key else (1, 1))
        now = rows(store)
        assert left - now <= SWEEP_ROWS
        left = now
    assert left == 1


@pytest.mark.parametrize("shifted", [False, True])
def test_expired_keys_are_removed_although_every_other_call_is_a_peek(store, clock, shifted):
    if shifted:
        store.apply_one("acquire", SHORT, "first", (1, 1))
    for key in range(100):
        store.apply_one("peek", SHORT, f"k{key}", (1, 1))
        store.apply_one("acquire", SHORT, f"k{key}", (1, 1))
        clock.advance(2)
    assert rows(store) < SWEEP_ROWS


def test_a_key_in_use_is_kept(store, clock):
    for _ in range(200):
        assert store.apply_one("acquire", SHORT, "k", (1, 1))
        clock.advance(0.02)
    assert rows(store) == 1
    assert store.apply_one("peek", SHORT, "k", (0, 0)).limits[1].remaining == 100 - 49


def test_the_file_does_not_grow_without_limit(store, clock):
    for round_number in range(8):
        for key in range(150):
            store.apply_one("acquire", SHORT, f"{round_number} {key}", (1, 1))
            clock.advance(0.02)
    assert rows(store) < 300
    db = sqlite3.connect(store.path)
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.close()
    assert pages < 60


def test_long_lived_keys_are_kept_until_they_expire(store, clock):
    long = Policy("long", (Limit(5, "52w", "fixed_window"),))
    store.apply_one("acquire", long, "k", (5,))
    clock.advance(3600 * 24 * 7 * 51)
    for key in range(40):
        store.apply_one("acquire", SHORT, f"{key}", (1, 1))
    assert not store.apply_one("acquire", long, "k", (1,))
    clock.advance(3600 * 24 * 7 * 4)  # swept up to 1/32 of its lifetime late
    for key in range(64):
        store.apply_one("acquire", SHORT, f"{key}", (1, 1))
    db = sqlite3.connect(store.path)
    assert db.execute("SELECT count(*) FROM state WHERE policy = 'long'").fetchone() == (0,)
    db.close()
