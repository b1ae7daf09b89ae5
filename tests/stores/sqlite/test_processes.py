"""Many processes on one file: exactly the limit is admitted, even if processes are killed at any moment."""

import sqlite3
import subprocess
import sys

from tests.stores.sqlite import programs
from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._sqlite.rows import read_limits, write_limits


def start(*arguments):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", programs.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(*processes):
    results = [int(process.communicate()[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return results


def used(path, quota=programs.QUOTA):
    store = SQLiteStore(path, busy_timeout="60s")
    views = store.apply_one("peek", programs.policy(quota), "k", (0, 0, 0)).views
    store.close()
    return [quota - remaining for remaining, _, _ in views]


def test_four_processes_of_four_threads_get_exactly_the_quota(tmp_path):
    path = tmp_path / "limits.db"  # created by one of the processes, which race for it
    assert sum(finish(*(start("spend", path, 500, 4, 50) for _ in range(4)))) == 500
    assert used(path, 500) == [500, 500, 500]


def test_killed_processes_lose_no_reported_charge_and_admit_no_more_than_the_quota(tmp_path):
    path = tmp_path / "limits.db"
    kills = 50
    (reported,) = finish(start("kill_writers", path, kills, 7))
    assert 0 < reported <= programs.QUOTA
    charged = used(path)
    # Each killed process may have been charged for one call that it did not report.
    assert charged[0] == charged[1] == charged[2]
    assert reported <= charged[0] <= reported + kills
    assert is_intact(path)
    (rest,) = finish(start("spend", path, programs.QUOTA, 1, programs.QUOTA))
    assert charged[0] + rest == programs.QUOTA


def is_intact(path):
    db = sqlite3.connect(path)
    try:
        return db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        db.close()


def test_both_processes_of_a_fork_use_the_store(tmp_path):
    path = tmp_path / "limits.db"
    (admitted,) = finish(start("fork", path, 3, 40))
    assert admitted == 1 + 2 * 40 + 3 * 40 + 3 * 40
    assert used(path, 10 * programs.QUOTA) == [admitted] * 3
    assert is_intact(path)


def test_processes_with_different_limits_share_a_state(tmp_path):
    path = tmp_path / "limits.db"
    old, new = SQLiteStore(path), SQLiteStore(path)
    many = Policy("p", (Limit(100, "1h", "fixed_window"), Limit(100, "1h", name="bucket")))
    few = Policy("p", (Limit(30, "1h", "fixed_window"), Limit(30, "1h", name="bucket")))
    assert old.apply_one("acquire", many, "k", (60, 50), 0)
    assert [view[0] for view in new.apply_one("peek", few, "k", (0, 0), 0).views] == [-30, 30]
    assert new.apply_one("acquire", few, "k", (0, 10), 0)
    assert [view[0] for view in old.apply_one("peek", many, "k", (0, 0), 0).views] == [40, 20]
    old.close()
    new.close()


def test_stored_limits_are_restored_exactly():
    limits = (
        Limit(7, "333ms", "sliding_window", unit="a b", name='x/y "z" é\n'),
        Limit(90_000, "1m", unit="tokens", burst=120_000, name="tpm"),
        Limit(5, "week", "calendar_window", timezone="Europe/Berlin", reset_day=3, reset_hour=9),
        Limit(2**53 - 1, 0.000001, "sliding_log"),
    )
    assert read_limits(write_limits(limits)) == limits
