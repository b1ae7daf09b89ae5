"""Many processes on one file: exactly the limit is admitted, whoever is killed and whenever."""

import sqlite3
import subprocess
import sys

from tests.stores.sqlite import programs
from tidegate.core.limit import Limit
from tidegate.policy import Policy
from tidegate.stores.sqlite import SQLiteStore
from tidegate.stores.sqlite.rows import read_limits, write_limits


def start(*arguments):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", programs.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(*processes):
    answers = [int(process.communicate()[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return answers


def used(path, quota=programs.QUOTA):
    store = SQLiteStore(path, busy_timeout="60s")
    views = store.apply_one("peek", programs.policy(quota), "k", (0, 0, 0)).views
    store.close()
    return [quota - remaining for remaining, _, _ in views]


def test_four_processes_of_four_threads_are_admitted_exactly_the_quota(tmp_path):
    path = tmp_path / "limits.db"  # which nobody has made: they race for that, too
    assert sum(finish(*(start("spend", path, 500, 4, 50) for _ in range(4)))) == 500
    assert used(path, 500) == [500, 500, 500]


def test_no_kill_loses_an_answered_charge_or_admits_too_much(tmp_path):
    path = tmp_path / "limits.db"
    kills = 50
    (answered,) = finish(start("be_killed", path, kills, 7))
    assert 0 < answered <= programs.QUOTA
    charged = used(path)
    # Each of the killed may have been charged for one call that it was not told of any more.
    assert charged[0] == charged[1] == charged[2]
    assert answered <= charged[0] <= answered + kills
    assert sound(path)
    (rest,) = finish(start("spend", path, programs.QUOTA, 1, programs.QUOTA))
    assert charged[0] + rest == programs.QUOTA


def sound(path):
    db = sqlite3.connect(path)
    try:
        return db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        db.close()


def test_both_sides_of_a_fork_go_on(tmp_path):
    path = tmp_path / "limits.db"
    (admitted,) = finish(start("fork", path, 3, 40))
    assert admitted == 1 + 2 * 40 + 3 * 40 + 3 * 40
    assert used(path, 10 * programs.QUOTA) == [admitted] * 3
    assert sound(path)


def test_a_limit_that_another_process_has_changed(tmp_path):
    path = tmp_path / "limits.db"
    old, new = SQLiteStore(path), SQLiteStore(path)
    many = Policy("p", (Limit(100, "1h", "fixed_window"), Limit(100, "1h", name="bucket")))
    few = Policy("p", (Limit(30, "1h", "fixed_window"), Limit(30, "1h", name="bucket")))
    assert old.apply_one("acquire", many, "k", (60, 50), 0)
    assert [view[0] for view in new.apply_one("peek", few, "k", (0, 0), 0).views] == [0, 30]
    assert new.apply_one("acquire", few, "k", (0, 10), 0)
    assert [view[0] for view in old.apply_one("peek", many, "k", (0, 0), 0).views] == [40, 20]
    old.close()
    new.close()


def test_limits_are_built_again_exactly():
    limits = (
        Limit(7, "333ms", "sliding_window", unit="a b", name='x/y "z" é\n'),
        Limit(90_000, "1m", unit="tokens", burst=120_000, name="tpm"),
        Limit(5, "week", "calendar_window", timezone="Europe/Berlin", reset_day=3, reset_hour=9),
        Limit(2**53 - 1, 0.000001, "sliding_log"),
    )
    assert read_limits(write_limits(limits)) == limits
