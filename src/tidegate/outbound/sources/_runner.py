"""Runs the scheduler and the workers until stopped.

**After a kill -9.** Every permit is in the store before its request is sent, and every request in the ledger before its
permit is requested. Requests that were in flight may have arrived or not, at an unknown time: the next service charges
them again when it starts, and replaces that charge once more after `grace` seconds. So a quota is never exceeded; at
most one permit per request in flight stays unused, for one period, and the service logs that.

**While the ledger cannot be written**, because the disk is full or the file is locked, no request is sent: sources are
`paused`, requests in flight end, and their results are kept in memory until the ledger can be written.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import httpx

from tidegate._limiter.limiter import seconds
from tidegate._runtime.clock import TaskSignal
from tidegate._runtime.files import make_private_folder
from tidegate._runtime.suggestions import MAX_COMPARED_LENGTH, did_you_mean
from tidegate._runtime.urls import redact
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.outbound.httpx import AsyncRateLimitTransport
from tidegate.outbound.sources._fetch import NO_STORE, FetchResult, FetchStatus, PermitObserver, fetch
from tidegate.outbound.sources._ledger import SourceLedger
from tidegate.outbound.sources._schedule import Interval
from tidegate.outbound.sources._scheduler import DEFAULT_INTERVAL, Scheduler, to_outbound_request

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from tidegate._runtime.clock import Clock
    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.outbound._quota.gate_options import CommonGateOptions
    from tidegate.outbound.sources._ledger import SourceRow, UnsettledRequest
    from tidegate.outbound.sources._source import Source

log: logging.Logger = logging.getLogger("tidegate.outbound")

EXHAUSTED_CHECK_INTERVAL: Final = 1.0  # seconds between two checks of sources whose provider is exhausted
MAX_SLEEP: Final = 60 * SECOND  # a change of the wall clock is noticed after that


class SourceRunner:
    """Fetches sources on their schedules. Use it as an async context manager, and `run` it."""

    def __init__(
        self,
        providers: Providers,
        sources: Iterable[Source] = (),
        *,
        data: str | Path,
        store: str | None = None,
        workers: int = 8,
        cycle: float = EXHAUSTED_CHECK_INTERVAL,
        grace: float = 1.0,
        interval: float = DEFAULT_INTERVAL.every / SECOND,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[CommonGateOptions],
    ) -> None:
        """Store all state in the folder `data`; quotas are counted in `store`, if one is given.

        A source without a schedule is fetched every `interval` seconds.
        """
        if not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"must be an integer of at least 1, not {workers!r}", field="workers")
        every = round(seconds("interval", interval) * SECOND)
        if every < 1:
            raise ConfigError(f"must be above 0 seconds, not {interval!r}", field="interval")
        self.data: Path = Path(data)
        try:
            make_private_folder(self.data)
        except OSError as error:
            raise ConfigError(f"cannot be created: {error.strerror or error}", file=str(data)) from None
        # Permits are written before use: a killed process loses nothing, whatever SQLite's `synchronous` is.
        default = f"sqlite:///{(self.data / 'quota.db').absolute()}"
        store_url = store or f"{default}?deadline=5s"
        self.store_url: str = str(store or default)  # where permits are counted, for display
        inner = PermitObserver(transport or httpx.AsyncHTTPTransport())
        self._transport = AsyncRateLimitTransport(providers, store_url, inner, timeout=0, **options)
        self.gate: AsyncGate = self._transport.gate
        self.clock: Clock = self.gate.clock
        # opened last, after the checks that may raise
        self.ledger: SourceLedger = SourceLedger(self.data / "sources.db")
        self._cycle = round(cycle * SECOND)
        self.scheduler: Scheduler = Scheduler(self.ledger, self.gate, self._cycle, Interval(every))
        self.recovered: list[str] = []
        self.problems: tuple[str, ...] = ()  # of files of sources
        self.paused: str | None = None  # why nothing is fetched
        self._workers = workers
        self._grace = round(grace * SECOND)
        self.tasks: set[asyncio.Task[None]] = set()  # of workers that fetch a source
        self._stopping = False
        self._wake: TaskSignal | None = None
        for source in sources:
            self.scheduler.add(source, self.now())
            if source.schedule is None:
                log.info("%s: %s", source.name, self._describe_default(source))
        self.ledger.save_now()

    def now(self) -> int:
        """Return the time, in microseconds since 1970."""
        return self.clock.ns() // 1000

    # ---- running -----------------------------------------------------------------------------------------------------

    async def run(self, stop_within: float = 10.0) -> None:
        """Fetch until `stop` is called; then wait up to `stop_within` seconds for requests in flight."""
        self._wake = TaskSignal()
        settling = await self._recover_when_stored()
        try:
            while not self._stopping:
                self._wake.clear()
                await self.start_due()
                if not self._stopping:
                    await self.clock.wait_async(self._wake, self.clock.steady() + self._sleep_time())
        finally:
            await self._drain(stop_within)
            if settling is not None:
                settling.cancel()
                with suppress(asyncio.CancelledError):
                    await settling
            if not await self._save():
                log.error(
                    "the last results of sources are not stored: requests that were in flight are charged again at the "
                    "next start"
                )

    async def _recover_when_stored(self) -> asyncio.Task[None] | None:
        """Recover, as soon as the stores are available; None: nothing is left to settle, or the runner was stopped."""
        while True:
            try:
                return await self.recover()
            except StoreUnavailable as error:
                self._pause_because(error)
            if self._stopping:
                return None
            await self.clock.wait_async(self._wake or TaskSignal(), self.clock.steady() + self._cycle)

    def _pause_because(self, error: StoreUnavailable) -> None:
        if self.paused is None:
            log.error("sources are paused, decisions are not: %s; fetching resumes when this is repaired", error)
        self.paused = str(error)

    async def _save(self) -> bool:
        """Write the ledger; returns whether that succeeded, and pauses if not."""
        try:
            await self.ledger.save()
        except StoreUnavailable as error:
            self._pause_because(error)
            return False
        return True

    async def health(self) -> dict[str, object]:
        """Return whether sources are fetched: `ok`, `paused` (none is) or `degraded` (not all are), and why not."""
        if self.paused is not None:
            return {"status": "paused", "reason": self.paused}
        if self.gate.store.metrics().get("store_lost"):
            return {"status": "degraded", "reason": f"{NO_STORE}: on_store_error of each provider decides"}
        return {"status": "ok"}

    def _sleep_time(self) -> int:
        """Return how long to sleep: until a source is due, or until a worker may be free."""
        if self.paused is not None:
            return self._cycle
        due = self.scheduler.next_due()
        ahead = MAX_SLEEP if due is None else due - self.now()
        return min(MAX_SLEEP, ahead) if ahead > 0 else self._cycle

    async def start_due(self) -> None:
        """Start to fetch the sources that are due, each in a task of its own, as `run` does in each of its cycles."""
        if not await self._save():
            return
        if self.paused is not None:
            log.warning("sources are fetched again: their state is stored")
            self.paused = None
        for source in await self.scheduler.choose(self.now(), self._workers - len(self.tasks)):
            task = asyncio.create_task(self.fetch_source(source))
            self.tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self._wake is not None:
            self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("a worker that fetches sources failed", exc_info=task.exception())

    async def fetch_source(self, source: Source) -> None:
        """Fetch one source that was chosen, and record the result."""
        account = self.gate.account_of(to_outbound_request(source))
        self.ledger.begin(source.name, None if account is None else (account.provider.domain, account.key))
        try:
            if not await self._save():
                self.scheduler.requeue(source, self.now())
                return
            outcome = await fetch(
                self._transport, source, self.data, self.now(), partial(self.scheduler.permit_requested, source)
            )
        except asyncio.CancelledError:
            self.scheduler.requeue(source)
            raise
        except Exception as error:
            # Any other error is a failure of this source: it must not stay in flight indefinitely.
            log.exception("%s failed with an unexpected error", source.name)
            outcome = FetchResult(FetchStatus.FAILED, type(error).__name__)
        finally:
            self.scheduler.permit_requested(source)
        self._report(source, outcome)
        await self._save()

    def _report(self, source: Source, outcome: FetchResult) -> None:
        if outcome.status is FetchStatus.RATE_LIMIT_EXCEEDED:
            self.scheduler.rate_limited(source, self.now(), outcome.wait, outcome.result)
            log.info("%s: %s: queued again", source.name, outcome.result)
        elif outcome.status is FetchStatus.OK:
            self.scheduler.succeeded(source, self.now(), outcome.result)
        else:
            self.scheduler.failed(source, self.now(), outcome.result)
            log.warning("%s failed: %s", source.name, outcome.result)

    def stop(self) -> None:
        """Queue nothing more; `run` ends when the requests in flight have ended."""
        self._stopping = True
        if self._wake is not None:
            self._wake.set()

    async def _drain(self, within: float) -> None:
        """Wait for requests in flight; those that do not end in time are queued for the next start."""
        waiting = set(self.tasks)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=within)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            if late:
                log.warning("%d requests did not end within %g s and are queued again", len(late), within)

    # ---- after a crash -----------------------------------------------------------------------------------------------

    async def recover(self) -> asyncio.Task[None] | None:
        """Charge the requests that were in flight when a runner was killed; returns the task that settles them."""
        await self.ledger.recover(self.now())
        found = self.ledger.unsettled()
        if not found:
            return None
        await self._settle(found)
        await self.ledger.save()
        domains = sorted({each.domain for each in found})
        message = (
            f"{len(found)} requests may have been in flight when a service was killed; they are charged again, "
            f"so up to {len(found)} permits of {', '.join(domains)} stay unused for one period"
        )
        log.warning("%s", message)
        self.recovered.append(message)
        return asyncio.create_task(self._settle_later())

    async def _settle_later(self) -> None:
        pause = self._grace
        while self.ledger.unsettled():
            await self.clock.wait_async(TaskSignal(), self.clock.steady() + pause)
            with suppress(StoreUnavailable):  # tried again
                await self._settle(self.ledger.unsettled())
            pause = self._cycle
        await self._save()

    async def _settle(self, found: list[UnsettledRequest]) -> None:
        """Charge requests again; those that had enough time to arrive are settled with that."""
        for each in found:
            late = self.now() - each.since >= self._grace
            await self._charge_again(each)
            if late:
                self.ledger.settle(each.number)

    async def _charge_again(self, each: UnsettledRequest) -> None:
        account = self._account(each)
        if account is None:
            self.ledger.settle(each.number)  # its provider was removed, and its limits with it
            return
        at = await self.gate.run(account.charge_unsettled_flow(1, each.charged_at))
        if at is not None:
            self.ledger.charged(each.number, at)

    def _account(self, each: UnsettledRequest) -> Account | None:
        provider = self.gate.providers.match_host(each.domain)
        if provider is None or provider.domain != each.domain:
            return None
        return self.gate.planner.open_account(provider, each.key)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def add(self, source: Source) -> str:
        """Add or replace a source; returns a description of what limits it."""
        verb = "replaced" if source.name in self.scheduler.sources else "added"
        self.scheduler.add(source, self.now())
        if self._wake is not None:
            self._wake.set()
        description = f"{verb} {source.name}: {self.gate.providers.explain(source.url)}"
        if source.schedule is None:
            description = f"{description}; {self._describe_default(source)}"
        log.info("%s", description)
        return description

    def remove(self, name: str) -> str:
        """Remove a source; a request in flight ends by itself. Returns a description."""
        self._check_known(name)
        self.scheduler.remove(name)
        log.info("removed %s", name)
        return f"removed {name}"

    def run_now(self, name: str) -> str:
        """Fetch a source as soon as its provider has capacity; returns a description."""
        self._check_known(name)
        self.scheduler.run_now(name, self.now())
        if self._wake is not None:
            self._wake.set()
        return f"{name} is due now: {self.gate.providers.explain(self.scheduler.sources[name].url)}"

    def _check_known(self, name: str) -> None:
        known = self.scheduler.sources
        if name not in known:
            advice = did_you_mean(name, known) or f"known sources are {', '.join(sorted(known)[:20]) or 'none'}"
            raise ConfigError(f"there is no source {name[:MAX_COMPARED_LENGTH]!r}: {advice}")

    def _describe_default(self, source: Source) -> str:
        return (
            f"it has neither an interval nor a cron expression, so it is fetched {self.scheduler.schedule_of(source)}"
        )

    def describe(self) -> list[SourceRow]:
        """Return a row per source: next run, last result, and counts of skipped and requeued runs."""
        rows = self.scheduler.describe()
        for row in rows:
            row["url"] = redact(row["url"])
        return rows

    async def close(self) -> None:
        """Close everything."""
        await self._transport.aclose()
        await asyncio.to_thread(self.ledger.close)

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()
