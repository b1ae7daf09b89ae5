"""The oracle of the soak: what must be charged to each account, and how much of it is in doubt.

An answer that says allowed is charged from the moment it was received at the latest. A settlement gives permits back
from the moment it was sent at the earliest. All windows of the soak are longer than a run, so at every instant the
charges received less the settlements sent must stay within the quota: anything above was admitted too much.

At the end of a round, what the store says is used must equal charges less settlements, except for what is in doubt:

- a charge without an answer, because the service or the store was down, or the client closed the connection at once or
  was killed: it may be charged (`may_add`);
- a settlement without an answer may have been done (`may_take`); one that was answered while the store was down is
  carried out later, or lost with its process (`may_add`);
- a call that waits asks the store again if an answer of the store got lost, so it may be charged twice, or charged and
  denied (`may_add`).

A client that hangs up while service and store run is not in doubt: it keeps reading until the service has closed the
connection. If no answer came, nothing may stay charged. But the service closes the connection at once, then waits for
the reply of the store and refunds the charge. If the reply or the refund is lost, with the service or with a connection
to the store, the charge stays by design: a refund that is not due would admit too much. So such a call is under way for
`MAX_REFUND` after its client has seen the end of the connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.soak.effects import WAITING
from tests.soak.journal import ANSWERED, GONE, HUNG_UP
from tests.soak.targets import DEADLINE
from tidegate.core import parse_period

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.soak.effects import Account
    from tests.soak.journal import Event

FOREVER: Final = 2**63
MAX_REFUND: Final = 2 * 1000 * parse_period(DEADLINE)  # nanoseconds: the store has a deadline for reply and refund each


class Outage(NamedTuple):
    """Times between which an answer may get lost through no fault of the client."""

    kind: str
    begin: int
    end: int


@dataclass(slots=True)
class Call:
    """One effect of one request on an account."""

    verb: str
    amount: int
    sent: int
    ended: int = FOREVER
    how: str = GONE
    actual: int | None = None

    def overlaps(self, outages: Sequence[Outage]) -> bool:
        """Tell whether the service or the store was down while this was under way."""
        ended = self.ended + (MAX_REFUND if self.how == HUNG_UP else 0)
        return any(outage.begin <= ended and self.sent <= outage.end for outage in outages)


@dataclass
class Balance:
    """The recorded calls of one account."""

    calls: list[Call] = field(default_factory=list)
    used: list[Call] = field(default_factory=list)  # served from leases
    charged: int = 0  # by answers
    given_back: int = 0
    may_add: int = 0
    may_take: int = 0
    hung_up: int = 0  # permits asked for by clients that hung up without an answer while all was well

    def add(self, call: Call, outages: Sequence[Outage]) -> None:
        """Count a call."""
        self.calls.append(call)
        down = call.overlaps(outages)
        if call.actual is None and call.how == HUNG_UP and not down:
            self.hung_up += max(0, call.amount)
        elif call.actual is None:
            self.may_add += max(0, call.amount)
            self.may_take += max(0, -call.amount)
        elif call.actual >= 0:
            self.charged += call.actual
            self.may_add += call.amount if down and call.verb.endswith(WAITING) else 0
        else:
            self.given_back -= call.actual
            self.may_add -= call.actual if down else 0

    @property
    def expected(self) -> int:
        """What the store must say is used, but for what is in doubt."""
        return self.charged - self.given_back

    @property
    def used_from_leases(self) -> int:
        """How many permits taken ahead were used."""
        return sum(call.amount for call in self.used)

    def holds(self, charged: int) -> bool:
        """Tell whether what the store says can be."""
        return self.expected - self.may_take <= charged <= self.expected + self.may_add

    def peak(self) -> int:
        """Give the most permits that were certainly out at one instant."""
        changes = [(call.ended, 1, call.actual) for call in self.calls if call.actual is not None and call.actual > 0]
        changes += [(call.sent, 0, call.amount) for call in self.calls if call.amount < 0 and call.actual != 0]
        return highest(changes)

    def peak_beyond_refill(self, permits: int, period: int) -> int:
        """Give the most permits admitted within any time, less what a bucket refilled in it: at most its burst."""
        found = 0
        allowed = [call for call in self.calls if call.actual]
        for first in allowed:
            # Whatever was sent after `first` was sent, and had been received by the time of `last`.
            later = sorted((call.ended, call.actual or 0) for call in allowed if call.sent >= first.sent)
            total = 0
            for ended, amount in later:
                total += amount
                found = max(found, total - (ended - first.sent) * permits // period)
        return found


def highest(changes: Iterable[tuple[int, int, int]]) -> int:
    """Add changes up in the order of time; at the same time, what is given back comes first."""
    total = found = 0
    for _, _, amount in sorted(changes):
        total += amount
        found = max(found, total)
    return found


def read_events(journals: Iterable[Iterable[Event]], outages: Sequence[Outage]) -> dict[Account, Balance]:
    """Work out the balance of every account from the journals of all clients."""
    balances: dict[Account, Balance] = {}
    for events in journals:
        for account, call in read_calls(events, balances):
            balances.setdefault(account, Balance()).add(call, outages)
    return balances


def read_calls(events: Iterable[Event], balances: dict[Account, Balance]) -> list[tuple[Account, Call]]:
    """Pair what was sent with how it ended; what was served from a lease goes to its balance at once."""
    calls: dict[int, list[tuple[Account, Call]]] = {}
    for kind, number, *rest in events:
        if kind == "sent":
            sent, verb, effects = rest
            calls[number] = [((policy, key), Call(verb, amount, sent)) for policy, key, amount in effects]
        elif kind == "ended":
            ended, how, amounts = rest
            for place, (_, call) in enumerate(calls[number]):
                call.ended, call.how = ended, how
                call.actual = amounts[place] if how == ANSWERED else None
        else:
            policy, key, cost, sent, received = rest
            used = balances.setdefault((policy, key), Balance()).used
            used.append(Call("lease", cost, sent, received, ANSWERED, cost))
    return [one for of_call in calls.values() for one in of_call]
