"""Faults of the file: the error says what was attempted and what to do, and the store recovers."""

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest

from tidegate import Limiter
from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.errors import Closed, StoreUnavailable
from tidegate.stores._sqlite import SQLiteStore

POLICY = Policy("api", (Limit(1000, "1h", "fixed_window"), Limit(1000, "1h", "sliding_log", name="log")))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "limits.db"


@pytest.fixture
def store(path):
    store = SQLiteStore(path, busy_timeout="20ms")
    yield store
    store.close()


def charge(store, key="k"):
    return store.apply_one("acquire", POLICY, key, (1, 1), 0)


def charge_often(store, keys=20):
    for key in range(keys):
        assert charge(store, f"key {key} {'x' * 100}")


def remaining(store, key="k"):
    return [view[0] for view in store.apply_one("peek", POLICY, key, (0, 0), 0).views]


# ---- locked ----------------------------------------------------------------------------------------------------------


def test_a_file_locked_for_longer_than_busy_timeout_raises(store, path):
    assert charge(store)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match=r"could not acquire 'k' of policy 'api' in .*limits\.db") as error:
        charge(store)
    assert "another connection kept the file locked" in str(error.value)
    assert remaining(store) == [999, 999]  # reading needs no lock
    other.execute("ROLLBACK")
    other.close()
    assert charge(store)
    assert remaining(store) == [998, 998]
    assert store.metrics()["failures"] == 1


def test_a_call_waits_while_the_file_is_locked(path):
    store = SQLiteStore(path, busy_timeout="60s")
    assert charge(store)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    thread = threading.Thread(target=charge, args=(store,))
    thread.start()
    while not store.metrics()["waits"]:
        assert thread.is_alive()
    other.execute("ROLLBACK")
    other.close()
    thread.join()
    assert remaining(store) == [998, 998]
    store.close()


def test_a_file_locked_while_it_is_opened_raises(store, path):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="locked"):
        charge(store)
    other.execute("ROLLBACK")
    other.close()
    assert charge(store)


# ---- missing or wrong files ------------------------------------------------------------------------------------------


def test_a_missing_folder_raises_until_it_exists(tmp_path):
    store = SQLiteStore(tmp_path / "later" / "limits.db")
    with pytest.raises(StoreUnavailable, match="folder must exist"):
        charge(store)
    (tmp_path / "later").mkdir()
    assert charge(store)
    store.close()


@pytest.mark.parametrize("opened", [True, False], ids=["in use", "not yet opened"])
def test_a_file_that_is_not_a_database_raises(store, path, opened):
    if opened:
        assert charge(store)
        assert charge(store)
    for name in path.parent.glob("limits.db-*"):
        name.unlink()
    (path.parent / "other").write_bytes(b"hello " * 2000)
    (path.parent / "other").replace(path)
    if opened:
        with pytest.raises(StoreUnavailable, match="was replaced by another file while it was in use"):
            charge(store)
    with pytest.raises(StoreUnavailable, match=r"not an SQLite database|is damaged"):
        charge(store)
    path.unlink()
    for name in path.parent.glob("limits.db-*"):
        name.unlink()
    assert charge(store)
    assert remaining(store) == [999, 999]
    assert remaining(store, f"key 1 {'x' * 100}") == [1000, 1000]


def test_a_damaged_file_raises_until_it_is_restored(store, path):
    charge_often(store, 200)
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    backup = path.read_bytes()
    path.write_bytes(content)
    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match="the file is damaged: restore a backup, or move the file away"):
        charge_often(store, 200)
    path.write_bytes(backup)
    for name in path.parent.glob("limits.db-*"):
        name.unlink()
    assert remaining(store, f"key 7 {'x' * 100}") == [999, 999]
    store.close()


@pytest.mark.parametrize("damage", ["numbers = '[[1'", "numbers = '[5, 6]'", "limits = '[[1, 2]]'", "limits = '{'"])
def test_an_unreadable_row_raises_for_its_key_only(store, path, damage):
    assert charge(store)
    db = sqlite3.connect(path)
    db.execute(f"UPDATE state SET {damage}")  # noqa: S608 - one of the parameters above
    db.commit()
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        charge(store)
    assert charge(store, "another")
    db.execute("DELETE FROM state WHERE key = 'k'")
    db.commit()
    db.close()
    assert charge(store)


def test_an_unreadable_row_is_removed_when_it_is_due(store, path):
    assert charge(store)
    db = sqlite3.connect(path)
    db.execute("UPDATE state SET numbers = '[[1'")
    db.commit()
    for key in range(40):
        assert store.apply_one("acquire", POLICY, f"key {key}", (1, 1), 2 * 3600 * 1_000_000)
    assert db.execute("SELECT count(*) FROM state WHERE key = 'k'").fetchone() == (0,)
    db.close()


def remove(path):
    for name in path.parent.glob(f"{path.name}*"):
        name.unlink()


def test_a_replaced_file_is_reported_once_and_then_used(store, path, tmp_path):
    other = SQLiteStore(tmp_path / "backup.db")
    for _ in range(500):
        assert charge(other)
    other.close()
    assert charge(store)
    remove(path)
    (tmp_path / "backup.db").replace(path)
    with pytest.raises(StoreUnavailable, match="was replaced by another file while it was in use"):
        charge(store)
    assert charge(store)
    assert remaining(store)[0] == 499


