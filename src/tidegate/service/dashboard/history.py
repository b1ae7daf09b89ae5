"""The last five minutes, second by second, from counters that are kept in any case: nothing is added to a decision."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND
from tidegate.service.decisions.stats import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.service.decisions.decider import Decider

HISTORY_SECONDS: Final = 300  # seconds
MAX_POLICIES: Final = 200  # policies
DECIDING_VERBS: Final = ("acquire", "batch", "check", "peek", "reserve")  # verbs whose time is a decision's
MEDIAN, P99 = 0.5, 0.99


class PolicyHistory:
    """One policy: calls admitted and denied in each second, and how many were waiting at its end."""

    __slots__ = ("admitted", "denied", "last", "waiting")

    def __init__(self, slots: int) -> None:
        """Begin with nothing, for as many seconds as the others have."""
        self.admitted: deque[int] = deque([0] * slots, maxlen=HISTORY_SECONDS)
        self.denied: deque[int] = deque([0] * slots, maxlen=HISTORY_SECONDS)
        self.waiting: deque[int] = deque([0] * slots, maxlen=HISTORY_SECONDS)
        self.last = (0, 0)

    def add(self, slots: int, admitted: int, denied: int, waiting: int) -> None:
        """Take counts for so many seconds that have passed since the last."""
        before, self.last = self.last, (admitted, denied)
        self.admitted.extend(spread(admitted - before[0], slots))
        self.denied.extend(spread(denied - before[1], slots))
        self.waiting.extend([waiting] * slots)


class DecisionHistory:
    """All policies, and how long decisions took. `tick` is the second of the steady clock that is written next."""

    def __init__(self, decider: Decider) -> None:
        """Begin now."""
        self._decider = decider
        self._clock = decider.store.clock
        self.tick = self._clock.steady() // SECOND
        self.tracks: dict[str, PolicyHistory] = {}
        self.median: deque[int | None] = deque(maxlen=HISTORY_SECONDS)  # microseconds; None: there was no request
        self.rare: deque[int | None] = deque(maxlen=HISTORY_SECONDS)
        self._counts = [0] * (len(LATENCY_BUCKETS) + 1)

    def sample(self) -> None:
        """Write the seconds that have passed, if any have."""
        tick = self._clock.steady() // SECOND
        passed = tick - self.tick
        if passed <= 0:
            return
        self.tick = tick
        slots = min(passed, HISTORY_SECONDS)
        waiting = self._decider.waiting_by_policy()
        for name, count in self._decider.stats.counts.items():
            track = self.tracks.get(name)
            if track is None:
                if len(self.tracks) >= MAX_POLICIES:
                    continue
                track = self.tracks[name] = PolicyHistory(len(self.median))
            track.add(slots, count.allowed + count.shadow, count.denied, waiting.get(name, 0))
        self._time(slots)

    def _time(self, slots: int) -> None:
        counts = [0] * len(self._counts)
        for verb in DECIDING_VERBS:
            latency = self._decider.stats.latency.get(verb)
            if latency is not None:
                counts = [a + b for a, b in zip(counts, latency.counts, strict=True)]
        new = [after - before for after, before in zip(counts, self._counts, strict=True)]
        self._counts = counts
        self.median.extend([quantile(new, MEDIAN)] * slots)
        self.rare.extend([quantile(new, P99)] * slots)

    def after(self, since: int | None) -> int:
        """Tell how many of the newest seconds somebody lacks who has those before `since`."""
        have = len(self.median)
        return have if since is None else min(have, max(0, self.tick - since))


def newest(values: Sequence[int | None] | deque[int] | deque[int | None], count: int) -> list[int | None]:
    """Give the last so many."""
    return list(values) if count == len(values) else [values[place] for place in range(-count, 0)]


def spread(amount: int, slots: int) -> Iterable[int]:
    """Share an amount out over seconds."""
    if slots == 1:
        return (amount,)
    return (amount * (i + 1) // slots - amount * i // slots for i in range(slots))


def quantile(counts: Sequence[int], share: float) -> int | None:
    """Tell below which time, in microseconds, a share of a histogram's requests lies: within its bucket, evenly."""
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    edges = (0, *LATENCY_BUCKETS, LATENCY_BUCKETS[-1])
    for number, reached in enumerate(accumulate(counts)):
        if reached >= wanted and counts[number]:
            low, high = edges[number], edges[number + 1]
            return round(high - (high - low) * (reached - wanted) / counts[number])
    return LATENCY_BUCKETS[-1]
