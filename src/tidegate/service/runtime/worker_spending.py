"""Adds up the money warnings of all workers, so that each of them shows those of the whole service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.service.runtime.worker_stats import MONEY_WARNINGS, SharedCounter, add_up
from tidegate.spending.monitor import WarningCounts

if TYPE_CHECKING:
    from tidegate.service.runtime.worker_stats import NewRow, WorkerStatus


class SharedWarningCounts(SharedCounter[str], WarningCounts):
    """How often one worker reported each milestone; `totals` has the counts of all workers."""

    def __init__(self, counts: WarningCounts, status: WorkerStatus, new_row: NewRow) -> None:
        """Write the counts, and later ones, to rows of this worker."""
        super().__init__(MONEY_WARNINGS, new_row)
        self._status = status
        for percent, count in counts.items():
            self[percent] = count

    def totals(self) -> dict[str, int]:
        """Return the counts of all workers together."""
        rows = add_up(self._status.counter_areas).items()
        return {name[1]: values[0] for name, values in rows if name[0] == MONEY_WARNINGS}
