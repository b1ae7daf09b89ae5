"""Suggests limits: the smallest quotas that would have denied no more than a chosen share of clients and requests.

For each group of requests (a category of the rules, or an endpoint) and each period, the quota that each client needed
is measured for the algorithm that will enforce (`plan.measure`). The suggestion is rounded up, and then replayed: while
more requests are denied than chosen, it is raised to what the next client needed.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.plan._measure import make_measure, measured_limit
from tidegate.plan._quotas import quotas_to_yaml
from tidegate.plan._report import quantile_of, share

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tidegate.core._limit import Limit
    from tidegate.plan._logs.batch import LogSender, LogSubject
    from tidegate.plan._logs.stream import LogStream, Row
    from tidegate.plan._measure import Measure
    from tidegate.plan._report import Report
    from tidegate.plan._rules.base import ReplayRules

MAX_GROUPS: Final = 200
MIN_PERIODS: Final = 3  # of the log: a limit per day that rests on a day says little
OTHER: Final = "other"
MAX_SHOWN: Final = 10  # endpoints that get a category
ANY_METHOD: Final = "*"
WORD = re.compile(r"[a-z0-9]+")
VALID_PATH = re.compile(r"/|(?:/(?:\{id\}|[\w.~!$&'()+,;=:@%-]+))+/?")
ROUNDED: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80)
QUANTILES: Final = (0.5, 0.9, 0.99, 0.999, 1.0)


class SuggestOptions(NamedTuple):
    """What to suggest: for which algorithm and periods, and how much may be denied."""

    algorithm: str = "sliding_log"
    periods: Sequence[str] = ("1m", "1h", "1d")
    max_clients: float = 0.001  # shares, from 0 to 1
    max_requests: float = 0.001
    left_out: Collection[str] = ()  # clients that are not measured
    wait: int = 0  # microseconds that a call to a provider may wait; the rest is for clients


class Group:
    """The requests of a category or an endpoint, by client."""

    def __init__(self, name: str) -> None:
        """Measure nothing yet."""
        self.name = name
        self.requests: int = 0
        self.endpoints: set[str] = set()
        self.clients: dict[str, list[Measure]] = {}

    def needs(self, place: int) -> list[int]:
        """Return what each client needed of the limit at this place, in order."""
        return sorted(measures[place].needed for measures in self.clients.values())


class Measurement:
    """Measures the requests of logs, by group and client."""

    def __init__(self, rules: ReplayRules, options: SuggestOptions, *, by_policy: bool) -> None:
        """Group by the policies of these rules, or by endpoint."""
        self._rules = rules
        self._left_out = frozenset(options.left_out)
        self._by_policy = by_policy
        self.limits: list[Limit] = [measured_limit(period, options.algorithm) for period in options.periods]
        self.groups: dict[str, Group] = {}
        self.left_out: int = 0  # requests
        self.first: int = 0
        self.last: int = 0

    def chosen(self) -> list[Group]:
        """Return the groups that get a limit: those of the rules, or the endpoints with the most requests."""
        found = [group for group in self.groups.values() if group.clients]
        if not self._by_policy:
            found = [group for group in found if VALID_PATH.fullmatch(group.name.partition(" ")[2])]
        found.sort(key=lambda group: (-group.requests, group.name))
        return found if self._by_policy else found[:MAX_SHOWN]

    def find_sender(self, sender: LogSender) -> str:
        """Return the name of a client."""
        return self._rules.name_of(self._rules.find_key(sender))

    def find_subject(self, subject: LogSubject) -> tuple[str, list[Group]]:
        """Return an endpoint, and the groups that it belongs to."""
        found = self._rules.find(subject)
        names = found.policies if self._by_policy else (found.endpoint,)
        return found.endpoint, [self._group(name) for name in names]

    def _group(self, name: str) -> Group:
        if name not in self.groups and len(self.groups) >= MAX_GROUPS:
            name = OTHER
        return self.groups.setdefault(name, Group(name))

    def run(self, stream: LogStream) -> None:
        """Measure all requests."""
        for rows in stream.read(self):
            self._add(rows)
        self._rules.close()

    def _add(self, rows: Iterable[Row]) -> None:
        for now, client, (endpoint, groups), _, _, cost in rows:
            self.first = min(self.first, now) if self.first else now
            self.last = max(self.last, now)
            if client in self._left_out:
                self.left_out += 1
                continue
            amount = cost if isinstance(cost, int) else cost.get("requests", 1)
            for group in groups:
                group.requests += 1
                group.endpoints.add(endpoint)
                measures = group.clients.get(client)
                if measures is None:
                    measures = group.clients[client] = [make_measure(limit) for limit in self.limits]
                for measure in measures:
                    measure.add(now, amount)


def round_up(number: int) -> int:
    """Return the next number that people choose: 1, 2, 3, … 10, 12, 15, 20, … with zeros."""
    scale = 1
    while number > ROUNDED[-1] * scale:
        scale *= 10
    return ROUNDED[bisect_left(ROUNDED, -(-number // scale))] * scale


def choose_quota(needs: Sequence[int], max_clients: float, skipped: int = 0) -> int:
    """Return the smallest quota for all but a share of the clients; `skipped`: serve so many more of them."""
    allowed = int(max_clients * len(needs))
    return round_up(needs[max(0, min(len(needs) - 1, len(needs) - 1 - allowed + skipped))])


def suggest_limits(
    found: Measurement, options: SuggestOptions, skipped: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Return the quota of each period, for each group; periods that the log is too short for are left out."""
    periods = usable_periods(found, options)
    suggested: dict[str, dict[str, int]] = {}
    for group in found.chosen():
        chosen = {
            period: choose_quota(group.needs(place), options.max_clients, skipped.get(group.name, 0))
            for place, period in enumerate(options.periods)
            if period in periods
        }
        suggested[group.name] = without_implied(chosen, found.limits, options)
    return suggested


