"""The file of the ledger is locked by a backup, or the disk is full: sources pause, everything else goes on."""

import asyncio
import logging
import resource
import sqlite3
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.outbound.sources.test_service import FMP, START, RunnerHarness, source, world
from tidegate.outbound.sources._ledger import SourceLedger
from tidegate.testing import ManualClock


@contextmanager
def locked(path):
    """Hold the write lock of a database, as a backup does."""
    backup = sqlite3.connect(path, isolation_level=None)
    backup.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        backup.execute("ROLLBACK")
        backup.close()


@contextmanager
def full_disk():
    """Let no file grow: SQLite reports that as an error of the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["a locked file", "a full disk"])
def outage(request, tmp_path, monkeypatch):
    monkeypatch.setattr("tidegate.outbound.sources._ledger.MAX_LOCK_WAIT", 0.3)
    return (lambda: locked(tmp_path / "data" / "sources.db")) if request.param == "a locked file" else full_disk


def stored(tmp_path):
    ledger = SourceLedger(tmp_path / "data" / "sources.db")
    try:
        return ledger.records()
    finally:
        ledger.close()


async def until_async(condition, what):
    """Wait until a condition is true; fail after ten seconds, naming `what`."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


async def longest_stall(seconds):
    """Return the longest time that the event loop did not respond within."""
    end, longest = time.monotonic() + seconds, 0.0
    while (began := time.monotonic()) < end:
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    return longest


async def test_sources_pause_and_resume_while_the_event_loop_goes_on(tmp_path, caplog, outage):
    clock = ManualClock(START)
    async with world(tmp_path, [source("a", interval="10s")], clock=clock) as here:
        running = asyncio.create_task(here.service.run())
        await until_async(lambda: here.row("a")["ok"] == 1, "the first fetch")
        await until_async(lambda: here.row("a")["state"] == "idle" and not here.service.ledger.unsaved, "its end")
        assert await here.service.health() == {"status": "ok"}
        with outage():
            clock.advance(10)
            stalled = asyncio.create_task(longest_stall(0.6))
            await until_async(lambda: here.service.paused, "the pause")
            assert await stalled < 0.2
            health = await here.service.health()
            assert health["status"] == "paused"
            assert "cannot store the state of sources in" in health["reason"]
            for _ in range(5):
                clock.advance(1)
                await asyncio.sleep(0.02)
            assert len(here.fetched) == 1  # nothing is sent that a crash would forget
            assert not running.done()
        clock.advance(1)
        await until_async(lambda: here.row("a")["ok"] == 2, "the second fetch")
        assert await here.service.health() == {"status": "ok"}
        here.service.stop()
        await running
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("sources are paused, decisions are not: cannot store the state of sources in ")
    assert stored(tmp_path)["a"].ok == 2


async def test_a_result_that_could_not_be_stored_is_stored_later(tmp_path, monkeypatch):
    monkeypatch.setattr("tidegate.outbound.sources._ledger.MAX_LOCK_WAIT", 0.3)
    finish = asyncio.Event()

    async def slow(_request):
        await finish.wait()
        return httpx.Response(204)

    async with world(tmp_path, [source("a", to={"webhook": "https://hook.test/"})], respond=slow) as here:
        running = asyncio.create_task(here.service.run())
        await until_async(lambda: here.fetched, "the request")
        with locked(tmp_path / "data" / "sources.db"):
            finish.set()
            await until_async(lambda: here.service.paused, "the pause")
            assert here.row("a")["ok"] == 1
            assert stored_state(tmp_path) == "running"
        here.clock.advance(1)
        await until_async(lambda: here.service.paused is None, "the end of the pause")
        assert stored_state(tmp_path) == "idle"
        here.service.stop()
        await running


def stored_state(tmp_path):
    db = sqlite3.connect(tmp_path / "data" / "sources.db")
    try:
        return db.execute("SELECT state FROM sources").fetchone()[0]
    finally:
        db.close()


async def test_a_runner_that_starts_while_its_file_is_locked_recovers_later(tmp_path, monkeypatch):
    monkeypatch.setattr("tidegate.outbound.sources._ledger.MAX_LOCK_WAIT", 0.1)
    (tmp_path / "data").mkdir()
    killed = SourceLedger(tmp_path / "data" / "sources.db")
    killed.add("a", 0)
    killed.begin("a", ("fmp.test", "fmp.test"))
    await killed.save()
    killed.close()
    async with world(tmp_path, [source("a")]) as here:
        with locked(tmp_path / "data" / "sources.db"):
            running = asyncio.create_task(here.service.run())
            await until_async(lambda: here.service.paused, "the pause")
            assert not here.fetched
        here.clock.advance(1)
        await until_async(lambda: here.fetched, "the fetch")
        assert len(here.service.recovered) == 1
        here.service.stop()
        await running


async def test_sources_that_wait_for_a_quota_write_nothing(tmp_path):
    """2,000 sources wrote a row each, every second."""
    sources = [source(f"s{i}") for i in range(50)]
    async with world(tmp_path, sources, {**FMP, "limit": 1}) as here:
        await here.cycle()
        size = sum(path.stat().st_size for path in (tmp_path / "data").glob("sources.db*"))
        changed = [path.stat().st_mtime_ns for path in (tmp_path / "data").glob("sources.db*")]
        for _ in range(20):
            here.clock.advance(1)
            await here.cycle()
        assert here.total("skipped") == 49 * 21
        assert sum(path.stat().st_size for path in (tmp_path / "data").glob("sources.db*")) == size
        assert [path.stat().st_mtime_ns for path in (tmp_path / "data").glob("sources.db*")] == changed
        here.clock.advance(40)
        await here.cycle()
    counts = [each.skipped for each in stored(tmp_path).values() if each.ok]
    assert sorted(counts) == [0, 21]  # stored with the result of the source


async def test_a_source_says_why_it_was_skipped(tmp_path):
    async with world(tmp_path, [source("a"), source("b")], {**FMP, "limit": 1}) as here:
        await here.cycle()
        here.clock.advance(1)
        await here.cycle()
        assert (here.row("a")["skip_reason"], here.row("b")["skip_reason"]) == (None, "denied by 1m, for 59s more")
        here.clock.advance(59)
        await here.cycle()
        assert here.row("b")["skip_reason"] is None


async def test_a_lost_store_of_the_quotas_skips_sources(tmp_path):
    harness = RunnerHarness(
        tmp_path, [source("a")], {**FMP, "on_store_error": "deny"}, store=f"sqlite:///{tmp_path}/q.db"
    )
    async with harness.service:
        with locked(tmp_path / "q.db"):
            await harness.cycle()
            assert (await harness.service.health())["status"] == "degraded"
        assert not harness.fetched
        assert harness.row("a")["skip_reason"] == "the store of the permits is unavailable"
        assert "on_store_error" in str((await harness.service.health())["reason"])


async def test_a_removed_file_pauses_sources_until_it_is_moved_back(tmp_path, caplog):
    """Requests in flight and added sources would be written to a file that no restart finds."""
    async with world(tmp_path, [source("a")]) as here:
        path = tmp_path / "data" / "sources.db"
        await here.cycle()
        path.rename(tmp_path / "moved")
        here.clock.advance(3600)
        await here.cycle()
        assert len(here.fetched) == 1
        assert (await here.service.health())["status"] == "paused"
        (tmp_path / "moved").rename(path)
        here.clock.advance(1)
        await here.cycle()
        assert len(here.fetched) == 2
        assert (await here.service.health())["status"] == "ok"
    assert "sources.db: the file was removed or replaced while it was in use: move it back" in caplog.text