@pytest.mark.parametrize("noticed", [False, True], ids=["replaced", "removed, then restored"])
def test_a_file_beside_the_log_of_the_former_one_is_not_opened(store, path, tmp_path, noticed):
    """SQLite would copy pages of the former file into it."""
    other = SQLiteStore(tmp_path / "backup.db")
    for _ in range(500):
        assert charge(other)
    other.close()
    backup = (tmp_path / "backup.db").read_bytes()
    assert charge(store)
    if noticed:
        path.unlink()
        with pytest.raises(StoreUnavailable, match="was removed"):
            charge(store)
    (tmp_path / "backup.db").replace(path)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"write-ahead log of the former file is still there.*Remove"):
            charge(store)
    assert path.read_bytes() == backup
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()
    assert charge(store)
    assert remaining(store)[0] == 499


def test_a_file_that_was_moved_away_and_back_is_used_with_its_log(store, path, tmp_path):
    assert charge(store)
    path.rename(tmp_path / "moved.db")
    with pytest.raises(StoreUnavailable, match="was removed"):
        charge(store)
    (tmp_path / "moved.db").rename(path)
    assert remaining(store)[0] == 999


@pytest.mark.parametrize("use", [charge, remaining])
def test_a_file_that_is_removed_while_it_is_used_is_not_created_again(store, path, use):
    assert charge(store)
    remove(path)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"was removed while it was in use .* Restore the file"):
            use(store)
    assert not path.exists()
    path.touch()  # the operator decides to start with an empty store
    assert charge(store)
    assert remaining(store)[0] == 999


def test_a_removed_file_that_is_restored_is_used_again(store, path, tmp_path):
    assert charge(store)
    store.close()
    backup = tmp_path / "backup.db"
    backup.write_bytes(path.read_bytes())
    store = SQLiteStore(path)
    assert charge(store)
    remove(path)
    with pytest.raises(StoreUnavailable, match="was removed"):
        charge(store)
    backup.replace(path)
    assert remaining(store)[0] == 999
    store.close()


def test_a_limiter_denies_and_logs_when_its_file_is_removed(path, caplog):
    with Limiter("5/1d", store=f"sqlite:///{path}") as limiter:
        for _ in range(5):
            assert limiter.try_acquire("k")
        remove(path)
        assert not limiter.try_acquire("k")
        assert not path.exists()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "was removed while it was in use" in caplog.text


def test_a_closed_store_raises_closed(store):
    assert charge(store)
    store.close()
    store.close()
    with pytest.raises(Closed):
        charge(store)


# ---- the disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A small mounted disk (mounting requires root)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if not made or made.returncode:
        pytest.skip("mounting a small disk requires root; other tests below cover full and read-only files")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_raises_until_space_is_free(disk):
    store = SQLiteStore(disk / "limits.db")
    assert charge(store)
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**21))
    admitted, failed = 1, []
    for key in range(200):
        try:
            admitted += bool(charge(store, f"key {key}"))
        except StoreUnavailable as error:
            failed.append(str(error))
    assert failed
    assert [
        error for error in failed if "the disk is full: free" not in error and "reports an error" not in error
    ] == []
    ballast.unlink()
    used = sum(1000 - remaining(store, key)[0] for key in ("k", *(f"key {key}" for key in range(200))))
    assert used == admitted
    assert charge(store)
    store.close()


def test_a_read_only_disk_raises_until_it_is_writable(disk):
    store = SQLiteStore(disk / "limits.db")
    assert charge(store)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    store = SQLiteStore(disk / "limits.db")
    with pytest.raises(StoreUnavailable, match=r"writable|able to read and write"):
        charge(store)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert charge(store)
    assert remaining(store) == [998, 998]
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write read-only files: see the read-only disk above")
def test_a_read_only_file_raises_until_it_is_writable(path):
    store = SQLiteStore(path)
    assert charge(store)
    store.close()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match=r"writable|able to read and write"):
        charge(store)
    path.parent.chmod(0o755)
    path.chmod(0o644)
    assert charge(store)
    store.close()


def test_a_file_at_its_size_limit_raises_until_the_limit_is_raised(path):
    """In a separate process, since the limit applies to all its files."""
    program = textwrap.dedent("""
        import resource, sys
        from tests.stores.sqlite.test_faults import charge, remaining
        from tidegate.errors import StoreUnavailable
        from tidegate.stores._sqlite import SQLiteStore

        store = SQLiteStore(sys.argv[1])
        assert charge(store)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
        admitted, failed = 0, 0
        for key in range(300):
            try:
                admitted += bool(charge(store, f"key {key}"))
            except StoreUnavailable as error:
                assert "the disk" in str(error), error
                failed += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert failed and admitted
        assert sum(1000 - remaining(store, f"key {key}")[0] for key in range(300)) == admitted
        assert charge(store)
    """)
    subprocess.run([sys.executable, "-c", program, path], check=True)
