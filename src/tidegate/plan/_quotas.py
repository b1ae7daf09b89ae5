"""Suggests quotas of providers: the smallest with which every call of a log would have been sent in time.

Calls wait in one queue, in the order of the log, as in the clients: a call is sent when all limits allow it, and those
behind it wait. The smallest quota of each limit is found alone, by bisection; then all of them are checked together.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tidegate._policy.units import is_money
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.core._decision import acquire
from tidegate.errors import ConfigError
from tidegate.plan._report import quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidegate.core._algorithms import State
    from tidegate.core._limit import Limit
    from tidegate.outbound import Provider
    from tidegate.plan._logs.batch import LogSender, LogSubject
    from tidegate.plan._logs.stream import LogStream, Row
    from tidegate.plan._report import Report
    from tidegate.plan._rules.outbound import OutboundRules

    Call = tuple[int, Sequence[int]]  # when, and its cost for each limit

COMPARED_WAITS: Final = (0, 1, 10, 60)  # seconds for which the smallest quota is reported, too
RAISED_BY: Final = 50  # all quotas by so much of them, until limits that were chosen alone serve together


class ProviderCalls:
    """The calls to a provider, and the limits that get a quota."""

    def __init__(self, provider: Provider) -> None:
        """Measure nothing yet; raises ConfigError for a provider with several quotas."""
        if not provider.has_one_account or provider.pool is not None:
            raise ConfigError(
                f"{provider.name} has several quotas ('per', 'models' or 'pool'): one is needed to suggest it",
                field="--policy",
            )
        self.provider: Provider = provider
        self.limits: tuple[Limit, ...] = tuple(
            limit for limit in provider.limits if not (limit.rules.holds_slots or is_money(limit.unit))
        )
        self.calls: list[Call] = []

    def least(self, limit: Limit) -> int:
        """Return the largest cost of an endpoint of the file: a smaller limit would be refused."""
        costs = (self.provider.cost(each).get(limit.unit, 0) for each in (None, *self.provider.endpoints))
        return max(costs)

    def cost_of(self, subject: LogSubject) -> dict[str, int]:
        """Return the cost of a call by unit, as the file says."""
        path = urlsplit(subject.path).path if "://" in subject.path else subject.path
        return dict(self.provider.cost(self.provider.endpoint(path or "/", subject.method or "GET")))


class CallMeasurement:
    """Collects the calls of logs by provider; the memory depends on their number."""

    def __init__(self, rules: OutboundRules) -> None:
        """Collect the calls to these providers."""
        self._rules = rules
        self.found: dict[str, ProviderCalls] = {}
        self.first: int = 0
        self.last: int = 0

    def find_sender(self, sender: LogSender) -> str:
        """Return who sent a call; a quota does not depend on it."""
        return sender.name

    def find_subject(self, subject: LogSubject) -> tuple[ProviderCalls, dict[str, int]] | None:
        """Return the calls to the provider of a subject, and what one costs."""
        provider = self._rules.find(subject).provider
        if provider is None:
            return None
        calls = self.found.get(provider.title)
        if calls is None:
            calls = self.found[provider.title] = ProviderCalls(provider)
        return calls, calls.cost_of(subject)

    def run(self, stream: LogStream) -> None:
        """Collect all calls."""
        for rows in stream.read(self):
            self._add(rows)
        self._rules.close()

    def _add(self, rows: Iterable[Row]) -> None:
        for now, _, subject, _, _, cost in rows:
            if subject is None:
                continue
            self.first = min(self.first, now) if self.first else now
            self.last = max(self.last, now)
            calls, usual = subject
            given = {} if cost == 1 else {"requests": cost} if isinstance(cost, int) else cost
            combined = usual | given
            calls.calls.append((now, [combined.get(limit.unit, 0) for limit in calls.limits]))


def waits_of(calls: Iterable[Call], limits: Sequence[Limit], most: int | None = None) -> list[int] | None:
    """Return how long each call waits in the queue of the limits; None: one waits longer than `most`, or for ever."""
    states: Sequence[State | None] = [None] * len(limits)
    now, waits = 0, []
    for at, costs in calls:
        now = max(now, at)
        allowed, changed, _ = acquire(limits, states, costs, now)
        while not allowed:
            triples = zip(limits, states, costs, strict=True)
            retries = [limit.view(state, limit, cost, now)[1] for limit, state, cost in triples]
            now += max(retries)
            if NEVER in retries or (most is not None and now - at > most):
                return None
            allowed, changed, _ = acquire(limits, states, costs, now)
        states = changed
        waits.append(now - at)
    return waits


def resize(limit: Limit, quota: int) -> Limit:
    """Return a limit with another quota, and a burst of the same share of it."""
    return replace(limit, quota=quota, burst=ceil_div(limit.burst * quota, limit.quota))


def smallest_quota(calls: Sequence[Call], limit: Limit, most: int, least: int) -> int:
    """Return the smallest quota, of a burst of at least `least`, with which no call waits longer than `most`."""

    def serves(quota: int) -> bool:
        resized = resize(limit, quota)
        return resized.burst >= least and waits_of(calls, [resized], most) is not None

    low, high = 0, 1  # denies, serves
    while not serves(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high


def raise_quotas(calls: Sequence[Call], limits: Sequence[Limit], quotas: list[int], most: int) -> list[int]:
    """Return quotas, raised together until all limits serve the calls in time."""
    while waits_of(calls, list(map(resize, limits, quotas)), most) is None:
        quotas = [quota + ceil_div(quota, RAISED_BY) for quota in quotas]
    return quotas


def describe_quotas(found: ProviderCalls, wait: int) -> dict[str, Any]:
    """Describe the quotas that serve the calls of a provider, and what those of its file would have done."""
    calls, limits = found.calls, found.limits
    alone = []  # for each limit: the quota that it needs alone, by the longest wait
    for place, limit in enumerate(limits):
        own = [(at, [costs[place]]) for at, costs in calls if costs[place]]
        least = found.least(limit)
        waits = sorted({*(each * SECOND for each in COMPARED_WAITS), wait})
        alone.append({most: smallest_quota(own, limit, most, least) for most in waits})
    quotas = raise_quotas(calls, limits, [needed[wait] for needed in alone], wait)
    current = waits_of(calls, limits)
    rows = []
    for limit, quota, needed in zip(limits, quotas, alone, strict=True):
        rows.append(
            {
                "limit": str(limit),
                "name": limit.name,
                "unit": limit.unit,
                "period": limit.period,
                "algorithm": limit.algorithm,
                "quota": limit.quota,
                "suggested": quota,
                "burst": resize(limit, quota).burst,
                "alone": [(most / SECOND, own) for most, own in needed.items()],
            }
        )
    return {
        "provider": found.provider.title,
        "domain": found.provider.domain,
        "calls": len(calls),
        "limits": rows,
        "waits": describe_waits(waits_of(calls, list(map(resize, limits, quotas)))),
        "waits_now": describe_waits(current),
        "kept": [str(limit) for limit in found.provider.limits if limit not in limits],
    }


def describe_waits(waits: list[int] | None) -> dict[str, float | None] | None:
    """Describe waits in seconds; None: a call costs more than a limit allows at once."""
    if waits is None:
        return None
    waits.sort()
    return {name: quantile(waits, part) for name, part in (("median", 0.5), ("p95", 0.95), ("longest", 1.0))}


def quotas_to_yaml(report: Report) -> str:
    """Return the suggestion as a provider file for each provider, with its reasons as comments."""
    texts = []
    for each in report["providers"]:
        now = each["waits_now"]
        current = "one is never sent" if now is None else f"they wait up to {now['longest']:g} s"
        lines = [
            f"# {each['calls']:,} calls to {each['provider']}, {report['from']} until {report['until']}.",
            f"# Wanted: none waits longer than {report['wait']:g} s.",
            f"# With these quotas, calls wait up to {each['waits']['longest']:g} s; with those of the file, {current}.",
            *(f"# Not measured, keep it: {limit}" for limit in each["kept"]),
            f"domain: {json.dumps(each['domain'])}",
            "limits:",
        ]
        for limit in each["limits"]:
            alone = ", ".join(f"{quota:,} if {seconds:g} s" for seconds, quota in limit["alone"])
            lines += [f"  # now {limit['limit']}; needed alone, by the longest wait: {alone}", f"  - {entry(limit)}"]
        texts.append("\n".join(lines) + "\n")
    return "---\n".join(texts)


def entry(limit: Mapping[str, Any]) -> str:
    """Return a limit as an entry of a provider file."""
    fields = {
        "limit": limit["suggested"], "period": limit["period"], "unit": limit["unit"], "algorithm": limit["algorithm"],
    }  # fmt: skip
    if limit["burst"] != limit["suggested"]:
        fields["burst"] = limit["burst"]
    return json.dumps(fields)
