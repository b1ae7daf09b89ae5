"""The values that /metrics and /v1/overview show: of one process, or of all workers of a service together.

A process describes its current values in a `ProcessReport`. `merge_reports` combines the reports of several processes.
Counters are not in a report: see `StatusSource.totals`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND
from tidegate.service.decisions.denied_keys import MAX_TOP, merge_top, place_of
from tidegate.service.decisions.row_selection import select_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidegate.policy import Key
    from tidegate.service.decisions.stats import RecentDenial, Stats
    from tidegate.service.http.app import App

MAX_DENIALS: Final = 50
MAX_NEAR_LIMIT: Final = 12
MAX_REPORTED_POLICIES: Final = 200  # with waiting calls
MILLISECOND: Final = 1000  # microseconds
# Of the store, merged by maximum: all processes report the same fact.
MAXIMUM_METRICS: Final = ("store_lost", "processes", "share_ppm")


@dataclass
class ProcessReport:
    """The current values of one process. All of them can be written as JSON."""

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
    # of the egress gateway: caller, provider, active and waiting requests
    egress: list[tuple[str, str, int, int]] = field(default_factory=list)


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


class StatusSource(Protocol):
    """Where /metrics and /v1/overview get their values."""

    process_id: int  # of the service: with several workers, their parent process
    started_at: int  # of the service, in milliseconds since 1970

    def totals(self) -> Stats:
        """Return the counters, and nothing else of the Stats."""

    def status(self) -> ServiceStatus:
        """Return the current values."""

    def waiting_by_policy(self) -> Mapping[str, int]:
        """Return the number of waiting calls, by policy."""

    def failed_checks(self) -> Iterable[tuple[str, str]]:
        """Return why /readyz fails: the kinds of the problems, and their details."""

    def top_denied(self) -> list[dict[str, Any]]:
        """Return the keys that were denied most in the last minute."""

    def store_lost(self) -> bool:
        """Return whether the store is unavailable."""

    def mark_viewed(self) -> None:
        """Record that a client reads the overview: from now on, keys near a limit are recorded for a while."""


class ProcessStatus:
    """The values of a service that runs in one process."""

    def __init__(self, app: App) -> None:
        """Show the values of this app."""
        self._app = app
        self.process_id: int = os.getpid()
        self.started_at: int = app.decider.store.clock.ns() // 1_000_000

    def totals(self) -> Stats:
        """Return the counters of the process."""
        return self._app.decider.stats

    def status(self) -> ServiceStatus:
        """Return the current values of the process."""
        report = report_process(self._app, self.started_at)
        return merge_reports([report], report.store, report.at)

    def waiting_by_policy(self) -> Mapping[str, int]:
        """Return the number of waiting calls of the process, by policy."""
        return self._app.decider.waiting_by_policy()

    def failed_checks(self) -> Iterable[tuple[str, str]]:
        """Return the failed checks of the process."""
        return self._app.failed_checks()

    def top_denied(self) -> list[dict[str, Any]]:
        """Return the keys of the process that were denied most."""
        return describe_top(self._app)

    def store_lost(self) -> bool:
        """Return whether the store is unavailable."""
        return self._app.decider.store.unavailable

    def mark_viewed(self) -> None:
        """Do nothing: the overview itself notifies the only process."""


def report_process(app: App, since: int) -> ProcessReport:
    """Describe the current values of this process, which has run since this time."""
    decider, stats = app.decider, app.decider.stats
    clock = decider.store.clock
    waiting = {name: count for name, count in decider.waiting_by_policy().items() if count}
    return ProcessReport(
        process_id=os.getpid(),
        since=since,
        at=clock.steady(),
        waiting=decider.waiting,
        in_flight=app.in_flight,
        waiting_by_policy=dict(list(waiting.items())[:MAX_REPORTED_POLICIES]),
        store=decider.store.metrics(),
        near=[near._asdict() for near in stats.near_limit.nearest(clock.ns() // 1000, MAX_NEAR_LIMIT)],
        reset_keys=list(stats.near_limit.removed),
        denials=[
            describe_denial(denial)
            for denial in select_rows(
                reversed(stats.recent.values()), attrgetter("at"), attrgetter("policy"), MAX_DENIALS
            )
        ],
        failed_checks=app.failed_checks(),
        top=describe_top(app),
        denied=dict(list(stats.denied_keys.count_by_policy(clock.ns() // 1000).items())[:MAX_REPORTED_POLICIES]),
        egress=app.egress_gauges(),
    )


def describe_top(app: App) -> list[dict[str, Any]]:
    """Describe the keys that this process denied most in the last minute, for JSON."""
    clock = app.decider.store.clock
    return [row._asdict() for row in app.decider.stats.denied_keys.top(clock.ns() // 1000, clock.steady())]


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


def merge_reports(reports: Sequence[ProcessReport], store: dict[str, int], now: int) -> ServiceStatus:
    """Combine the reports of processes; `store` holds the metrics of the store, merged by `merge_store`."""
    waiting_by_policy: Counter[str] = Counter()
    for report in reports:
        waiting_by_policy.update(report.waiting_by_policy)
    return ServiceStatus(
        waiting=sum(report.waiting for report in reports),
        in_flight=sum(report.in_flight for report in reports),
        waiting_by_policy=waiting_by_policy,
        store=store,
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
