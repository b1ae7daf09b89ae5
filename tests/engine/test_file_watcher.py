"""FileWatcher: notices changes of files, removed and new ones, and requests to read them again."""

import asyncio
import os

import pytest

from tidegate._runtime.clock import ManualClock
from tidegate._runtime.file_watcher import FileWatcher


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("a: 1")
    return path


def test_a_change_is_noticed_once(file):
    watcher = FileWatcher([file])
    assert not watcher.changed()
    file.write_text("a: 22")
    assert not watcher.is_current()
    assert watcher.changed()
    assert watcher.is_current()
    assert not watcher.changed()


def test_a_replaced_file_of_the_same_size_and_time_is_a_change(file, tmp_path):
    watcher, stat = FileWatcher([file]), file.stat()
    other = tmp_path / "other.yaml"
    other.write_text("a: 2")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)
    assert watcher.changed()


def test_a_removed_file_and_its_return_are_changes(file):
    watcher = FileWatcher([file])
    file.unlink()
    assert watcher.changed()
    file.write_text("a: 1")
    assert watcher.changed()


def test_files_that_are_added_do_not_hide_a_change(file, tmp_path):
    watcher, token = FileWatcher([file]), tmp_path / "token"
    token.write_text("t")
    file.write_text("a: 333")
    watcher.watch([file, token])
    assert watcher.changed()
    token.write_text("tt")
    assert watcher.changed()


def test_a_request_is_a_change_also_without_a_file(file):
    for watcher in (FileWatcher([file]), FileWatcher([])):
        watcher.request_reload()
        assert watcher.changed()
        assert not watcher.changed()


@pytest.mark.parametrize("is_async", [False, True])
def test_run_checks_every_few_seconds_and_at_a_request(file, is_async):
    async def scenario():
        clock, watcher, times = ManualClock(), FileWatcher([file]), asyncio.Queue()

        def check():
            times.put_nowait((clock.now(), watcher.changed()))

        async def check_async():
            check()

        task = asyncio.create_task(watcher.run(check_async if is_async else check, 2.0, clock))
        found = [await times.get()]
        watcher.request_reload()
        found.append(await times.get())
        clock.advance(2.0)
        found.append(await times.get())
        task.cancel()
        return found

    assert asyncio.run(scenario()) == [(0.0, False), (0.0, True), (2.0, False)]
