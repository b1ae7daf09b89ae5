"""The service: scheduler, workers and control endpoint, running until told to stop.

**After a kill -9.** Every permit is in the store before its request is sent, and every request in the ledger before its
permit is asked for. What was under way then may have arrived or not, and nobody knows when: the next service charges it
again at its start, and in place of that once more when `grace` seconds have passed. So a quota is never exceeded; at
most one permit per request that was under way stays unused, for one period, and the service says so.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.files import make_private_folder
from tidegate.outbound.httpx import AsyncRateLimitTransport
from tidegate.outbound.sources.fetch import FetchResult, FetchStatus, PermitObserver, fetch
from tidegate.outbound.sources.ledger import SourceLedger
from tidegate.outbound.sources.scheduler import Scheduler, call_of
from tidegate.urls import redact

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.outbound.providers.registry import Providers
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.sources.ledger import UnsettledRequest
    from tidegate.outbound.sources.source import Source

log = logging.getLogger(__name__)

EXHAUSTED_CHECK_INTERVAL: Final = 1.0  # seconds between two looks at sources whose provider is exhausted
MAX_SLEEP: Final = 60 * SECOND  # a wall clock that was set is noticed after that


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
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Any,  # noqa: ANN401 - those of AsyncGate
    ) -> None:
        """Keep everything in the folder `data`, unless a `store` says where quotas are counted."""
        if not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"must be a whole number from 1, not {workers!r}", field="workers")
        self.data = Path(data)
        try:
            make_private_folder(self.data)
        except OSError as error:
            raise ConfigError(f"cannot be made: {error.strerror or error}", file=str(data)) from None
        # Written ahead of use: a killed process loses nothing, whatever SQLite's `synchronous` is.
        where = store or f"sqlite:///{(self.data / 'quota.db').absolute()}?deadline=5s"
        inner = PermitObserver(transport or httpx.AsyncHTTPTransport())
        self._transport = AsyncRateLimitTransport(providers, where, inner, timeout=0, **options)
        self.gate = self._transport.gate
        self.clock = self.gate.clock
        self.ledger = SourceLedger(self.data / "sources.db")  # opened now, so after what may be refused
        self._cycle = round(cycle * SECOND)
        self.scheduler = Scheduler(self.ledger, self.gate, self._cycle)
        self.recovered: list[str] = []
        self._workers = workers
        self._grace = round(grace * SECOND)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._wake: TaskSignal | None = None
        for source in sources:
            self.scheduler.add(source, self.now())

    def now(self) -> int:
        """Tell the time, in microseconds since 1970."""
        return self.clock.ns() // 1000

    # ---- running -----------------------------------------------------------------------------------------------------

    async def run(self, stop_within: float = 10.0) -> None:
        """Fetch until `stop` is called; then let what is under way end, for so many seconds."""
        self._wake = TaskSignal()
        settling = await self._recover()
        try:
            while not self._stopping:
                self._wake.clear()
                await self._cycle_once()
                if not self._stopping:
                    await self.clock.wait_async(self._wake, self.clock.steady() + self._pause())
        finally:
            await self._drain(stop_within)
            if settling is not None:
                settling.cancel()
                with suppress(asyncio.CancelledError):
                    await settling

    def _pause(self) -> int:
        """Tell how long there is nothing to do: until something is due, or until a worker is free."""
        due = self.scheduler.next_due()
        ahead = MAX_SLEEP if due is None else due - self.now()
        return min(MAX_SLEEP, ahead) if ahead > 0 else self._cycle

    async def _cycle_once(self) -> None:
        """Queue what may be fetched; each source queued is a task of its own."""
        for source in await self.scheduler.choose(self.now(), self._workers - len(self._tasks)):
            task = asyncio.create_task(self._work(source))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._wake is not None:
            self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("a worker failed", exc_info=task.exception())

    async def _work(self, source: Source) -> None:
        """Be the worker of one task."""
        account = self.gate.account_of(call_of(source))
        self.ledger.begin(source.name, None if account is None else (account.provider.domain, account.key))
        try:
            outcome = await fetch(self._transport, source, self.data, self.now(), partial(self.scheduler.asked, source))
        except asyncio.CancelledError:
            self.scheduler.put_back(source)
            raise
        except Exception as error:
            # Whatever else goes wrong is this source's failure: it must not stay under way for ever.
            log.exception("%s failed in a way that was not foreseen", source.name)
            outcome = FetchResult(FetchStatus.FAILED, type(error).__name__)
        finally:
            self.scheduler.asked(source)
        self._report(source, outcome)

    def _report(self, source: Source, outcome: FetchResult) -> None:
        if outcome.status is FetchStatus.RATE_LIMIT_EXCEEDED:
            self.scheduler.exceeded(source, self.now(), outcome.wait)
            log.info("%s: %s, queued again", source.name, outcome.result)
        elif outcome.status is FetchStatus.OK:
            self.scheduler.succeeded(source, self.now(), outcome.result)
        else:
            self.scheduler.failed(source, self.now(), outcome.result)
            log.warning("%s failed: %s", source.name, outcome.result)

    def stop(self) -> None:
        """Queue nothing more; `run` ends when what is under way has ended."""
        self._stopping = True
        if self._wake is not None:
            self._wake.set()

    async def _drain(self, within: float) -> None:
        """Let requests under way end; what does not in time is queued again for the next start."""
        waiting = set(self._tasks)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=within)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            if late:
                log.warning("%d requests did not end within %g s and are queued again", len(late), within)

    # ---- after a crash -----------------------------------------------------------------------------------------------

    async def _recover(self) -> asyncio.Task[None] | None:
        self.ledger.recover(self.now())
        found = self.ledger.unsettled()
        if not found:
            return None
        await self._settle(found)
        domains = sorted({each.domain for each in found})
        message = (
            f"{len(found)} requests may have been under way when a service was killed; they are counted again, "
            f"so that up to {len(found)} permits of {', '.join(domains)} stay unused for one period"
        )
        log.warning("%s", message)
        self.recovered.append(message)
        return asyncio.create_task(self._settle_later())

    async def _settle_later(self) -> None:
        await self.clock.wait_async(TaskSignal(), self.clock.steady() + self._grace)
        await self._settle(self.ledger.unsettled())

    async def _settle(self, found: list[UnsettledRequest]) -> None:
        """Charge again; what has had time enough to arrive is settled with that."""
        for each in found:
            late = self.now() - each.since >= self._grace
            await self._charge_again(each)
            if late:
                self.ledger.settle(each.number)

    async def _charge_again(self, each: UnsettledRequest) -> None:
        account = self._account(each)
        if account is None:
            self.ledger.settle(each.number)  # its provider is gone, and with it its limits
            return
        at = await self.gate.run(account.charging_again(1, each.charged_at))
        if at is not None:
            self.ledger.charged(each.number, at)

    def _account(self, each: UnsettledRequest) -> Account | None:
        provider = self.gate.providers.match_host(each.domain)
        return None if provider is None or provider.domain != each.domain else self.gate.open(provider, each.key)

    # ---- what commands ask for ---------------------------------------------------------------------------------------

    def add(self, source: Source) -> str:
        """Add a source to the running service, or replace it; say whether it will be limited, and by what."""
        verb = "replaced" if source.name in self.scheduler.sources else "added"
        self.scheduler.add(source, self.now())
        if self._wake is not None:
            self._wake.set()
        said = f"{verb} {source.name}: {self.gate.providers.explain(source.url)}"
        log.info("%s", said)
        return said

    def describe(self) -> list[dict[str, Any]]:
        """Tell of each source when it runs next, what came of it last, what was skipped and queued again."""
        rows = self.scheduler.describe()
        for row in rows:
            row["url"] = redact(row["url"])
        return rows

    async def close(self) -> None:
        """Close everything."""
        await self._transport.aclose()
        self.ledger.close()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()
