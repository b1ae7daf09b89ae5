"""A histogram of durations: how many of them fell into each bucket, and their sum, in a row of counters."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tidegate.observe._counters import Row
    from tidegate.observe._text_format import Sample

Buckets = tuple[int, ...]  # the upper bound of each, in microseconds; one more counts what is above the last


def row_width(buckets: Buckets) -> int:
    """Return how many integers a histogram needs: its counts, and the sum."""
    return len(buckets) + 2


class Histogram:
    """Counts durations in microseconds."""

    __slots__ = ("_buckets", "_row", "_start", "_sum")

    def __init__(self, buckets: Buckets, row: Row | None = None, start: int = 0) -> None:
        """Count in `row_width` integers of a row, from the index `start` on; without a row, in one of its own."""
        self._buckets = buckets
        self._row: Row = [0] * row_width(buckets) if row is None else row
        self._start = start
        self._sum = start + len(buckets) + 1

    def add(self, microseconds: int) -> None:
        """Count a duration."""
        row = self._row
        row[self._start + bisect_left(self._buckets, microseconds)] += 1
        row[self._sum] += microseconds

    @property
    def counts(self) -> list[int]:
        """The number of durations in each bucket."""
        return list(self._row[self._start : self._sum])

    @property
    def total(self) -> int:
        """The sum of all durations."""
        return self._row[self._sum]

    def quantile(self, fraction: float) -> int | None:
        """Return a quantile of the durations; see `quantile`."""
        return quantile(self._buckets, self.counts, fraction)

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[Sample]:
        """Yield the samples of a metric, in seconds."""
        sums = list(accumulate(self.counts))
        for bound, count in zip((*(str(bound / SECOND) for bound in self._buckets), "+Inf"), sums, strict=True):
            yield f"{name}_bucket", {**labels, "le": bound}, count
        yield f"{name}_sum", labels, self.total / SECOND
        yield f"{name}_count", labels, sums[-1]


def quantile(buckets: Buckets, counts: Sequence[int], fraction: float) -> int | None:
    """Return a quantile in microseconds, interpolated within its bucket; None if nothing was counted."""
    total = sum(counts)
    if not total:
        return None
    rank = fraction * total
    edges = (0, *buckets, buckets[-1])
    for index, reached in enumerate(accumulate(counts)):
        if reached >= rank and counts[index]:
            low, high = edges[index], edges[index + 1]
            return round(high - (high - low) * (reached - rank) / counts[index])
    return buckets[-1]
