"""Adds up the refusals and the cost of pool members in all workers, so that each of them shows those of the service.

Each worker writes its counts to the shared memory at every report. See `worker_stats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from tidegate.outbound.quota.account_report import list_members, member_key
from tidegate.service.runtime.worker_stats import POOL, add_up

if TYPE_CHECKING:
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.gate import AsyncGate
    from tidegate.policy import Key
    from tidegate.service.runtime.shared_memory import CounterRow
    from tidegate.service.runtime.worker_stats import NewRow, WorkerStatus

FIELDS: Final = ("refused", "cost_micros")


class SharedMemberCounts:
    """The refusals and the cost of pool members in one worker; it shows those of all workers."""

    def __init__(self, gate: AsyncGate, status: WorkerStatus, new_row: NewRow) -> None:
        """Write to rows of this worker what the accounts of a gate count."""
        self._gate = gate
        self._status = status
        self._new_row = new_row
        self._rows: dict[tuple[str, str], CounterRow] = {}
        # What is already in the rows. An idle account is dropped, and starts at zero when it is opened again.
        self._written: WeakKeyDictionary[Account, tuple[int, int]] = WeakKeyDictionary()

    def publish(self) -> None:
        """Write what was counted since the last call."""
        members: dict[Key, tuple[str, str]] = {
            member_key(member): (provider.name, member.name) for provider, member in list_members(self._gate)
        }
        for account in self._gate.accounts:
            label = members.get(account.key[:2])
            counts = account.refused, account.spent
            written = self._written.get(account, (0, 0))
            if label is not None and counts != written:
                row = self._open_row(label)
                for index, (now, before) in enumerate(zip(counts, written, strict=True)):
                    row.values[index] += now - before
                self._written[account] = counts

    def _open_row(self, label: tuple[str, str]) -> CounterRow:
        row = self._rows.get(label)
        if row is None:
            row = self._rows[label] = self._new_row((POOL, *label), len(FIELDS))
        return row

    def totals(self) -> dict[tuple[str, str], dict[str, int]]:
        """Return the counts of all workers, by pool and member; those of the others are as old as their reports."""
        self.publish()
        return {
            (labels[0], labels[1]): dict(zip(FIELDS, values, strict=True))
            for (kind, *labels), values in add_up(self._status.counter_areas).items()
            if kind == POOL
        }
