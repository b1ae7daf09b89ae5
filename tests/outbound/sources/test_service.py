"""Scheduler and workers: the double check, fairness, failures, stopping, crashes; mostly in virtual time."""

import asyncio
import logging
import sqlite3
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.outbound.clients import QUICK
from tests.outbound.server import QuotaServer
from tidegate import ConfigError, Limiter
from tidegate.outbound import Providers
from tidegate.outbound.sources import SourceRunner, read_source
from tidegate.outbound.sources._ledger import SourceLedger
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

START = 1_728_000_000
FMP = {"domain": "fmp.test", "limit": 300, "period": "1m"}


def source(name, url="https://fmp.test/x", interval="1h", **more):
    return read_source({"name": name, "url": url, "interval": interval, **more})


class RunnerHarness:
    """A service in virtual time, and the host it fetches from."""

    def __init__(self, tmp_path, sources, provider=FMP, respond=None, **options):
        self.clock = options.pop("clock", None) or ManualClock(START)
        self.fetched: list[str] = []
        self.respond = respond or (lambda _request: httpx.Response(200, text="body"))
        self.store = options.pop("store", None) or MemoryStore(clock=self.clock)
        transport = httpx.MockTransport(self._handle)
        options = {"workers": 100, **options}
        self.service = SourceRunner(
            Providers.of(provider), sources, data=tmp_path / "data", store=self.store, transport=transport, **options
        )

    async def _handle(self, request):
        self.fetched.append(request.url.path)
        answer = self.respond(request)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def cycle(self):
        """Let one cycle happen, and everything it started end."""
        await self.service.start_due()  # one at a time, so that a test can look in between
        while self.service.tasks:
            await asyncio.sleep(0)

    def row(self, name):
        return next(row for row in self.service.describe() if row["name"] == name)

    def total(self, column):
        return sum(row[column] for row in self.service.describe())


@asynccontextmanager
async def world(*args, **options):
    made = RunnerHarness(*args, **options)
    async with made.service:
        yield made


async def test_scenario_2_the_scheduler_skips_sources_of_an_exhausted_provider(tmp_path):
    """295 of 300 used, ten sources due: five are queued, five skipped; a minute later these run."""
    sources = [source(f"s{i}", f"https://fmp.test/{i}") for i in range(10)]
    async with world(tmp_path, sources) as here:
        with Limiter(next(iter(here.service.gate.providers)).policy, store=here.store) as others:
            others.try_acquire("fmp.test", 295)
        await here.cycle()
        assert here.fetched == [f"/{i}" for i in range(5)]
        assert [row["skipped"] for row in here.service.describe()] == [0] * 5 + [1] * 5
        assert here.total("failed") == here.total("requeued") == 0
        here.clock.advance(60)
        await here.cycle()
        assert sorted(here.fetched) == [f"/{i}" for i in range(10)]


async def test_a_permit_lost_between_the_two_checks_is_not_a_failure(tmp_path):
    """The scheduler saw room, others took it, the worker is denied: RateLimitExceeded, and queued again."""
    async with world(tmp_path, [source("a", retries=1)], {**FMP, "limit": 1}) as here:
        others = Limiter(next(iter(here.service.gate.providers)).policy, store=here.store)
        chosen = await here.service.scheduler.choose(here.service.now(), 10)
        assert [each.name for each in chosen] == ["a"]
        assert here.row("a")["state"] == "queued"
        assert others.try_acquire("fmp.test")
        await here.service.fetch_source(chosen[0])  # the worker's turn
        row = here.row("a")
        assert (row["requeued"], row["failed"], row["ok"], row["attempt"], row["state"]) == (1, 0, 0, 0, "idle")
        assert row["due"] == START * 1_000_000  # it keeps its place
        here.clock.advance(60)
        await here.cycle()
        assert (here.row("a")["ok"], here.fetched) == (1, ["/x"])
        others.close()


async def test_a_429_of_the_provider_is_not_a_failure(tmp_path):
    answers = iter([httpx.Response(429, headers={"Retry-After": "30"}), httpx.Response(200)])
    async with world(tmp_path, [source("a")], respond=lambda _request: next(answers)) as here:
        await here.cycle()
        assert (here.row("a")["requeued"], here.row("a")["failed"]) == (1, 0)
        here.clock.advance(29)
        await here.cycle()
        assert len(here.fetched) == 1  # frozen: the scheduler does not even queue it
        here.clock.advance(1)
        await here.cycle()
        assert here.row("a")["ok"] == 1


async def test_a_429_of_a_host_without_a_provider_backs_off_like_a_failure(tmp_path):
    async with world(
        tmp_path, [source("a", "https://free.test/")], respond=lambda _request: httpx.Response(429)
    ) as here:
        await here.cycle()
        assert (here.row("a")["failed"], here.row("a")["provider"]) == (1, None)


