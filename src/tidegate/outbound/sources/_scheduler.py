"""Which sources may be fetched now: the first of the two checks of capacity.

A source that is due and whose provider has capacity is queued. If its provider is exhausted, the source is skipped and
checked again in the next cycle, or sooner if the provider will have capacity sooner. Queued sources that have not
requested their permit yet count as taken, so no more are queued than can be sent.

Fair: sources are ordered by when they became due, moved forward by `AGEING` seconds for each step of priority. A
skipped source keeps its position, so it precedes all that become due after it, and none starves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy.durations import format_duration
from tidegate.core._bounds import SECOND
from tidegate.core._decision import LocalDecision
from tidegate.errors import StoreUnavailable
from tidegate.outbound._quota.exchange import OutboundRequest
from tidegate.outbound.sources._fetch import NO_STORE
from tidegate.outbound.sources._ledger import SourceRow
from tidegate.outbound.sources._schedule import Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tidegate.core import Decision
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.outbound.sources._ledger import SourceLedger
    from tidegate.outbound.sources._schedule import Schedule
    from tidegate.outbound.sources._source import Source

AGEING: Final = 5 * SECOND
DEFAULT_INTERVAL: Final = Interval(3600 * SECOND)  # of sources without a schedule
FIRST_RETRY_PAUSE: Final = 5 * SECOND  # after the first failure; doubles
MAX_RETRY_PAUSE: Final = 3600 * SECOND


class DueSource(NamedTuple):
    """A source that is due, and since when."""

    source: Source
    due: int


class NoCapacity(NamedTuple):
    """Why an account cannot be charged now, and after how many seconds to check again, if that is known."""

    reason: str
    wait: float | None = None


class Scheduler:
    """Keeps track of when sources are due. `now` is an argument, in microseconds since 1970."""

    def __init__(
        self,
        ledger: SourceLedger,
        gate: AsyncGate,
        cycle: int = SECOND,
        interval: Interval = DEFAULT_INTERVAL,
    ) -> None:
        """Record events in a ledger; check capacity with a gate. `cycle` is the length of a cycle in microseconds.

        Sources without a schedule are due every `interval`.
        """
        self._cycle = cycle
        self._interval = interval
        self._ledger = ledger
        self._gate = gate
        self.sources: dict[str, Source] = {}
        self._due: dict[str, int] = {}
        self._planned: dict[str, int] = {}  # the scheduled time; a retry after a failure comes earlier
        self._attempts: dict[str, int] = {}
        self._not_before: dict[str, int] = {}  # skipped or requeued: until when
        self._skip_reasons: dict[str, str] = {}  # of sources that were skipped when they were last checked
        self._busy: set[str] = set()
        self._queued: dict[str, str] = {}  # permit not requested yet: the account of each
        self._taken: Counter[str] = Counter()  # ... and how many at each account

    def schedule_of(self, source: Source) -> Schedule:
        """Return the schedule of a source, or the default interval."""
        return self._interval if source.schedule is None else source.schedule

    def add(self, source: Source, now: int) -> None:
        """Add a source: a new one is due now, a known one at its recorded time."""
        record = self._ledger.record(source.name)
        due = now if record is None else min(record.due, self.schedule_of(source).after(now, now))
        record = self._ledger.add(source.name, due)
        self.sources[source.name] = source
        self._due[source.name] = self._planned[source.name] = record.due
        self._attempts[source.name] = record.attempt

    def remove(self, name: str) -> None:
        """Remove a source; a request in flight ends by itself."""
        self.sources.pop(name, None)
        self._due.pop(name, None)
        self._planned.pop(name, None)
        self._not_before.pop(name, None)
        self._skip_reasons.pop(name, None)

    def run_now(self, name: str, now: int) -> None:
        """Make a source due now; the provider's quota still applies."""
        self._due[name] = min(self._due[name], now)
        self._not_before.pop(name, None)

    def next_due(self) -> int | None:
        """Return when to check the next source that is not in flight."""
        waiting = ((name, due) for name, due in self._due.items() if name not in self._busy)
        return min((max(due, self._not_before.get(name, 0)) for name, due in waiting), default=None)

    def due_sources(self, now: int) -> list[DueSource]:
        """List the sources that are due, in order."""
        found = [DueSource(self.sources[name], due) for name, due in self._due.items() if due <= now]
        found = [due_source for due_source in found if not self._is_waiting(due_source.source.name, now)]
        return sorted(
            found, key=lambda due_source: (due_source.due - due_source.source.priority * AGEING, due_source.source.name)
        )

    def _is_waiting(self, name: str, now: int) -> bool:
        return name in self._busy or self._not_before.get(name, 0) > now

    def _delay(self, name: str, now: int, wait: float | None) -> None:
        """Check a source again in the next cycle, or sooner."""
        self._not_before[name] = now + (self._cycle if wait is None else max(1, min(self._cycle, round(wait * SECOND))))

    async def choose(self, now: int, max_sources: int) -> list[Source]:
        """Queue sources that may be fetched now, up to `max_sources`; skip those whose provider has no capacity."""
        chosen: list[Source] = []
        exhausted: dict[str, NoCapacity] = {}
        for due_source in self.due_sources(now):
            if len(chosen) >= max_sources:
                break
            name, account = due_source.source.name, self.account(due_source.source)
            if account is not None:
                if account not in exhausted:
                    found = await self._check_capacity(due_source.source, self._taken[account] + 1)
                    if found is not None:
                        exhausted[account] = found  # later sources of this account wait behind this one
                if account in exhausted:
                    self._skip(name, now, exhausted[account])
                    continue
                self._taken[account] += 1
                self._queued[name] = account
            self._busy.add(name)
            self._skip_reasons.pop(name, None)
            self._ledger.note(name, state="queued")
            chosen.append(due_source.source)
        return chosen

    async def _check_capacity(self, source: Source, times: int) -> NoCapacity | None:
        """Return why this number of requests cannot be sent now; None: they can."""
        try:
            decision = await self._gate.peek(to_outbound_request(source), times)
        except StoreUnavailable:
            return NoCapacity(NO_STORE)
        return None if decision is None or decision.allowed else NoCapacity(skip_reason(decision), decision.retry_after)

    def _skip(self, name: str, now: int, why: NoCapacity) -> None:
        """Count a source that cannot be fetched in this cycle; nothing is written for that."""
        record = self._ledger.record(name)
        self._ledger.note(name, skipped=0 if record is None else record.skipped + 1)
        self._skip_reasons[name] = why.reason
        self._delay(name, now, why.wait)

    def account(self, source: Source) -> str | None:
        """Return the account that a source is charged to; None: no provider limits it."""
        found = self._gate.account_of(to_outbound_request(source))
        return None if found is None else found.resource

    def permit_requested(self, source: Source) -> None:
        """Record that a queued source has requested its permit, whatever the result; a second call has no effect."""
        account = self._queued.pop(source.name, None)
        if account is not None:
            self._taken[account] -= 1
            if self._taken[account] <= 0:
                del self._taken[account]

    # ---- results -----------------------------------------------------------------------------------------------------

    def rate_limited(self, source: Source, now: int, wait: float | None, result: str = "RateLimitExceeded") -> None:
        """Requeue: denied between the two checks. Not a failure; it stays due and keeps its position."""
        record = self._ledger.record(source.name)
        requeued = 1 if record is None else record.requeued + 1
        self._ledger.set(source.name, state="idle", last_at=now, last_result=result, requeued=requeued)
        self._delay(source.name, now, wait)
        self._busy.discard(source.name)

    def requeue(self, source: Source, now: int | None = None) -> None:
        """Requeue a source that was not sent: because the service stops, or until the cycle after `now`."""
        self._ledger.set(source.name, state="idle")
        if now is not None:
            self._delay(source.name, now, None)
        self._busy.discard(source.name)

    def succeeded(self, source: Source, now: int, result: str) -> None:
        """Fetch again at the next scheduled time."""
        due = self._planned[source.name] = self._plan(source, now)
        self._ended(source, now, result, "ok", 0, due)

    def failed(self, source: Source, now: int, result: str) -> None:
        """Retry with increasing pauses, up to `retries` times; then at the next scheduled time."""
        attempt = self._attempts.get(source.name, 0) + 1
        due = self._plan(source, now)
        soon = now + min(MAX_RETRY_PAUSE, FIRST_RETRY_PAUSE << min(attempt - 1, 20))
        if attempt <= source.retries and soon < due:
            due = soon
        else:
            attempt = 0
            self._planned[source.name] = due
        self._ended(source, now, result, "failed", attempt, due)

    def _plan(self, source: Source, now: int) -> int:
        """Return the next scheduled time of a source: by its present schedule, if it was replaced while in flight."""
        return self.schedule_of(self.sources.get(source.name, source)).after(
            min(now, self._planned.get(source.name, now)), now
        )

    def _ended(self, source: Source, now: int, result: str, column: str, attempt: int, due: int) -> None:
        count = {column: getattr(self._ledger.record(source.name), column) + 1}
        self._ledger.set(source.name, state="idle", attempt=attempt, due=due, last_at=now, last_result=result, **count)
        self._busy.discard(source.name)
        self._not_before.pop(source.name, None)
        if source.name in self._due:
            self._due[source.name] = due
            self._attempts[source.name] = attempt

    def describe(self, names: Iterable[str] | None = None) -> list[SourceRow]:
        """Return the rows that `tidegate sources` shows."""
        entries = self._ledger.records()
        rows: list[SourceRow] = []
        for name in sorted(self.sources if names is None else names):
            record, source = entries[name], self.sources[name]
            provider = self._gate.providers.match(source.url)
            rows.append(
                SourceRow(
                    **record._asdict(),  # type: ignore[typeddict-item]  # SourceRecord has the same fields and types
                    schedule=str(self.schedule_of(source)),
                    priority=source.priority,
                    url=source.url,
                    provider=provider.name if provider else None,
                    skip_reason=self._skip_reasons.get(name),
                )
            )
        return rows


def skip_reason(decision: Decision) -> str:
    """Describe why there is no capacity, and for how long."""
    if isinstance(decision, LocalDecision):
        return NO_STORE
    why = f"denied by {', '.join(decision.violated)}" if decision.violated else "paused after a refusal"
    wait = decision.retry_after
    return f"{why}, for {format_duration(wait)} more" if wait else why


def to_outbound_request(source: Source) -> OutboundRequest:
    """Describe a source's request as an OutboundRequest."""
    headers = {name.lower(): value for name, value in source.headers.items()}
    body = source.body.encode() if source.body else None
    look_up: Callable[[str], str | None] = lambda name: headers.get(name.lower())  # noqa: E731 - typed
    return OutboundRequest(
        source.method, source.url, look_up, lambda: body, replays=True, unreached=lambda _error: False
    )