def usable_periods(found: Measurement, options: SuggestOptions) -> list[str]:
    """Return the periods of which the log has at least three; at least the shortest."""
    span = found.last - found.first
    pairs = list(zip(options.periods, found.limits, strict=True))
    return [period for period, limit in pairs if limit.length * MIN_PERIODS <= span] or [options.periods[0]]


def without_implied(chosen: dict[str, int], limits: Sequence[Limit], options: SuggestOptions) -> dict[str, int]:
    """Leave out limits that a shorter one implies, such as 100 per hour beside 1 per minute."""
    lengths = {period: limit.length for period, limit in zip(options.periods, limits, strict=True)}
    kept: dict[str, int] = {}
    for period, quota in chosen.items():
        if not any(own * lengths[period] <= quota * lengths[other] for other, own in kept.items()):
            kept[period] = quota
    return kept


def describe_group(
    group: Group,
    chosen: Mapping[str, int],
    options: SuggestOptions,
    patterns: Mapping[str, list[str]],
    show: Callable[[str], str],
) -> dict[str, Any]:
    """Describe a group: what its clients needed in each period, who needed more than is suggested."""
    periods = []
    heavy: dict[str, int] = {}
    for place, period in enumerate(options.periods):
        needs = group.needs(place)
        quota = chosen.get(period)
        over = 0
        if quota is not None:
            above = [(m[place].needed, name) for name, m in group.clients.items() if m[place].needed > quota]
            over = len(above)
            heavy |= {name: needed for needed, name in sorted(above)[-5:]}
        periods.append(
            {
                "period": period,
                "quantiles": {f"{100 * q:g}": quantile_of(needs, q) for q in QUANTILES},
                "suggested": quota,
                "clients_over": over,
                "clients_over_share": share(over, len(needs)),
                "tradeoff": tradeoff(needs),
            }
        )
    return {
        "group": group.name,
        "category": group.name if group.name in patterns else slug(group.name),
        "requests": group.requests,
        "clients": len(group.clients),
        "endpoints": patterns.get(group.name) or sorted(group.endpoints),
        "periods": periods,
        "heavy": [show(name) for name in sorted(heavy, key=lambda name: -heavy[name])],
    }


def tradeoff(needs: Sequence[int]) -> list[tuple[int, float]]:
    """Return, for quotas that people choose, the share of clients that needed more."""
    points = []
    quota = 1
    while needs and quota <= 2 * needs[-1]:
        over = len(needs) - bisect_left(needs, quota + 1)
        points.append((quota, share(over, len(needs))))
        quota = round_up(quota + 1)
    return points


def slug(endpoint: str) -> str:
    """Return the name of a category for an endpoint: `get-items-id` for `GET /items/{id}`."""
    return "-".join(WORD.findall(endpoint.lower())) or "root"


def to_config(
    groups: Sequence[Mapping[str, Any]], suggested: Mapping[str, Mapping[str, int]], algorithm: str
) -> dict[str, Any]:
    """Return the suggestion as the configuration of a middleware."""
    categories = {
        group["category"]: {
            "limits": [f"{quota}/{period}" for period, quota in suggested[group["group"]].items()],
            "endpoints": [endpoint_config(each) for each in group["endpoints"]],
        }
        for group in groups
    }
    return {"algorithm": algorithm, "unmatched": None, "categories": categories}


def endpoint_config(endpoint: str) -> dict[str, Any]:
    """Return an endpoint such as `GET /items/{id}` as a configuration; `*` stands for all methods."""
    method, _, path = endpoint.partition(" ")
    return {"path": path} if method == ANY_METHOD else {"path": path, "methods": [method]}


def to_yaml(report: Report) -> str:
    """Return the suggestion as the configuration of a middleware or of providers, with its reasons as comments."""
    if "providers" in report:
        return quotas_to_yaml(report)
    goal, denied = report["goal"], report["denied"]
    clients, requests = (f"{100 * goal[name]:g} %" for name in ("max_clients", "max_requests"))
    result = f"{denied['requests']:,} requests of {denied['clients']:,} clients denied"
    lines = [
        f"# Suggested by `tidegate plan suggest` from {report['log']['requests']:,} requests,",
        f"# {report['from']} until {report['until']}.",
        f"# Wanted: at most {clients} of the clients of a category need more than a limit, and at most",
        f"# {requests} of its requests are denied. Replayed: {result}.",
        "rate_limiting:",
        f"  algorithm: {report['algorithm']}",
        "  unmatched: null  # other requests are not limited",
        "  categories:",
    ]
    for group in report["groups"]:
        lines.append(
            f"    {json.dumps(group['category'])}:  # {group['requests']:,} requests of {group['clients']:,} clients"
        )
        chosen = [each for each in group["periods"] if each["suggested"] is not None]
        lines += [f"      # {reason_of(each)}" for each in chosen]
        lines.append(f"      limits: [{', '.join(map(limit_text, chosen))}]")
        lines.append(f"      endpoints: {json.dumps([endpoint_config(each) for each in group['endpoints']])}")
    return "\n".join(lines) + "\n"


def reason_of(period: Mapping[str, Any]) -> str:
    """Say why a limit was chosen."""
    needed = period["quantiles"]
    most = f"half of the clients needed at most {needed['50']:,}, 99 % {needed['99']:,}, the busiest {needed['100']:,}"
    return f"{period['suggested']:,} per {period['period']}: {most}"


def limit_text(period: Mapping[str, Any]) -> str:
    """Return the limit of a period."""
    return f"{period['suggested']}/{period['period']}"
