"""Selects the rows of a list on the dashboard, so that one policy cannot fill it."""

from __future__ import annotations

from collections import defaultdict
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROWS_PER_POLICY: Final = 3

T = TypeVar("T")


def select_rows(rows: Iterable[T], rank: Callable[[T], Any], policy: Callable[[T], str], max_rows: int) -> list[T]:
    """Return the rows with the highest rank, the highest first.

    Up to half of the places are for the first rows of each policy: if a policy is selected on the page, its rows are
    known even while another policy has more of them than the list can hold.
    """
    rows = list(rows)
    highest = nlargest(max_rows, rows, key=rank)
    if len(rows) <= max_rows:
        return highest
    groups = defaultdict(list)
    for row in rows:
        groups[policy(row)].append(row)
    if len(groups) == 1:
        return highest
    firsts = [row for group in groups.values() for row in nlargest(ROWS_PER_POLICY, group, key=rank)]
    kept = nlargest(max_rows // 2, firsts, key=rank)
    known = set(map(id, kept))
    kept += [row for row in highest if id(row) not in known][: max_rows - len(kept)]
    return sorted(kept, key=rank, reverse=True)
