"""Replays requests against rules: decides about each of them in the time of the log.

    LogStream ──► rows in the order of time ──► ReplayRules (the code that enforces them) ──► Tally

Several rules can be replayed side by side: a row has what each of them knows of its sender and its subject.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from tidegate.core._bounds import SECOND, ceil_div
from tidegate.plan._rules.base import UNLIMITED
from tidegate.plan._tally import Counts, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidegate.core._limit import Limit
    from tidegate.plan._logs.batch import LogSender, LogSubject
    from tidegate.plan._logs.stream import LogStream, Row
    from tidegate.plan._rules.base import Outcome, ReplayRules, ReplaySubject
    from tidegate.plan._tally import ClientCounts

MAX_SENDERS: Final = 1_000_000  # that are kept; the cache is cleared when it is full


class KnownSender(NamedTuple):
    """A sender: its key in the rules, and its counts."""

    key: Any
    counts: ClientCounts


class KnownSubject(NamedTuple):
    """A subject: what it is to the rules, and the counts of its endpoint."""

    subject: ReplaySubject
    endpoint: Counts


class ReplayResult(NamedTuple):
    """The outcome of a replay, for a report; it can be sent to another process."""

    tally: Tally
    limits: Mapping[str, tuple[Limit, ...]]
    notes: Sequence[str]
    retried: Counts
    given_up: int

    def merge(self, other: ReplayResult) -> ReplayResult:
        """Return the result of the clients of both."""
        self.tally.merge(other.tally)
        self.retried.add(other.retried)
        return self._replace(given_up=self.given_up + other.given_up)


class Replay:
    """Decides about requests, and counts the outcomes.

    With `retries`, a denied client comes back after its `Retry-After`, up to so many times for each request; these
    retries are counted apart, and take permits like the requests of the log. `place` is its place among the replays
    that share the rows.
    """

    def __init__(self, rules: ReplayRules, *, retries: int = 0, place: int = 0) -> None:
        """Replay against these rules."""
        self.rules: ReplayRules = rules
        self.tally: Tally = Tally()
        self.retried: Counts = Counts()
        self.given_up: int = 0
        self._retries = retries
        self._place = place
        self._pending: list[tuple[int, int, int, Row]] = []  # retries: when, a number, how many before, the request
        self._order = count()
        self._senders: dict[LogSender, KnownSender] = {}

    @property
    def result(self) -> ReplayResult:
        """The outcome."""
        return ReplayResult(self.tally, self.rules.limits, self.rules.notes, self.retried, self.given_up)

    def find_sender(self, sender: LogSender) -> KnownSender:
        """Return what is known of a sender."""
        found = self._senders.get(sender)
        if found is None:
            if len(self._senders) >= MAX_SENDERS:
                self._senders.clear()
            key = self.rules.find_key(sender)
            found = self._senders[sender] = KnownSender(key, self.tally.client(self.rules.name_of(key)))
        return found

    def find_subject(self, subject: LogSubject) -> KnownSubject:
        """Return what is known of a subject."""
        found = self.rules.find(subject)
        return KnownSubject(found, self.tally.endpoint(found.endpoint))

    def decide(self, row: Row) -> Outcome:
        """Decide about a row, after everything that is due before it."""
        rules = self.rules
        now, senders, subjects, status, duration, cost = row
        key, counts = senders[self._place]
        subject, endpoint = subjects[self._place]
        if self._pending and self._pending[0][0] <= now:
            self._retry_until(now)
        due = rules.due
        while due is not None and due <= now:
            rules.clock.set(due)
            rules.settle()
            due = rules.due
        rules.clock.set(now)
        outcome: Outcome = subject.decide(key, status, duration, cost) if subject.limited else UNLIMITED
        self.tally.count(now, counts, endpoint, outcome)
        if self._retries and not outcome.allowed:
            self._schedule(now, 0, row, outcome)
        return outcome

    def finish(self) -> None:
        """Make the retries that are left, and close the rules."""
        while self._pending:
            self._retry_until(self._pending[0][0])
        self.rules.close()

    def _schedule(self, now: int, before: int, row: Row, outcome: Outcome) -> None:
        wait = outcome.retry
        if wait is None or before >= self._retries:
            self.given_up += 1
            return
        seconds = max(1, ceil_div(wait, SECOND))  # as the header Retry-After says it
        heapq.heappush(self._pending, (now + seconds * SECOND, next(self._order), before + 1, row))

    def _retry_until(self, until: int) -> None:
        while self._pending and self._pending[0][0] <= until:
            now, _, before, row = heapq.heappop(self._pending)
            _, senders, subjects, status, duration, cost = row
            self.rules.clock.set(now)
            outcome = subjects[self._place][0].decide(senders[self._place][0], status, duration, cost)
            self.retried.requests += 1
            if not outcome.allowed:
                self.retried.denied += 1
                self._schedule(now, before, row, outcome)


class Replays:
    """Several replays of the same rows."""

    def __init__(self, replays: Sequence[Replay], shard: int = 0, shards: int = 1) -> None:
        """Feed these, each of which knows its place; with several shards, only the clients of one of them."""
        self._shard, self._shards = shard, shards
        self.replays: Sequence[Replay] = replays

    def find_sender(self, sender: LogSender) -> tuple[KnownSender, ...] | None:
        """Return what each knows of a sender; None: it is of another shard."""
        if self._shards > 1 and not self._is_own(sender):
            return None
        return tuple([replay.find_sender(sender) for replay in self.replays])

    def _is_own(self, sender: LogSender) -> bool:
        """Return whether the key of a sender is of this shard."""
        rules = self.replays[0].rules
        name = rules.name_of(rules.find_key(sender))
        return crc32(name.encode("utf-8", "surrogateescape")) % self._shards == self._shard

    def find_subject(self, subject: LogSubject) -> tuple[KnownSubject, ...]:
        """Return what each knows of a subject."""
        return tuple([replay.find_subject(subject) for replay in self.replays])

    def run(self, stream: LogStream) -> None:
        """Decide about all rows of logs."""
        for rows in stream.read(self):
            self.feed(rows)
        self.finish()

    def feed(self, rows: Iterable[Row]) -> None:
        """Decide about rows."""
        decides = [replay.decide for replay in self.replays]
        for row in rows:
            for decide in decides:
                decide(row)

    def finish(self) -> None:
        """Finish all of them."""
        for replay in self.replays:
            replay.finish()
