"""Compares two sets of rules on the same requests, decision by decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.plan._replay import Replays
from tidegate.plan._report import describe_log, describe_replay, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import tzinfo

    from tidegate.plan._logs.stream import LogSummary, Row
    from tidegate.plan._replay import Replay
    from tidegate.plan._report import ClientNames

MAX_ROWS: Final = 50  # of clients and endpoints that a report lists
MAX_ENDPOINTS: Final = 1000
MONEY: Final = "usd_micros"


class Changed:
    """Requests that only the new rules deny, and requests that only the old rules deny."""

    __slots__ = ("allowed", "denied")

    def __init__(self) -> None:
        """Start at zero."""
        self.denied: int = 0
        self.allowed: int = 0


class Comparison(Replays):
    """Replays old and new rules side by side, and counts the decisions that differ."""

    def __init__(self, old: Replay, new: Replay) -> None:
        """Compare these."""
        super().__init__([old, new])
        self.total: Changed = Changed()
        self.money: Changed = Changed()  # in millionths
        self.clients: dict[str, Changed] = {}
        self.endpoints: dict[str, Changed] = {}

    def feed(self, rows: Iterable[Row]) -> None:
        """Decide about rows twice."""
        old, new = self.replays
        for row in rows:
            before, after = old.decide(row).allowed, new.decide(row).allowed
            if before is not after:
                self._count(row, denied=not after)

    def _count(self, row: Row, *, denied: bool) -> None:
        _, senders, subjects, _, _, cost = row
        client = str(senders[1].counts.key)
        endpoint = subjects[1].subject.endpoint
        if endpoint not in self.endpoints and len(self.endpoints) >= MAX_ENDPOINTS:
            endpoint = "(other endpoints)"
        money = 0 if isinstance(cost, int) else cost.get(MONEY, 0)
        counted = [
            self.total,
            self.clients.setdefault(client, Changed()),
            self.endpoints.setdefault(endpoint, Changed()),
        ]
        for changed, amount in (*((each, 1) for each in counted), (self.money, money)):
            if denied:
                changed.denied += amount
            else:
                changed.allowed += amount

    def describe(self, log: LogSummary, names: ClientNames, zone: tzinfo) -> dict[str, Any]:
        """Return the report."""
        old, new = (describe_replay(replay.result, log, names, zone) for replay in self.replays)
        return {
            "log": describe_log(log, names),
            "from": new["from"],
            "until": new["until"],
            "rules": {"old": old["rules"], "new": new["rules"]},
            "old": old["totals"],
            "new": new["totals"],
            "newly_denied": self._describe("denied", new["totals"]),
            "newly_allowed": self._describe("allowed", new["totals"]),
            "clients": [{"client": names.show(name), **changes} for name, changes in describe_changes(self.clients)],
            "endpoints": [{"endpoint": name, **changes} for name, changes in describe_changes(self.endpoints)],
            "policies": new["policies"],
            "timeline": {**new["timeline"], "denied_before": old["timeline"]["denied"]},
            "notes": list(dict.fromkeys([*old["notes"], *new["notes"]])),
        }

    def _describe(self, name: str, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return how many requests changed in one direction, of how many clients, and their money."""
        requests = getattr(self.total, name)
        clients = sum(getattr(changed, name) > 0 for changed in self.clients.values())
        return {
            "requests": requests,
            "requests_share": share(requests, totals["requests"]),
            "clients": clients,
            "clients_share": share(clients, totals["clients"]),
            "usd": getattr(self.money, name) / 1_000_000,
        }


def describe_changes(found: Mapping[str, Changed]) -> list[tuple[str, dict[str, int]]]:
    """Return what changed, the largest changes first."""
    rows = sorted(found.items(), key=lambda item: (-item[1].denied, -item[1].allowed, item[0]))[:MAX_ROWS]
    return [(name, {"newly_denied": each.denied, "newly_allowed": each.allowed}) for name, each in rows]
