"""The result of a replay as plain data: what `--json` prints, and what tables and the HTML page show."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.plan._tally import MINUTE

Report = dict[str, Any]  # plain data, as JSON has it

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidegate.plan._logs.stream import LogSummary
    from tidegate.plan._replay import ReplayResult
    from tidegate.plan._tally import ClientCounts, Counts, PolicyCounts, Tally

MAX_CLIENTS: Final = 50  # that a report lists
MAX_STEPS: Final = 240  # of a timeline
CLOSENESS: Final = (0.25, 0.5, 0.8, 1.0)  # upper ends of the shares of a quota that clients reached
HASH_BYTES: Final = 6
TIMELINE_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)  # minutes


class ClientNames:
    """How clients are named in a report: as they are, or by a keyed hash that nobody can reverse without the key."""

    def __init__(self, *, hashed: bool = False, secret: str = "") -> None:
        """Hash names if `hashed`, with a secret; without one, with a new key, which nobody keeps."""
        self.hashed: bool = hashed
        self._key = secret.encode()[:64] or secrets.token_bytes(32)

    def show(self, name: str) -> str:
        """Return a name as the report has it."""
        if not self.hashed:
            return name
        data = name.encode("utf-8", "surrogateescape")
        return "client-" + hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._key).hexdigest()


def show_time(instant: int, zone: tzinfo = UTC) -> str:
    """Return an instant in ISO 8601, in whole seconds."""
    return datetime.fromtimestamp(instant // SECOND, zone).isoformat()


def share(part: int, total: int) -> float:
    """Return a part of a total, from 0 to 1."""
    return part / total if total else 0.0


def describe_replay(replay: ReplayResult, log: LogSummary, names: ClientNames, zone: tzinfo = UTC) -> dict[str, Any]:
    """Return the report of one replay."""
    tally = replay.tally
    limits = {name: [str(limit) for limit in own] for name, own in replay.limits.items()}
    return {
        "rules": limits,
        "log": describe_log(log, names),
        "from": show_time(tally.first, zone) if tally.requests else None,
        "until": show_time(tally.last, zone) if tally.requests else None,
        "totals": describe_totals(tally),
        "policies": [describe_policy(tally.policies[name], tally, replay) for name in sorted(tally.policies)],
        "clients": describe_clients(tally.clients.values(), replay, names, zone),
        "endpoints": describe_endpoints(tally.endpoints),
        "hours": describe_hours(tally.minutes, zone),
        "timeline": describe_timeline(tally.minutes, zone),
        "retry_after": describe_waits(tally),
        "retries": {
            "requests": replay.retried.requests,
            "denied": replay.retried.denied,
            "given_up": replay.given_up,
        },
        "notes": list(replay.notes),
    }


def describe_log(log: LogSummary, names: ClientNames) -> dict[str, Any]:
    """Describe what was read; examples of malformed lines are left out if names are hashed."""
    examples = [] if names.hashed else log.examples
    return {
        "lines": log.lines,
        "requests": log.requests,
        "malformed": log.malformed,
        "examples": [{"file": each.file, "line": each.line, "reason": each.reason} for each in log.examples]
        if names.hashed
        else [each._asdict() for each in examples],
        "clock_steps": log.steps,
        "late": log.late,
        "resolution": log.resolution / SECOND,
        "arrival_times": log.times_are_starts,
        "durations": log.has_durations,
    }


def describe_totals(tally: Tally) -> dict[str, Any]:
    """Return the totals."""
    clients = len(tally.clients)
    denied_clients = sum(client.denied > 0 for client in tally.clients.values())
    return {
        "requests": tally.requests,
        "limited": tally.limited,
        "denied": tally.denied,
        "denied_share": share(tally.denied, tally.requests),
        "blocked": tally.blocked,
        "shadow_denied": sum(policy.shadow_denied for policy in tally.policies.values()),
        "clients": clients,
        "denied_clients": denied_clients,
        "denied_clients_share": share(denied_clients, clients),
    }


def describe_policy(policy: PolicyCounts, tally: Tally, replay: ReplayResult) -> dict[str, Any]:
    """Describe a policy: its denials by limit, and how close its clients came to each limit."""
    limits = []
    for limit in replay.limits.get(policy.name, ()):
        label = f"{policy.name} {limit.name}"
        shares = [used / limit.burst for client in tally.clients.values() if (used := client.peaks.get(label))]
        limits.append(
            {
                "limit": str(limit),
                "name": limit.name,
                "quota": limit.burst,
                "unit": limit.unit,
                "denied": policy.by_limit.get(label, 0),
                "clients": len(shares),
                "closeness": histogram(shares),
            }
        )
    return {
        "policy": policy.name,
        "requests": policy.requests,
        "denied": policy.denied,
        "denied_share": share(policy.denied, policy.requests),
        "shadow_denied": policy.shadow_denied,
        "limits": limits,
    }


def histogram(shares: Iterable[float]) -> list[int]:
    """Count shares: up to a quarter of the quota, half, 80 %, below all of it, and all of it."""
    counts = [0] * (len(CLOSENESS) + 1)
    for each in shares:
        counts[next((i for i, end in enumerate(CLOSENESS) if each < end), len(CLOSENESS))] += 1
    return counts


def describe_clients(
    clients: Iterable[ClientCounts], replay: ReplayResult, names: ClientNames, zone: tzinfo
) -> list[dict[str, Any]]:
    """Describe the clients that were denied most, then those that came closest to a limit."""
    quotas = quotas_of(replay)
    rows = []
    for client in clients:
        label, used = max(
            client.peaks.items(), key=lambda item: item[1] / quotas.get(item[0], item[1] or 1), default=("", 0)
        )
        closest = share(used, quotas.get(label, used))
        rows.append((client.denied, closest, client.requests, label, used, client))
    rows.sort(key=lambda row: (-row[0], -row[1], -row[2], str(row[5].key)))
    return [
        {
            "client": names.show(str(client.key)),
            "requests": client.requests,
            "denied": client.denied,
            "denied_share": share(client.denied, client.requests),
            "first_denied": show_time(client.first_denied, zone) if client.denied else None,
            "last_denied": show_time(client.last_denied, zone) if client.denied else None,
            "closest": {"limit": label, "used": used, "quota": quotas.get(label), "share": closest} if label else None,
        }
        for _, closest, _, label, used, client in rows[:MAX_CLIENTS]
    ]


def quotas_of(replay: ReplayResult) -> dict[str, int]:
    """Return how much each limit allows at once."""
    return {f"{name} {limit.name}": limit.burst for name, own in replay.limits.items() for limit in own}


def describe_endpoints(endpoints: Mapping[str, Counts]) -> list[dict[str, Any]]:
    """Describe the endpoints, those with the most denials first."""
    rows = [(name, counts) for name, counts in endpoints.items() if counts.requests]
    rows.sort(key=lambda row: (-row[1].denied, -row[1].requests, row[0]))
    return [counted(counts, endpoint=name) for name, counts in rows[:MAX_CLIENTS]]


def counted(counts: Counts, **more: object) -> dict[str, Any]:
    """Return counts as data."""
    denied = counts.denied
    return {**more, "requests": counts.requests, "denied": denied, "denied_share": share(denied, counts.requests)}


def describe_hours(minutes: Mapping[int, Counts], zone: tzinfo) -> list[dict[str, Any]]:
    """Return requests and denials by hour of the day, in a time zone."""
    hours: dict[int, list[int]] = {}
    for minute, counts in minutes.items():
        hour = datetime.fromtimestamp(minute * 60, zone).hour
        found = hours.setdefault(hour, [0, 0])
        found[0] += counts.requests
        found[1] += counts.denied
    return [{"hour": hour, "requests": found[0], "denied": found[1]} for hour, found in sorted(hours.items())]


def describe_timeline(minutes: Mapping[int, Counts], zone: tzinfo) -> dict[str, Any]:
    """Return requests and denials over time, in at most `MAX_STEPS` steps."""
    if not minutes:
        return {"step": 60, "from": None, "requests": [], "denied": []}
    first, last = min(minutes), max(minutes)
    size = next(
        (step for step in TIMELINE_STEPS if (last - first) // step < MAX_STEPS), (last - first) // MAX_STEPS + 1
    )
    first -= first % size
    length = (last - first) // size + 1
    requests, denied = [0] * length, [0] * length
    for minute, counts in minutes.items():
        requests[(minute - first) // size] += counts.requests
        denied[(minute - first) // size] += counts.denied
    return {"step": size * 60, "from": show_time(first * MINUTE, zone), "requests": requests, "denied": denied}


def describe_waits(tally: Tally) -> dict[str, Any]:
    """Return what denied clients would have been told: the waits until they would have been allowed, in seconds."""
    waits = sorted(tally.waits.kept)
    return {
        "median": quantile(waits, 0.5),
        "p95": quantile(waits, 0.95),
        "longest": quantile(waits, 1.0),
        "never": tally.waits.never,
    }


def quantile(waits: Sequence[int], fraction: float) -> float | None:
    """Return a quantile of sorted microseconds, in seconds; None: there are none."""
    return waits[min(len(waits) - 1, int(fraction * len(waits)))] / SECOND if waits else None


def describe_range(low: int, high: int, found: int, resolution: int) -> dict[str, Any]:
    """Return how many denials the resolution of the log allows."""
    return {"denied": [min(low, found), max(high, found)], "resolution": resolution / SECOND}


def quantile_of(numbers: Sequence[int], fraction: float) -> int:
    """Return a quantile of sorted numbers; 0 if there are none."""
    return numbers[min(len(numbers) - 1, int(fraction * len(numbers)))] if numbers else 0
