"""Which part of every limit this process may admit while the store is unavailable.

Each process keeps one small value in the store: its part, in units of 1/WHOLE_PARTS. A process reads the values of all
others from time to time, and moves its own part towards WHOLE_PARTS divided by their number. It lowers it at once.
It raises its part only into what no other value has: it writes the new part, reads all values again, and takes the part
back if together they are more than WHOLE_PARTS. So the parts of all processes never add up to more than the whole,
whichever of them reach the store, and whichever answers are lost. A write names the value that it replaces, so a
request that arrives late changes nothing.

A value ends with its time to live. Its process stops using its part so long before that everything that it has admitted
has left its window when the value ends (`horizon` is the longest window), and does not lower its part while there is
something left: it looks for that and lowers the part under the lock of the decisions. A killed process therefore keeps
its part for at most VALUE_TTL and the longest window; this matters only during an outage.

A process whose value is gone before its end concludes that the store has lost its data. It writes its part again, and
does not raise it before the other processes have written theirs.

The number of processes can be configured instead: then nothing is stored or read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND
from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._values import MAX_TTL, Collection

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.stores._base import Store
    from tidegate.stores._outage.fallback import Fallback

WHOLE_PARTS: Final = 720_720  # divisible by every number up to 16
PROCESSES: Final = Collection("tidegate.processes")
VALUE_TTL: Final = 600 * SECOND
TTL_MARGIN: Final = 10 * SECOND  # a process stops using its part so long before its value ends
RENEW_BEFORE: Final = 300 * SECOND  # a value is written again when it has less than this left
READ_INTERVAL: Final = 20 * SECOND  # between two looks at the other processes
LOSS_INTERVAL: Final = 2 * READ_INTERVAL  # after which every process has written its value again
SETTLE_INTERVAL: Final = 10 * SECOND  # the same, while the parts are not equal yet


class ProcessShare:
    """The part of one process, which `name` identifies. `processes` is how many there are; 0: unknown.

    `steady` returns the steady time in microseconds.
    """

    def __init__(self, name: str, processes: int | None, steady: Callable[[], int]) -> None:
        """Start without a part, or with that of a configured number of processes."""
        self.name = name
        self.processes: int = processes or 0
        self.configured: bool = processes is not None
        self.due: int = 0  # when to synchronize next, in steady time
        self._steady = steady
        self._part = WHOLE_PARTS // processes if processes else 0
        self._ends = 0  # when the value ends, in steady time; 0: there is none
        self._horizon = 0  # the longest window for which the value was written
        self._writes = 0
        self._raise_due = 0  # when the part may be raised again, in steady time

    def usable(self, window: int = 0) -> int:
        """Return how many units of WHOLE_PARTS this process may use now, of a policy with this longest window."""
        if self.configured:
            return self._part
        if window > self._horizon or self._steady() >= self._ends - TTL_MARGIN - self._horizon:
            return 0
        return self._part

    def synchronize(self, store: Store, horizon: int, fallback: Fallback) -> None:
        """Move the part towards a fair one. Raises what a call to the store raises.

        `horizon` is the longest window of all policies. While something that `fallback` has admitted is still in its
        window, the part is not lowered.
        """
        self.due = self._steady() + SETTLE_INTERVAL
        if self._steady() >= self._ends - TTL_MARGIN:
            self._part = 0  # others may have taken it
        own, others = self._read(store)
        self.processes = len(others) + 1
        if own is None and self._steady() < self._ends:  # the store has lost its data
            self._raise_due = self._steady() + LOSS_INTERVAL
        fair = WHOLE_PARTS // self.processes
        target = max(0, min(fair, WHOLE_PARTS - sum(others.values())))
        if self._steady() < self._raise_due:
            target = min(target, self._part)
        with fallback.lock:
            target = max(target, self._part) if fallback.held else target
            self._part = min(self._part, target)
        ends_soon = self._ends - self._horizon - self._steady() < RENEW_BEFORE
        try:
            if own is None or read_part(own) != target or ends_soon or horizon > self._horizon:
                own = self._write(store, target, own, horizon)
            if target > self._part:
                if sum(self._read(store)[1].values()) + target <= WHOLE_PARTS:
                    self._part = target
                else:  # another process was faster
                    self._write(store, self._part, own, horizon)
        except ValueConflict:  # an earlier write, whose answer was lost, has arrived
            return
        except CollectionFull:  # too many values of killed processes: no part until they end
            return
        if self._part == fair:
            self.due = self._steady() + READ_INTERVAL

    def leave(self, store: Store, *, held: bool) -> None:
        """Free the part for the other processes, unless it is `held`: then its value ends by itself."""
        if self._ends and not held:
            store.delete_value(PROCESSES, self.name)
        self._ends = 0

    def _read(self, store: Store) -> tuple[bytes | None, dict[str, int]]:
        """Return the value of this process, and the parts of all others."""
        values = store.list_values(PROCESSES)
        own = values.pop(self.name, None)
        return None if own is None else own.data, {name: read_part(value.data) for name, value in values.items()}

    def _write(self, store: Store, part: int, before: bytes | None, horizon: int) -> bytes:
        since, ttl = self._steady(), min(VALUE_TTL + horizon, MAX_TTL)
        self._writes += 1
        data = b"%d %d" % (part, self._writes)
        store.put_value(PROCESSES, self.name, data, ttl / SECOND, before)
        self._ends, self._horizon = since + ttl, horizon
        return data


def read_part(data: bytes) -> int:
    """Return the part in a value."""
    return int(data.partition(b" ")[0])
