"""The values that /metrics and /v1/overview show: of one process, or of all workers of a service together.

A process describes its current values in a `ProcessReport`. `merge_reports` combines the reports of several processes.
Counters are not in a report: see `tidegate.observe._counters`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND
from tidegate.observe._counters import CopiedCounts, RowKind
from tidegate.service._decisions.denied_keys import MAX_TOP, merge_top, place_of
from tidegate.service._decisions.near_limit import MAX_SAMPLES_PER_SECOND
from tidegate.service._decisions.row_selection import select_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._policy import Key
    from tidegate._runtime.clock import Clock
    from tidegate.service._decisions.stats import RecentDenial, Totals
    from tidegate.service._http.app import App

MAX_DENIALS: Final = 50
MAX_NEAR_LIMIT: Final = 12
MILLISECOND: Final = 1000  # microseconds
# Of the store, merged by maximum: all processes report the same fact.
MAXIMUM_METRICS: Final = ("store_lost", "processes", "share_ppm")
# Of the store, counted since the start of a process; all others are current values.
STORE_COUNTERS: Final = frozenset((
    *("transactions", "waits", "failures", "scripts", "calls", "refunded", "refunds_failed", "overflowed"),
    *("losses", "returns", "probes", "corrections_dropped"),
    *("allowed_without_store", "denied_without_store"),
))  # fmt: skip
LEASE_COUNTERS: Final = ("lease_granted_", "lease_used_", "lease_returned_", "lease_lost_")
STORE: Final = RowKind("store")  # by name


@dataclass
class ProcessReport:
    """The current values of one process."""

    process_id: int
    since: int  # milliseconds since 1970
    at: int  # steady time
    waiting: int = 0
    in_flight: int = 0
    waiting_by_policy: dict[str, int] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)
    near: list[dict[str, Any]] = field(default_factory=list)
    reset_keys: list[tuple[str, Key, int]] = field(default_factory=list)
    denials: list[dict[str, Any]] = field(default_factory=list)
    failed_checks: list[tuple[str, str]] = field(default_factory=list)  # of /readyz: kind of the problem, detail
    top: list[dict[str, Any]] = field(default_factory=list)  # the keys that were denied most, see `DeniedKey`
    denied: dict[str, tuple[int, int]] = field(default_factory=dict)  # in the last minute: denials and keys of policies


@dataclass
class ServiceStatus:
    """The current values of a service."""

    waiting: int
    in_flight: int
    waiting_by_policy: Counter[str]
    store: dict[str, int]
    near: list[dict[str, Any]]
    denials: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    top: list[dict[str, Any]]
    denied: dict[str, tuple[int, int]]


class StatusSource:
    """Where /metrics and /v1/overview get their values: of a service that runs in one process."""

    def __init__(self, app: App) -> None:
        """Show the values of this app."""
        self.app = app
        self.clock: Clock = app.decider.store.clock
        self.process_id: int = os.getpid()  # of the service: with several workers, their parent process
        self.started_at: int = self.clock.ns() // 1_000_000  # of the service, in milliseconds since 1970
        self._since = self.started_at  # of this process
        self._store_counts = CopiedCounts(app.decider.stats.counters, STORE)

    def other_reports(self) -> list[ProcessReport]:
        """Return the reports of the other workers."""
        return []

    def failed_checks(self) -> list[tuple[str, str]]:
        """Return why /readyz fails: the kinds of the problems, and their details."""
        others = (each for report in self.other_reports() for each in report.failed_checks)
        return [*self.app.failed_checks(), *self.unresponsive_workers(), *others]

    def unresponsive_workers(self) -> Iterable[tuple[str, str]]:
        """Return a failed check for each worker that hangs."""
        return ()

    def mark_viewed(self) -> None:
        """Record that a client reads the overview: keys near a limit are recorded for a while."""
        self.app.decider.stats.near_limit.samples_left = MAX_SAMPLES_PER_SECOND

    def totals(self) -> Totals:
        """Return the counters."""
        return self.app.decider.stats.totals()

    def status(self) -> ServiceStatus:
        """Return the current values; those of other workers are as old as their reports."""
        return merge_reports([self.report(), *self.other_reports()], self._store_counts.totals(), self.clock.steady())

    def waiting_by_policy(self) -> Counter[str]:
        """Return the number of waiting calls, by policy."""
        found = Counter(self.app.decider.waiting_by_policy())
        for report in self.other_reports():
            found.update(report.waiting_by_policy)
        return found

    def top_denied(self) -> list[dict[str, Any]]:
        """Return the keys that were denied most in the last minute."""
        rows = [*self._describe_top(), *(row for report in self.other_reports() for row in report.top)]
        return merge_top(rows, MAX_TOP)

    def store_lost(self) -> bool:
        """Return whether the store is unavailable for this process."""
        return self.app.decider.store.unavailable

    # ---- this process ------------------------------------------------------------------------------------------------

    def report(self) -> ProcessReport:
        """Describe the current values of this process, and count those of its store that only grow."""
        app, decider, stats = self.app, self.app.decider, self.app.decider.stats
        now, store = self.clock.ns() // 1000, decider.store.metrics()
        for name, value in store.items():
            if name in STORE_COUNTERS or name.startswith(LEASE_COUNTERS):
                self._store_counts.copy(decider.store, (name,), value)
        return ProcessReport(
            process_id=os.getpid(),
            since=self._since,
            at=self.clock.steady(),
            waiting=decider.waiting,
            in_flight=app.in_flight,
            waiting_by_policy={name: count for name, count in decider.waiting_by_policy().items() if count},
            store=store,
            near=[near._asdict() for near in stats.near_limit.nearest(now, MAX_NEAR_LIMIT)],
            reset_keys=stats.near_limit.removed(),
            denials=[
                describe_denial(denial)
                for denial in select_rows(stats.recent_denials(), attrgetter("at"), attrgetter("policy"), MAX_DENIALS)
            ],
            failed_checks=app.failed_checks(),
            top=self._describe_top(),
            denied=stats.denied_keys.count_by_policy(now),
        )

    def _describe_top(self) -> list[dict[str, Any]]:
        """Describe the keys that this process denied most in the last minute, for JSON."""
        now, steady = self.clock.ns() // 1000, self.clock.steady()
        return [row._asdict() for row in self.app.decider.stats.denied_keys.top(now, steady)]


def describe_denial(denial: RecentDenial) -> dict[str, Any]:
    """Describe a denial for JSON."""
    return {
        "at": denial.at // MILLISECOND,
        "policy": denial.policy,
        "key": denial.key,
        "violated": denial.violated,
        "retry_after": None if denial.retry == NEVER else denial.retry / SECOND,
        "shadow": denial.shadow,
    }


# ---- several processes -----------------------------------------------------------------------------------------------


def merge_reports(reports: Sequence[ProcessReport], store_counts: dict[str, int], now: int) -> ServiceStatus:
    """Combine the reports of processes; `store_counts` are those of the store, also of processes that have ended."""
    waiting_by_policy: Counter[str] = Counter()
    for report in reports:
        waiting_by_policy.update(report.waiting_by_policy)
    return ServiceStatus(
        waiting=sum(report.waiting for report in reports),
        in_flight=sum(report.in_flight for report in reports),
        waiting_by_policy=waiting_by_policy,
        store=merge_store(reports, store_counts),
        near=merge_near(reports),
        denials=merge_denials(reports),
        workers=[
            {"id": report.process_id, "since": report.since, "seconds_ago": max(0, now - report.at) / SECOND}
            for report in reports
        ],
        top=merge_top((row for report in reports for row in report.top), MAX_TOP),
        denied=merge_denied(reports),
    )


def merge_denied(reports: Iterable[ProcessReport]) -> dict[str, tuple[int, int]]:
    """Add up the denials of each policy; of the numbers of keys, which may be the same keys, the highest counts."""
    found: dict[str, tuple[int, int]] = {}
    for report in reports:
        for policy, (denials, keys) in report.denied.items():
            known = found.get(policy, (0, 0))
            found[policy] = (known[0] + denials, max(known[1], keys))
    return found


def merge_denials(reports: Iterable[ProcessReport]) -> list[dict[str, Any]]:
    """Return the last denial of each key for one reason, the latest first."""
    latest: dict[tuple[object, ...], dict[str, Any]] = {}
    for denial in (each for report in reports for each in report.denials):
        place = (*place_of(denial), tuple(denial["violated"]), denial["shadow"])
        if place not in latest or latest[place]["at"] < denial["at"]:
            latest[place] = denial
    return select_rows(latest.values(), itemgetter("at"), itemgetter("policy"), MAX_DENIALS)


def merge_store(reports: Iterable[ProcessReport], counters: dict[str, int]) -> dict[str, int]:
    """Add the metrics of the store of all processes; `counters` has the sums that include processes that ended."""
    found: dict[str, int] = {}
    for report in reports:
        for name, value in report.store.items():
            found[name] = max(found.get(name, 0), value) if name in MAXIMUM_METRICS else found.get(name, 0) + value
    return found | counters


def merge_near(reports: Sequence[ProcessReport]) -> list[dict[str, Any]]:
    """Return the keys nearest to a limit: of each key, its last decision in any process, unless it was reset since."""
    latest: dict[tuple[str, Key], dict[str, Any]] = {}
    for report in reports:
        for near in report.near:
            place = place_of(near)
            if place not in latest or latest[place]["at"] < near["at"]:
                latest[place] = near
    for policy, key, at in (each for report in reports for each in report.reset_keys):
        place = (policy, key if isinstance(key, str) else tuple(key))
        if place in latest and latest[place]["at"] <= at:
            del latest[place]
    return select_rows(
        latest.values(),
        lambda near: near["used"] / (near["used"] + near["remaining"]),
        itemgetter("policy"),
        MAX_NEAR_LIMIT,
    )