@pytest.mark.parametrize("wrong", [httpx.Response(500), httpx.ReadTimeout("slow"), httpx.ConnectError("gone")])
async def test_failures_back_off_and_are_counted_apart(tmp_path, wrong):
    def respond(_request):
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    async with world(tmp_path, [source("a", retries=3)], respond=respond) as here:
        waits = []
        for _ in range(5):
            before = here.clock.now()
            await here.cycle()
            waits.append(round(here.row("a")["due"] / 1e6 - before))
            here.clock.advance(waits[-1])
        assert waits == [5, 10, 20, 3600 - 35, 5]  # three more tries, then when it is due anyway
        assert (here.row("a")["failed"], here.row("a")["ok"], here.row("a")["requeued"]) == (5, 0, 0)


async def test_an_unexpected_error_is_a_failure_of_that_source_only(tmp_path, caplog):
    def respond(request):
        if request.url.path == "/bad":
            raise ArithmeticError("a bug in a transport")
        return httpx.Response(200)

    sources = [source("bad", "https://fmp.test/bad"), source("good", "https://fmp.test/good")]
    async with world(tmp_path, sources, respond=respond) as here:
        await here.cycle()
        assert (here.row("bad")["failed"], here.row("bad")["state"], here.row("good")["ok"]) == (1, "idle", 1)
        assert "a bug in a transport" in caplog.text


async def test_sources_of_one_provider_take_turns_and_none_starves(tmp_path):
    """Forty sources that each want more than there is: after a long time none is more than a turn ahead."""
    sources = [source(f"s{i:02}", f"https://fmp.test/{i}", "1s") for i in range(40)]
    async with world(tmp_path, sources, {**FMP, "limit": 7}) as here:
        for _ in range(200):
            await here.cycle()
            here.clock.advance(6)
        counts = [row["ok"] for row in here.service.describe()]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == pytest.approx(7 * 20, abs=8)  # and all of the quota was used


async def test_a_higher_priority_goes_first_but_does_not_starve_others(tmp_path):
    sources = [source("low", "https://fmp.test/low", "1s"), source("high", "https://fmp.test/high", "1s", priority=3)]
    async with world(tmp_path, sources, {**FMP, "limit": 1, "period": "10s"}) as here:
        for _ in range(40):
            await here.cycle()
            here.clock.advance(10)
        assert here.fetched[0] == "/high"
        assert here.row("low")["ok"] >= 10


async def test_an_unlimited_source_runs_beside_an_exhausted_provider(tmp_path):
    sources = [source("a"), source("b"), source("free", "https://free.test/free")]
    async with world(tmp_path, sources, {**FMP, "limit": 1}) as here:
        await here.cycle()
        assert sorted(here.fetched) == ["/free", "/x"]


async def test_adding_a_source_reports_whether_it_is_limited(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path, []) as here:
        assert here.service.add(source("a")) == "added a: limited by provider fmp.test (300/1m sliding_log)"
        said = here.service.add(source("b", "https://free.test/"))
        assert said == "added b: no provider is configured for free.test: it runs without rate limiting"
        assert said in caplog.text
        assert here.service.add(source("a", interval="5m")).startswith("replaced a: ")
        assert here.row("a")["schedule"] == "every 5m"


async def test_bodies_go_to_files_a_database_or_a_webhook(tmp_path):
    def respond(request):
        if request.url.host == "hook.test":
            return httpx.Response(200 if request.content == b"[1]" else 500)
        return httpx.Response(200, json=[1])

    sources = [
        source("file", "https://fmp.test/1", to={"files": "prices"}),
        source("row", "https://fmp.test/2", to={"sqlite": "prices.db"}),
        source("hook", "https://fmp.test/3", to={"webhook": "https://hook.test/in"}),
    ]
    async with world(tmp_path, sources, respond=respond) as here:
        await here.cycle()
        assert here.total("ok") == 3
        (path,) = (tmp_path / "data" / "prices" / "file").iterdir()
        assert (path.read_bytes(), path.suffix) == (b"[1]", ".json")
        db = sqlite3.connect(tmp_path / "data" / "prices.db")
        assert db.execute("SELECT source, status, content_type, body FROM bodies").fetchall() == [
            ("row", 200, "application/json", b"[1]")
        ]
        db.close()
        assert here.fetched.count("/in") == 1


async def test_a_body_that_cannot_be_stored_is_a_failure(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "taken").write_text("a file, no folder")
    async with world(tmp_path, [source("a", to={"files": "taken"})]) as here:
        await here.cycle()
        assert here.row("a")["failed"] == 1
        assert "the body was not stored" in here.row("a")["last_result"]


async def test_the_runner_wakes_up_when_a_source_is_due(tmp_path):
    async with world(tmp_path, [source("a", interval="10m"), source("b", interval="15m")]) as here:
        task = asyncio.create_task(here.service.run())
        for _ in range(31):
            await asyncio.sleep(0)
            while here.service.tasks:  # until it is quiet
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            here.clock.advance(60)
        here.service.stop()
        await task
        assert here.row("a")["ok"] == 4
        assert here.row("b")["ok"] == 3


