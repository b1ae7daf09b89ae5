"""Decisions and latencies of the last 24 hours, in three resolutions, in bounded memory.

They are computed from counters that the service has anyway, so a decision costs no more. Each tier divides the time
into steps of one length: a second, ten seconds or a minute. A step ends when the steady clock passes a multiple of its
length, so all workers of a service have the same steps. A column is an array of 32-bit integers: 200 policies take
about 5 MB, and the denied keys of all minutes at most 10 MB more.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.observe._histogram import quantile
from tidegate.service._decisions.denied_keys import merge_top
from tidegate.service._decisions.stats import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tidegate._runtime.clock import Clock
    from tidegate.observe._histogram import Histogram
    from tidegate.service._dashboard.status import StatusSource
    from tidegate.service._decisions.stats import Totals

MINUTE: Final = 60  # seconds
HISTORY_SECONDS: Final = 300  # of the finest tier
TIERS: Final = ((1, HISTORY_SECONDS), (10, 360), (MINUTE, 1440))  # seconds of a step, and the number of steps
MAX_POLICIES: Final = 200
MAX_VALUE: Final = 2**32 - 1
MAX_MINUTE_TOP: Final = 10  # denied keys that are kept for each minute
MAX_TOP_BYTES: Final = 1_500_000  # of the keys of all minutes, in UTF-8
MAX_MARKS: Final = 200
DECIDING_VERBS: Final = ("acquire", "batch", "check", "peek", "reserve")  # verbs whose latency is shown
MEDIAN, P99 = 0.5, 0.99
RUNNING, STORE_LOST = 1, 2  # bits of the state of a step; 0: the service did not run


class RuleMark(NamedTuple):
    """When the rules changed, or the service started."""

    at: int  # milliseconds since 1970
    kind: str  # "rules" or "start"
    text: str


class HistoryCopy(NamedTuple):
    """A copy of the history."""

    tiers: tuple[HistoryTier, ...]
    tops: list[tuple[int, list[dict[str, Any]]]]
    marks: list[RuleMark]


class Column:
    """The values of the last steps, as integers from 0 to 2**32 - 1."""

    __slots__ = ("_length", "values")

    def __init__(self, length: int, steps: int = 0) -> None:
        """Fill the past steps with zeros, so that all columns of a tier have the same length."""
        self._length = length
        self.values: array[int] = array("I", bytes(4 * steps))

    def extend(self, values: Iterable[int]) -> None:
        """Add steps; the oldest are dropped."""
        self.values.extend(min(MAX_VALUE, max(0, value)) for value in values)
        if len(self.values) > self._length:
            del self.values[: len(self.values) - self._length]

    def prepend(self, values: Iterable[int]) -> None:
        """Add steps before the known ones."""
        self.values = array("I", [min(MAX_VALUE, max(0, value)) for value in values]) + self.values

    def last(self, steps: int) -> list[int]:
        """Return the last steps."""
        return self.values[len(self.values) - steps :].tolist() if steps else []


class PolicyHistory:
    """The calls of one policy: admitted and denied in each step, and waiting at the end of each step."""

    __slots__ = ("admitted", "denied", "last_counts", "waiting")

    def __init__(self, length: int, steps: int) -> None:
        """Start after this many steps."""
        self.admitted: Column = Column(length, steps)
        self.denied: Column = Column(length, steps)
        self.waiting: Column = Column(length, steps)
        self.last_counts: tuple[int, int] = (0, 0)

    @property
    def columns(self) -> tuple[Column, Column, Column]:
        """The columns: admitted, denied, waiting."""
        return self.admitted, self.denied, self.waiting

    def add(self, steps: int, admitted: int, denied: int, waiting: int) -> None:
        """Add the steps since the last call; `admitted` and `denied` are totals, `waiting` is the current number."""
        before, self.last_counts = self.last_counts, (admitted, denied)
        self.admitted.extend(spread(admitted - before[0], steps))
        self.denied.extend(spread(denied - before[1], steps))
        self.waiting.extend([waiting] * steps)


class HistoryTier:
    """The history in steps of one length. `tick` is the number of the current step, by the steady clock."""

    def __init__(self, step: int, length: int, steady: int) -> None:
        """Start with the current step."""
        self.step = step
        self.length = length
        self.tick: int = steady // (step * SECOND)
        self.total: PolicyHistory = PolicyHistory(length, 0)
        self.policies: dict[str, PolicyHistory] = {}
        self.median: Column = Column(length)  # microseconds; 0: no request
        self.p99: Column = Column(length)
        self.state: Column = Column(length)
        self._latency_counts = [0] * (len(LATENCY_BUCKETS) + 1)

    @property
    def steps(self) -> int:
        """The number of steps that are known."""
        return len(self.state.values)

    def add(self, steady: int, totals: Totals, waiting: Mapping[str, int], *, store_lost: bool) -> int:
        """Add the steps that have passed since the last call; return their number."""
        tick = steady // (self.step * SECOND)
        passed = tick - self.tick
        if passed <= 0:
            return 0
        self.tick = tick
        steps = min(passed, self.length)
        known = self.steps
        admitted = denied = 0
        for name, count in totals.counts.items():
            admitted, denied = admitted + count.admitted, denied + count.refused
            policy = self.policies.get(name)
            if policy is None:
                if len(self.policies) >= MAX_POLICIES:
                    continue
                policy = self.policies[name] = PolicyHistory(self.length, known)
            policy.add(steps, count.admitted, count.refused, waiting.get(name, 0))
        self.total.add(steps, admitted, denied, sum(waiting.values()))
        self.state.extend([RUNNING | STORE_LOST * store_lost] * steps)
        self._add_latency(steps, totals.latency)
        return steps

    def _add_latency(self, steps: int, latencies: Mapping[str, Histogram]) -> None:
        counts = [0] * len(self._latency_counts)
        for verb in DECIDING_VERBS:
            latency = latencies.get(verb)
            if latency is not None:
                counts = [a + b for a, b in zip(counts, latency.counts, strict=True)]
        new = [after - before for after, before in zip(counts, self._latency_counts, strict=True)]
        self._latency_counts = counts
        self.median.extend([quantile(LATENCY_BUCKETS, new, MEDIAN) or 0] * steps)
        self.p99.extend([quantile(LATENCY_BUCKETS, new, P99) or 0] * steps)

    def count_since(self, since: int | None) -> int:
        """Return how many steps there are from `since` on; all if it is None."""
        return self.steps if since is None else min(self.steps, max(0, self.tick - since))

    def all_columns(self) -> Iterator[Column]:
        """Iterate over the columns of the service and of all policies."""
        yield from (self.median, self.p99, self.state, *self.total.columns)
        for policy in self.policies.values():
            yield from policy.columns


class DecisionHistory:
    """The history of all policies in three tiers, with the keys that were denied most and the changes of the rules."""

    def __init__(self, source: StatusSource, clock: Clock) -> None:
        """Start with the current second."""
        self.source = source
        self._clock = clock
        self.tiers: tuple[HistoryTier, ...] = tuple(HistoryTier(*tier, clock.steady()) for tier in TIERS)
        self.tops: deque[tuple[int, list[dict[str, Any]]]] = deque(maxlen=TIERS[-1][1])  # by the tick of the minute
        self._top_bytes = 0
        self.marks: deque[RuleMark] = deque(maxlen=MAX_MARKS)

    @property
    def seconds(self) -> HistoryTier:
        """The finest tier: the last five minutes."""
        return self.tiers[0]

    @property
    def minutes(self) -> HistoryTier:
        """The coarsest tier: the last 24 hours."""
        return self.tiers[-1]

    @property
    def tick(self) -> int:
        """The current second of the steady clock."""
        return self.seconds.tick

    def sample(self) -> bool:
        """Add the steps that have passed since the last sample; return whether a minute has ended."""
        steady = self._clock.steady()
        if steady // SECOND <= self.tick:
            return False
        totals, waiting = self.source.totals(), self.source.waiting_by_policy()
        store_lost = self.source.store_lost()
        passed = [tier.add(steady, totals, waiting, store_lost=store_lost) for tier in self.tiers]
        if passed[-1]:
            self.add_top(self.minutes.tick - 1, self.source.top_denied())
        return bool(passed[-1])

    def add_top(self, minute: int, rows: list[dict[str, Any]]) -> None:
        """Keep the keys that were denied most in a minute."""
        if not rows:
            return
        ended = [{**row, "denied": row["denied"] - row["this_minute"], "this_minute": 0} for row in rows]
        kept = merge_top((row for row in ended if row["denied"]), MAX_MINUTE_TOP)
        if len(self.tops) == self.tops.maxlen:
            self._top_bytes -= count_key_bytes(self.tops.popleft()[1])
        self.tops.append((minute, kept))
        self._top_bytes += count_key_bytes(kept)
        while self._top_bytes > MAX_TOP_BYTES:
            self._top_bytes -= count_key_bytes(self.tops.popleft()[1])

    def clear_details(self) -> None:
        """Forget the denied keys and the marks."""
        self.tops.clear()
        self.marks.clear()
        self._top_bytes = 0

    def top_between(
        self, begin: int, end: int, current: list[dict[str, Any]], policy: str = "", max_rows: int = 20
    ) -> list[dict[str, Any]]:
        """Return the keys that were denied most in the minutes that a range of time overlaps.

        `begin` and `end` are milliseconds since 1970; `current` has the keys of the current minute (`top_denied`).
        """
        last_end, tick = self.end_of(self.minutes), self.minutes.tick
        first, last = (tick + (at - last_end) // (MINUTE * 1000) for at in (begin, end))
        rows = [row for minute, top in self.tops if first <= minute <= last for row in top]
        if last >= tick:
            rows += [{**row, "denied": row["this_minute"]} for row in current if row["this_minute"]]
        return merge_top((row for row in rows if not policy or row["policy"] == policy), max_rows)

    def add_mark(self, kind: str, text: str) -> None:
        """Record that the rules changed, or that the service started."""
        self.marks.append(RuleMark(self._clock.ns() // 1_000_000, kind, text))

    def end_of(self, tier: HistoryTier) -> int:
        """Return when the last step of a tier ended, in milliseconds since 1970."""
        since_end = self._clock.steady() - tier.tick * tier.step * SECOND
        return (self._clock.ns() // 1000 - since_end) // 1000

    # ---- copies ------------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Return a copy for another process of the service."""
        return zlib.compress(pickle.dumps(HistoryCopy(self.tiers, list(self.tops), list(self.marks))), 1)

    @staticmethod
    def read_dump(data: bytes) -> HistoryCopy:
        """Read a copy, which another process of this service has made."""
        return pickle.loads(zlib.decompress(data))  # type: ignore[no-any-return]  # noqa: S301 - `dump` has written it

    def restore(self, copy: HistoryCopy) -> None:
        """Continue a copy."""
        self.tiers = copy.tiers
        self.clear_details()
        for minute, rows in copy.tops:
            self.add_top(minute, rows)
        self.marks.extend(copy.marks)

    @property
    def byte_size(self) -> int:
        """The memory that the columns take."""
        return sum(column.values.itemsize * len(column.values) for tier in self.tiers for column in tier.all_columns())


def count_key_bytes(rows: Iterable[dict[str, Any]]) -> int:
    """Return the size of the keys of rows: a string takes no more memory, except for its header."""
    return sum(len("".join(row["key"]).encode("utf-8", "surrogatepass")) for row in rows)


def spread(amount: int, steps: int) -> Iterable[int]:
    """Distribute an amount evenly over steps."""
    if steps == 1:
        return (amount,)
    return (amount * (i + 1) // steps - amount * i // steps for i in range(steps))
