"""What a soak has counted, its violations, and the table of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.soak.effects import Account
    from tests.soak.ledger import Balance, Outage
    from tests.soak.service import Sample


@dataclass
class Totals:
    """Counts of one soak, in permits unless said otherwise."""

    name: str
    log: Path  # where violations are described with every call of their account
    rounds: int = 0
    calls: int = 0  # requests of the clients in the soak's own process
    killed: int = 0  # client processes
    answered: int = 0  # allowed by answers
    given_back: int = 0
    charged: int = 0  # by the store's account
    may_add: int = 0  # in doubt: answers that got lost
    may_take: int = 0
    hung_up: int = 0  # asked for by clients that hung up while service and store ran
    kept: dict[str, int] = field(default_factory=dict)  # charged beyond what is in doubt, by kind of call
    missing: int = 0  # not charged although answered
    over: int = 0  # admitted beyond a quota
    losses: int = 0  # times that a process lost the store without a fault of ours
    faults: dict[str, int] = field(default_factory=dict)  # rounds by kind of fault
    statuses: dict[int, int] = field(default_factory=dict)  # answers by status
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {"parent": [], "worker": []})
    violations: list[str] = field(default_factory=list)
    checked: dict[Account, tuple[int, int]] = field(default_factory=dict)  # between what its charge must stay

    def add(self, account: Account, balance: Balance, used: list[int]) -> tuple[int, int]:
        """Count the account of a round; give how many permits too many are charged, and how many too few."""
        self.answered += balance.charged
        self.given_back += balance.given_back
        self.charged += used[0]
        self.may_add += balance.may_add
        self.may_take += balance.may_take
        self.hung_up += balance.hung_up
        least, most = balance.expected - balance.may_take, balance.expected + balance.may_add
        kept, missing = max(0, max(used) - most), max(0, least - min(used))
        if kept:
            group = account[1].partition(":")[0]
            self.kept[group] = self.kept.get(group, 0) + kept
        self.missing += missing
        self.checked[account] = min(least, *used), max(most, *used)
        return kept, missing

    @property
    def difference(self) -> int:
        """What is charged and was not answered."""
        return self.charged - (self.answered - self.given_back)

    def report(self, place: str, account: Account, text: str, balance: Balance, outages: Sequence[Outage]) -> None:
        """Note a violation, and write everything about its account into the log."""
        policy, key = account
        self.violations.append(f"{place}: {policy} {key}: {text}")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{self.violations[-1]}\n")
            first = min((call.sent for call in balance.calls), default=0)
            for kind, begin, end in outages:
                log.write(f"    {(begin - first) / 1e6:.1f} to {(end - first) / 1e6:.1f} ms: OUTAGE: {kind}\n")
            for call in sorted(balance.calls, key=lambda call: call.sent):
                sent, ended = (call.sent - first) / 1e6, (call.ended - first) / 1e6
                actual = "unknown" if call.actual is None else call.actual
                log.write(f"    {sent:.1f} to {ended:.1f} ms: {call.verb} {call.amount:+d}: {call.how}, {actual}\n")

    def progress(self, kind: str) -> str:
        """Say in one line how far the soak is."""
        worker = self.samples["worker"][-1]
        return (
            f"{self.name}: round {self.rounds} ({kind}), {self.calls} calls, {self.answered} permits answered, "
            f"charged - answered {self.difference:+d} (in doubt +{self.may_add} -{self.may_take}), "
            f"kept {sum(self.kept.values())}, missing {self.missing}, over {self.over}, "
            f"{worker.memory >> 20} MB, {worker.descriptors} descriptors"
        )

    def row(self) -> list[str]:
        """Give the values of COLUMNS."""
        first, last = self.samples["worker"][0], self.samples["worker"][-1]
        memory = f"{first.memory >> 20} to {last.memory >> 20}"
        descriptors = f"{first.descriptors} to {last.descriptors}"
        kept = ", ".join(f"{group} {count}" for group, count in sorted(self.kept.items()))
        numbers = (self.rounds, self.calls, self.answered, self.given_back, self.charged, f"{self.difference:+d}")
        doubt = f"+{self.may_add} -{self.may_take}"
        more = (doubt, self.hung_up, sum(self.kept.values()), self.missing, self.over, self.losses, memory, descriptors)
        return [self.name, *map(str, (*numbers, *more, len(self.violations))), kept]


COLUMNS: Final = (
    "store", "rounds", "calls", "answered", "given back", "charged", "charged - answered", "in doubt", "hung up",
    "kept", "missing", "over", "store lost by itself", "worker MB", "descriptors", "violations", "kept by",
)  # fmt: skip


def table(results: list[Totals]) -> str:
    """Write the results, a column for each store."""
    rows = list(zip(COLUMNS, *(totals.row() for totals in results), strict=True))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
