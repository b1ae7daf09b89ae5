"""Learns how many tokens the calls of a model use: a quantile of recent sizes is the next estimate.

Three sizes are learned per model and tag: the tokens of an output, the tokens per thousand bytes of input, and the
tokens of output per second. If an output was cut off at its bound, its full length is unknown, and it is recorded as
twice its length. So an estimate that is too small grows within a few calls.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import Final

from tidegate._runtime.fork import fork_safe
from tidegate.core._bounds import MAX_INTEGER, SECOND

MAX_SAMPLES: Final = 200  # recent calls per model and tag
MIN_SAMPLES: Final = 5  # with fewer, there is no estimate
QUANTILE_SAMPLES: Final = 20  # with fewer, a quantile is unreliable: twice the largest size is assumed
MIN_SPEED_TOKENS: Final = 50  # of an output whose speed says something about others
MAX_LEARNED: Final = 1024  # models and tags that are kept
LearnedKey = tuple[str, str, str]  # domain, model, tag


class RecentSizes:
    """The sizes of the last calls, sorted."""

    __slots__ = ("_order", "_sorted")

    def __init__(self) -> None:
        """Start without samples."""
        self._order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, size: int) -> None:
        """Record a size; the oldest one is dropped."""
        self._order.append(size)
        insort(self._sorted, size)
        if len(self._order) > MAX_SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def quantile(self, percent: int) -> int | None:
        """Return the smallest size that this percentage of the calls did not exceed; None: too few are known."""
        count = len(self._sorted)
        if count < QUANTILE_SAMPLES:
            return None if count < MIN_SAMPLES else min(MAX_INTEGER, 2 * self._sorted[-1])
        return self._sorted[max(0, -(-count * percent // 100) - 1)]


class LearnedSizes:
    """Recent sizes by model and tag. Thread-safe; of this process only."""

    def __init__(self) -> None:
        """Start without samples."""
        self._outputs: OrderedDict[LearnedKey, RecentSizes] = OrderedDict()
        self._inputs: OrderedDict[LearnedKey, RecentSizes] = OrderedDict()
        self._speeds: OrderedDict[LearnedKey, RecentSizes] = OrderedDict()
        self._lock = fork_safe(threading.Lock())

    def __len__(self) -> int:
        """Return the number of models and tags with known outputs."""
        return len(self._outputs)

    def record(
        self, key: LearnedKey, output_tokens: int | None, length: int = 0, input_tokens: int | None = None
    ) -> None:
        """Record the tokens of an output, and those of an input of this number of bytes; None: unknown."""
        with self._lock:
            if output_tokens is not None:
                self._sizes(self._outputs, key).add(min(MAX_INTEGER, output_tokens))
            if input_tokens is not None and length > 0:
                self._sizes(self._inputs, key).add(-(-input_tokens * 1000 // length))

    def record_speed(self, key: LearnedKey, tokens: int, duration: int) -> None:
        """Record the tokens of an output that took this many microseconds."""
        if tokens >= MIN_SPEED_TOKENS:
            with self._lock:
                self._sizes(self._speeds, key).add(min(MAX_INTEGER, -(-tokens * SECOND // max(1, duration))))

    def fastest(self, key: LearnedKey) -> int | None:
        """Return the speed of the fastest of the recent outputs, in tokens per second; None: too few are known."""
        with self._lock:
            sizes = self._speeds.get(key)
            return None if sizes is None else sizes.quantile(100)

    def expect(
        self, key: LearnedKey, output_percent: int | None, length: int, input_percent: int | None
    ) -> tuple[int | None, int | None]:
        """Estimate the tokens of an output, and of an input of this number of bytes; None: too few are known.

        They are the tokens that these percentages of the calls did not exceed; without a percentage, None.
        """
        output = per_thousand = None
        with self._lock:
            if output_percent is not None and (sizes := self._outputs.get(key)) is not None:
                output = sizes.quantile(output_percent)
            if input_percent is not None and (sizes := self._inputs.get(key)) is not None:
                per_thousand = sizes.quantile(input_percent)
        return output, None if per_thousand is None else -(-length * per_thousand // 1000)

    def _sizes(self, learned: OrderedDict[LearnedKey, RecentSizes], key: LearnedKey) -> RecentSizes:
        """Return the sizes of a key, which becomes the last one to be dropped. The caller holds the lock."""
        sizes = learned.get(key)
        if sizes is None:
            sizes = learned[key] = RecentSizes()
            if len(learned) > MAX_LEARNED:
                learned.popitem(last=False)
        else:
            learned.move_to_end(key)
        return sizes