async def test_a_graceful_stop_lets_requests_end_and_queues_the_rest_again(tmp_path):
    started, finish = asyncio.Event(), asyncio.Event()

    async def slow(request):
        started.set()
        await (finish.wait() if request.url.path == "/quick" else asyncio.Event().wait())
        return httpx.Response(200)

    sources = [source("quick", "https://fmp.test/quick"), source("stuck", "https://fmp.test/stuck")]
    async with world(tmp_path, sources, respond=slow) as here:
        task = asyncio.create_task(here.service.run(stop_within=0.2))
        await started.wait()
        while len(here.fetched) < 2:
            await asyncio.sleep(0)
        here.service.stop()
        finish.set()
        await task
        assert (here.row("quick")["ok"], here.row("stuck")["ok"]) == (1, 0)
        assert here.row("stuck")["state"] == "idle"
        assert here.row("stuck")["due"] == START * 1_000_000  # due at once at the next start
    async with world(tmp_path, sources, clock=here.clock, store=here.store) as again:
        await again.cycle()
        assert again.fetched == ["/stuck"]
        assert again.service.ledger.unsettled() == []  # it was not killed


async def test_requests_in_flight_at_a_crash_are_charged_again_and_reported(tmp_path, caplog):
    """Charged at the start, and in place of that after the grace: one permit more than was sent, for a period."""
    clock = ManualClock(START)
    store = SQLiteStore(tmp_path / "quota.db", clock=clock)
    provider = {**FMP, "limit": 10}
    stuck = asyncio.Event()

    async def never(_request):
        stuck.set()
        await asyncio.Event().wait()

    first = RunnerHarness(tmp_path, [source("a")], provider, never, clock=clock, store=store)
    task = asyncio.create_task(first.service.start_due())  # killed in the middle of it
    await stuck.wait()
    await task
    running = SourceLedger(tmp_path / "data" / "sources.db")
    assert running.record("a").state == "running"
    running.close()

    async with world(tmp_path, [source("a")], provider, clock=clock, store=store, grace=5) as second:
        clock.advance(50)
        settling = await second.service.recover()  # the first step of run
        policy = next(iter(second.service.gate.providers)).policy
        limiter = Limiter(policy, store=store)
        assert limiter.usage("fmp.test")["1m"].used == 2
        assert "1 requests may have been in flight" in caplog.text
        assert "up to 1 permits of fmp.test stay unused for one period" in second.service.recovered[0]
        while not clock._alarms:  # noqa: SLF001 - until the grace is waited for
            await asyncio.sleep(0)
        clock.advance(5)
        await settling
        assert second.service.ledger.unsettled() == []
        clock.advance(5)  # a minute after the request was sent: its own charge is gone
        assert limiter.usage("fmp.test")["1m"].used == 1
        clock.advance(54.999999)
        assert limiter.usage("fmp.test")["1m"].used == 1
        clock.advance(0.000001)
        assert limiter.usage("fmp.test")["1m"].used == 0
        limiter.close()
    for pending in first.service.tasks:  # what a kill would have ended
        pending.cancel()
    await asyncio.gather(*first.service.tasks, return_exceptions=True)
    await first.service.close()
    store.close()


async def test_stored_state_contains_no_urls_headers_or_keys(tmp_path):
    provider = {**FMP, "api_key": "hunter2", "key": {"query": "apikey"}}
    secret = source("a", "https://fmp.test/x?token=hunter3", headers={"Authorization": "hunter4"})
    async with world(tmp_path, [secret], provider) as here:
        await here.cycle()
        assert here.row("a")["ok"] == 1
        assert "hunter" not in str(here.service.describe())
    kept = b"".join(path.read_bytes() for path in (tmp_path / "data").iterdir() if path.is_file())
    assert b"hunter" not in kept
    assert (tmp_path / "data" / "sources.db").stat().st_mode & 0o777 == 0o600


async def test_the_quota_is_kept_against_a_real_server(tmp_path):
    with QuotaServer(20, 0.5) as server:
        providers = Providers.of({"domain": "127.0.0.1", "limit": 20, "period": "500ms"})
        sources = [source(f"s{i}", f"{server.url}/{i}", "10ms") for i in range(8)]
        transport = httpx.AsyncHTTPTransport(verify=QUICK)
        async with SourceRunner(providers, sources, data=tmp_path / "data", transport=transport) as service:
            running = asyncio.create_task(service.run())
            while len(server.requests) < 50:
                await asyncio.sleep(0.01)
            service.stop()
            await running
        assert set(server.statuses) == {200}


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="workers: must be an integer"):
        SourceRunner(Providers.of(FMP), data=tmp_path, workers=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        SourceRunner(Providers.of(FMP), data=tmp_path / "file" / "folder")
